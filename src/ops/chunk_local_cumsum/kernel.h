// What chunk_local_cumsum.cpp hands to the kernels.
#pragma once

#include "base/chunk_data.h"
#include "base/dispatch.h"

namespace tidegate::cumsum_stage {

struct Args {
  Heads g, out;
  double scale, floor;  // floor -inf: none
  bool reverse;
};

// Heads that one task sums side by side: their chains of additions overlap.
inline constexpr int64_t kHeads = 8;

// Indexed by the type of g, then by the type of out (float, double). Heads [first, last) of a chunk, kHeads at most.
struct Kernels {
  void (*run[kDataTypes][2])(const Args&, const ChunkSpan&, int64_t first, int64_t last) noexcept;
};

}  // namespace tidegate::cumsum_stage

TIDEGATE_KERNEL_TABLE(cumsum_stage::Kernels, chunk_local_cumsum_kernels)
