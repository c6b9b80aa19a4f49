#pragma once

#include "base/chunk_problem.h"

namespace tidegate::kkt_stage {

template <class Acc>
void reference(const ChunkProblem& p, const TensorView& k, const TensorView& gc, const TensorView& beta,
               const TensorView& A0);

}  // namespace tidegate::kkt_stage
