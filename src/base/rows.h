// Rows of a tensor [..., D]: where row r begins. Plain data, used by kernels and by the code that calls them.
#pragma once

#include <stdint.h>

namespace tidegate {

struct Rows {
  void* data;
  int rank;  // leading dimensions after merging those that step evenly; 0 or 1 is the fast case
  int64_t sizes[8];
  int64_t strides[8];
};

// Offset of row r, counted with the last leading dimension running fastest.
[[gnu::always_inline]] static inline int64_t row_offset(const Rows& rows, int64_t r) {
  if (rows.rank <= 1) {
    return rows.rank == 0 ? 0 : r * rows.strides[0];
  }
  int64_t offset = 0;
  for (int d = rows.rank - 1; d > 0; --d) {
    offset += r % rows.sizes[d] * rows.strides[d];
    r /= rows.sizes[d];
  }
  return offset + r * rows.strides[0];
}

template <class T>
[[gnu::always_inline]] static inline T* row_of(const Rows& rows, int64_t r) {
  return static_cast<T*>(rows.data) + row_offset(rows, r);
}

}  // namespace tidegate
