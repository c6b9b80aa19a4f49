// What chunk_bwd_dv_local.cpp hands to the kernels.
#pragma once

#include "base/chunk_data.h"
#include "base/dispatch.h"

namespace tidegate::dv_local_stage {

struct Args {
  TypedHeads q, k, d_o, gc, dv;
  int64_t C, K, V, group;  // group: value heads that read one key head
  float scale;
};

// scratch: floats that run needs in its block. run makes dv of a chunk for all value heads of one key head.
struct Kernels {
  int64_t (*scratch)(const Args&) noexcept;
  void (*run)(const Args&, const ChunkSpan&, int64_t key_head, float* block) noexcept;
};

}  // namespace tidegate::dv_local_stage

TIDEGATE_KERNEL_TABLE(dv_local_stage::Kernels, chunk_bwd_dv_local_kernels)
