// What chunk_scaled_dot_kkt.cpp hands to the kernels.
#pragma once

#include "base/chunk_data.h"
#include "base/dispatch.h"

namespace tidegate::kkt_stage {

struct Args {
  TypedHeads k, gc, beta, A0;  // gc may be absent
  int64_t C, K, group;         // group: value heads that read one key head
};

// scratch: floats that run needs in its block. run makes A0 of a chunk for all value heads of one key head.
struct Kernels {
  int64_t (*scratch)(const Args&) noexcept;
  void (*run)(const Args&, const ChunkSpan&, int64_t key_head, float* block) noexcept;
};

}  // namespace tidegate::kkt_stage

TIDEGATE_KERNEL_TABLE(kkt_stage::Kernels, chunk_scaled_dot_kkt_kernels)
