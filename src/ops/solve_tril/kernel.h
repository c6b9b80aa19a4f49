// What solve_tril.cpp hands to the kernels.
#pragma once

#include "base/chunk_data.h"
#include "base/dispatch.h"

namespace tidegate::solve_stage {

struct Args {
  TypedHeads A0, A;
  int64_t C;
};

// scratch: floats that run needs in its block. run inverts the triangle of one chunk and head.
struct Kernels {
  int64_t (*scratch)(const Args&) noexcept;
  void (*run)(const Args&, const ChunkSpan&, int64_t head, float* block) noexcept;
};

}  // namespace tidegate::solve_stage

TIDEGATE_KERNEL_TABLE(solve_stage::Kernels, solve_tril_kernels)
