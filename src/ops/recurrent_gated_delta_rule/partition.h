// How the recurrence is cut into pieces of work: pure functions, tested in contract_test.cpp.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tidegate::recurrence {

// Every key head of every sequence is cut into `parts` pieces of its `tiles` tiles (all value heads of the key head).
// Columns never meet, so the cut does not change bits.
struct Partition {
  std::int64_t sequences, key_heads, tiles, parts;
  std::int64_t units() const { return sequences * key_heads * parts; }
};

// Unit number i: sequences outermost, then key heads. Tiles [first, last).
struct Place {
  std::int64_t sequence, key_head, first, last;
};
inline Place place_of(const Partition& p, std::int64_t i) {
  const std::int64_t part = i % p.parts;
  const std::int64_t head = i / p.parts;
  return {head / p.key_heads, head % p.key_heads, p.tiles * part / p.parts, p.tiles * (part + 1) / p.parts};
}

// A key head is cut only if there are too few of them: keys and queries are prepared once a piece. Four pieces a
// thread, so that the last one to be taken is a small share of the whole.
inline Partition partition(std::int64_t sequences, std::int64_t key_heads, std::int64_t tiles, std::int64_t threads) {
  const std::int64_t heads = std::max<std::int64_t>(sequences * key_heads, 1);
  const std::int64_t wanted = threads == 1 ? 1 : (4 * threads + heads - 1) / heads;
  return {sequences, key_heads, tiles, std::clamp<std::int64_t>(wanted, 1, tiles)};
}

}  // namespace tidegate::recurrence
