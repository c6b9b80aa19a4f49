#pragma once

#include "base/chunk_problem.h"

namespace tidegate::h_stage {

template <class Acc>
void reference(const ChunkProblem& p, const TensorView& k, const TensorView& w, const TensorView& u,
               const TensorView& gc, const TensorView& initial_state, const TensorView& h, const TensorView& v_new,
               const TensorView& final_state, bool state_v_first);

}  // namespace tidegate::h_stage
