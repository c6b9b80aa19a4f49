// What chunk_fwd_o.cpp hands to the kernels.
#pragma once

#include "base/chunk_data.h"
#include "base/dispatch.h"

namespace tidegate::o_stage {

struct Args {
  TypedHeads q, k, v_new, h, gc, o;
  int64_t C, K, V, group;  // group: value heads that read one key head
  int64_t h_pitch;         // from one K row of h to the next
  float scale;
};

// scratch: floats that run needs in its block. run makes o of a chunk for all value heads of one key head.
struct Kernels {
  int64_t (*scratch)(const Args&) noexcept;
  void (*run)(const Args&, const ChunkSpan&, int64_t key_head, float* block) noexcept;
};

}  // namespace tidegate::o_stage

TIDEGATE_KERNEL_TABLE(o_stage::Kernels, chunk_fwd_o_kernels)
