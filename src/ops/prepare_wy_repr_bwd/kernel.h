// What prepare_wy_repr_bwd.cpp hands to the kernels.
#pragma once

#include "base/chunk_data.h"
#include "base/dispatch.h"

namespace tidegate::wy_stage {

struct Args {
  TypedHeads k, v, beta, A, dw, du, gc;
  TypedHeads dA;  // the result of da, an input of full
  TypedHeads dk, dv, dbeta, dg;
  int64_t C, K, V, group;  // group: value heads that read one key head
};

// scratch: floats that every run needs in its block. A run takes one chunk and all value heads of one key head.
struct Kernels {
  int64_t (*scratch)(const Args&) noexcept;
  void (*da)(const Args&, const ChunkSpan&, int64_t key_head, float* block) noexcept;
  void (*full)(const Args&, const ChunkSpan&, int64_t key_head, float* block) noexcept;
  void (*both)(const Args&, const ChunkSpan&, int64_t key_head, float* block) noexcept;
};

}  // namespace tidegate::wy_stage

TIDEGATE_KERNEL_TABLE(wy_stage::Kernels, prepare_wy_repr_bwd_kernels)
