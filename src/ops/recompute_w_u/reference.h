#pragma once

#include "base/chunk_problem.h"

namespace tidegate::wu_stage {

template <class Acc>
void reference(const ChunkProblem& p, const TensorView& k, const TensorView& v, const TensorView& beta,
               const TensorView& A, const TensorView& gc, const TensorView& w, const TensorView& u);

}  // namespace tidegate::wu_stage
