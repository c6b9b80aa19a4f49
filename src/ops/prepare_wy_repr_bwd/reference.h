#pragma once

#include "base/chunk_problem.h"

namespace tidegate::wy_stage {

struct Tensors {
  TensorView k, v, beta, A, dw, du, gc;
  TensorView dA;  // the result of da, an input of full
  TensorView dk, dv, dbeta, dg;
};

template <class Acc>
void reference_da(const ChunkProblem& p, const Tensors& t);
template <class Acc>
void reference_full(const ChunkProblem& p, const Tensors& t);
template <class Acc>
void reference_both(const ChunkProblem& p, const Tensors& t);

}  // namespace tidegate::wy_stage
