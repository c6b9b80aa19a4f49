// What chunk_gated_delta_rule_fwd_h.cpp hands to the kernels.
#pragma once

#include "base/chunk_data.h"
#include "base/dispatch.h"

namespace tidegate::h_stage {

struct Args {
  TypedHeads k, w, u, gc, h, v_new;
  SequenceStates initial, final;
  int64_t C, K, V, group;  // group: value heads that read one key head
  int64_t h_pitch;         // from one K row of h to the next
};

// scratch: floats that run needs in its block. run takes columns [first, first + kStateColumns) of one sequence and
// head through the `count` chunks of the sequence.
struct Kernels {
  int64_t (*scratch)(const Args&) noexcept;
  void (*run)(const Args&, int64_t sequence, const ChunkSpan* chunks, int64_t count, int64_t head, int64_t first,
              float* block) noexcept;
};

}  // namespace tidegate::h_stage

TIDEGATE_KERNEL_TABLE(h_stage::Kernels, chunk_gated_delta_rule_fwd_h_kernels)
