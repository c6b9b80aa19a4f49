// What the two ways between nodes share.
#pragma once

#include <vector>

#include "ep/group.h"

namespace tidegate::ep {

inline std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

inline std::vector<std::int64_t> counts_of(const std::vector<std::vector<std::int32_t>>& lists) {
  std::vector<std::int64_t> counts;
  counts.reserve(lists.size());
  for (const auto& list : lists) {
    counts.push_back(static_cast<std::int64_t>(list.size()));
  }
  return counts;
}
inline std::int64_t total_of(const std::vector<std::int64_t>& counts) {
  std::int64_t total = 0;
  for (const std::int64_t n : counts) {
    total += n;
  }
  return total;
}

inline Terms terms_of(Op op, std::int64_t row_bytes, DType dtype) {
  Terms t;
  t.field[0] = static_cast<std::uint64_t>(op);
  t.field[1] = static_cast<std::uint64_t>(row_bytes);
  t.field[3] = static_cast<std::uint64_t>(dtype);
  return t;
}

}  // namespace tidegate::ep
