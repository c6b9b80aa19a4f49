// TensorView -> Rows, and how rows are cut into tasks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/rows.h"
#include "tidegate/tensor.h"

namespace tidegate {

// The first `leading` dimensions of t as rows. Neighbouring dimensions that step evenly become one.
inline Rows rows_of(const TensorView& t, int leading) {
  Rows rows{t.data, 0, {}, {}};
  for (int d = 0; d < leading; ++d) {
    if (t.sizes[d] == 1) {
      continue;
    }
    const int last = rows.rank - 1;
    if (last >= 0 && rows.strides[last] == t.strides[d] * t.sizes[d]) {
      rows.sizes[last] *= t.sizes[d];
      rows.strides[last] = t.strides[d];
    } else {
      rows.sizes[rows.rank] = t.sizes[d];
      rows.strides[rows.rank++] = t.strides[d];
    }
  }
  return rows;
}
inline Rows rows_of(const TensorView& t) { return t.defined() ? rows_of(t, t.rank - 1) : Rows{}; }

inline std::int64_t row_count(const TensorView& t) {
  std::int64_t n = 1;
  for (int d = 0; d + 1 < t.rank; ++d) {
    n *= t.sizes[d];
  }
  return n;
}

// Rows per task: about 32 Ki elements, enough to pay for handing a task to a thread. Depends on the width only.
inline std::int64_t rows_per_task(std::int64_t width) {
  return std::clamp<std::int64_t>(32768 / std::max<std::int64_t>(width, 1), 1, 1024);
}
inline std::int64_t task_count(std::int64_t rows, std::int64_t per_task) { return (rows + per_task - 1) / per_task; }

}  // namespace tidegate
