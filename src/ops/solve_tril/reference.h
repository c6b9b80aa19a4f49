#pragma once

#include "base/chunk_problem.h"

namespace tidegate::solve_stage {

template <class Acc>
void reference(const ChunkProblem& p, const TensorView& A0, const TensorView& A);

}  // namespace tidegate::solve_stage
