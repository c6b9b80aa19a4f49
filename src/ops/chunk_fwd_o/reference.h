#pragma once

#include "base/chunk_problem.h"

namespace tidegate::o_stage {

template <class Acc>
void reference(const ChunkProblem& p, const TensorView& q, const TensorView& k, const TensorView& v_new,
               const TensorView& h, const TensorView& gc, const TensorView& o, double scale);

}  // namespace tidegate::o_stage
