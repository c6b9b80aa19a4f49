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

// States [N,HV,K,V] or [N,HV,V,K] with their strides.
struct SequenceStates {
  void* data;  // null: absent
  int type;
  int64_t sequence, head, key, value;
};

// Columns of the state that one task carries through a sequence.
inline constexpr int64_t kStateColumns = 64;

}  // namespace tidegate
