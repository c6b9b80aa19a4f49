// How the fused operator is cut into pieces of work: a pure function, tested in plan_test.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tidegate/seqlens.h"

namespace tidegate::chunk_gated_delta_rule {

// Columns [first, last) of key head `key_head` over sequence `sequence`; see Unit.
struct Piece {
  std::int64_t sequence, key_head, first, last;
};

// columns: panels of all value heads of a key head. most: columns whose states fit the workspace.
// Every piece forms K K^T and Q K^T for itself, so a key head is cut only as far as the threads need it: no piece
// should hold more than a quarter of one thread's share of all tokens. Longest first, so that the last piece to be
// taken is a short one. The bits do not depend on the cut: columns never meet.
inline std::vector<Piece> plan(const SeqLens& seq, std::int64_t key_heads, std::int64_t columns, std::int64_t most,
                               std::int64_t threads) {
  std::int64_t tokens = 0;
  for (const Sequence& s : seq.sequences()) {
    tokens += s.length();
  }
  const std::int64_t share = std::max<std::int64_t>(tokens * key_heads / (4 * threads), 1);
  std::vector<Piece> pieces;
  for (std::int64_t n = 0; n < seq.count(); ++n) {
    const std::int64_t wanted = threads == 1 ? 1 : (seq[n].length() + share - 1) / share;
    const std::int64_t needed = (columns + most - 1) / most;
    const std::int64_t parts = std::clamp<std::int64_t>(std::max(wanted, needed), 1, columns);
    for (std::int64_t h = 0; h < key_heads; ++h) {
      for (std::int64_t p = 0; p < parts; ++p) {
        pieces.push_back({n, h, columns * p / parts, columns * (p + 1) / parts});
      }
    }
  }
  std::stable_sort(pieces.begin(), pieces.end(), [&](const Piece& a, const Piece& b) {
    return seq[a.sequence].length() * (a.last - a.first) > seq[b.sequence].length() * (b.last - b.first);
  });
  return pieces;
}

}  // namespace tidegate::chunk_gated_delta_rule
