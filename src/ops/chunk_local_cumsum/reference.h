#pragma once

#include "base/chunk_problem.h"
#include "tidegate/chunk.h"

namespace tidegate::cumsum_stage {

template <class Acc>
void reference(const ChunkProblem& p, const TensorView& g, const TensorView& out,
               const ChunkLocalCumsumOptions& options);

}  // namespace tidegate::cumsum_stage
