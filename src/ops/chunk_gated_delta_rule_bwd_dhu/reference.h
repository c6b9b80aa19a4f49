#pragma once

#include "base/chunk_problem.h"

namespace tidegate::dhu_stage {

template <class Acc>
void reference(const ChunkProblem& p, const TensorView& q, const TensorView& k, const TensorView& w,
               const TensorView& d_o, const TensorView& dv, const TensorView& gc, const TensorView& dfinal_state,
               const TensorView& dh, const TensorView& dh0, const TensorView& dv2, double scale, bool state_v_first);

}  // namespace tidegate::dhu_stage
