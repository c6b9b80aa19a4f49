// What chunk_bwd_dqkwg.cpp hands to the kernels.
#pragma once

#include "base/chunk_data.h"
#include "base/dispatch.h"

namespace tidegate::dqkwg_stage {

struct Args {
  TypedHeads q, k, v_new, gc, h, d_o, dh, dv2;
  TypedHeads dq, dk, dw, dg;
  int64_t C, K, V, group;     // group: value heads that read one key head
  int64_t h_pitch, dh_pitch;  // from one K row of h or dh to the next
  float scale;
};

// scratch: floats that run needs in its block. run makes the gradients of a chunk for all value heads of one key head.
struct Kernels {
  int64_t (*scratch)(const Args&) noexcept;
  void (*run)(const Args&, const ChunkSpan&, int64_t key_head, float* block) noexcept;
};

}  // namespace tidegate::dqkwg_stage

TIDEGATE_KERNEL_TABLE(dqkwg_stage::Kernels, chunk_bwd_dqkwg_kernels)
