// What chunk_gated_delta_rule_bwd_dhu.cpp hands to the kernels.
#pragma once

#include "base/chunk_data.h"
#include "base/dispatch.h"

namespace tidegate::dhu_stage {

struct Args {
  TypedHeads q, k, w, d_o, dv, gc, dh, dv2;
  SequenceStates dfinal, dinitial;
  int64_t C, K, V, group;  // group: value heads that read one key head
  int64_t dh_pitch;        // from one K row of dh to the next
  float scale;
};

// scratch: floats that run needs in its block. run takes columns [first, first + kStateColumns) of one sequence and
// head through the `count` chunks of the sequence, from the last one to the first.
struct Kernels {
  int64_t (*scratch)(const Args&) noexcept;
  void (*run)(const Args&, int64_t sequence, const ChunkSpan* chunks, int64_t count, int64_t head, int64_t first,
              float* block) noexcept;
};

}  // namespace tidegate::dhu_stage

TIDEGATE_KERNEL_TABLE(dhu_stage::Kernels, chunk_gated_delta_rule_bwd_dhu_kernels)
