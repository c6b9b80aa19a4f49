#pragma once

#include "base/chunk_problem.h"

namespace tidegate::dv_local_stage {

template <class Acc>
void reference(const ChunkProblem& p, const TensorView& q, const TensorView& k, const TensorView& d_o,
               const TensorView& gc, const TensorView& dv, double scale);

}  // namespace tidegate::dv_local_stage
