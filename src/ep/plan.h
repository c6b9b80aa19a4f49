// Who sends what, and where it lands: pure functions of sizes and ids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tidegate/ep.h"

namespace tidegate::ep {

void check_config(const Config& config, int rank, int ranks);
std::vector<std::int64_t> expert_shares(const Config& config, std::int64_t ranks);

// Rows in a window lie this many bytes apart: whole cache lines, so that no line has two writers.
inline constexpr std::int64_t kLine = 64;
inline std::int64_t row_pitch(std::int64_t row_bytes) { return (row_bytes + kLine - 1) / kLine * kLine; }

// A window: control, then two slots, which generations use in turn. A slot: header, offsets [E+1], pairs [T*K],
// weights [T*K], scales [T] (of a dispatch) in the place of values [rows] (of a combine), then rows.
struct WindowLayout {
  std::int64_t pairs, row_capacity;                          // of one call; rows: most that a rank can receive
  std::int64_t offsets, src, weights, scales, values, rows;  // bytes from the beginning of a slot
  std::int64_t slot, bytes;                                  // size of a slot, of the window
};
WindowLayout window_layout(const Config& config, std::int64_t ranks, std::int64_t control_bytes,
                           std::int64_t header_bytes);

// The travelling pairs of one rank, sorted by expert: those of expert e are src[offsets[e]] .. src[offsets[e + 1] - 1],
// ascending.
struct SourcePairs {
  std::int64_t tokens;
  const std::int32_t* offsets;  // [E + 1]
  const std::int32_t* src;
  const float* weights;  // by pair; null: none
};

// Fills rank, place, rows and everything about received rows from the lists of all ranks. `handle` holds tokens and
// slots already.
void place_rows(Handle& handle, std::int64_t rank, std::span<const std::int64_t> expert_begin,
                std::span<const SourcePairs> sources);

// FNV-1a, to compare configurations and handles.
std::uint64_t hash_bytes(const void* data, std::size_t bytes, std::uint64_t seed = 1469598103934665603u);
template <class T>
std::uint64_t hash_list(std::span<const T> list, std::uint64_t seed) {
  return hash_bytes(list.data(), list.size_bytes(), seed);
}

}  // namespace tidegate::ep
