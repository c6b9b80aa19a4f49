// What the kernels of the chunk operators are given: tensors together with their types, and where a chunk lies.
#pragma once

#include "base/heads.h"

namespace tidegate {

// A tensor of tokens and heads whose type is known at run time only: 0 float, 1 bf16, 2 f16, as in kernel tables.
struct TypedHeads {
  Heads at;
  int type;
};

// Tokens [begin, begin + length) of a batch row.
struct ChunkSpan {
  int64_t sequence, row, begin, length;
  int64_t number;  // among the chunks of its row, which is where its state stands in h
};

}  // namespace tidegate
