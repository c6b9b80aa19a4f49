#pragma once

#include "base/chunk_problem.h"

namespace tidegate::dqkwg_stage {

struct Tensors {
  TensorView q, k, v_new, gc, h, d_o, dh, dv2;
  TensorView dq, dk, dw, dg;
};

template <class Acc>
void reference(const ChunkProblem& p, const Tensors& t, double scale);

}  // namespace tidegate::dqkwg_stage
