// What recompute_w_u.cpp hands to the kernels.
#pragma once

#include "base/chunk_data.h"
#include "base/dispatch.h"

namespace tidegate::wu_stage {

struct Args {
  TypedHeads k, v, beta, A, gc, w, u;
  int64_t C, K, V, group;  // group: value heads that read one key head
};

// scratch: floats that run needs in its block. run makes w and u of one chunk and value head.
struct Kernels {
  int64_t (*scratch)(const Args&) noexcept;
  void (*run)(const Args&, const ChunkSpan&, int64_t head, float* block) noexcept;
};

}  // namespace tidegate::wu_stage

TIDEGATE_KERNEL_TABLE(wu_stage::Kernels, recompute_w_u_kernels)
