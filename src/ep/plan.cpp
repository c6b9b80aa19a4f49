#include "ep/plan.h"

#include <algorithm>

#include "tidegate/error.h"

namespace tidegate::ep {

std::vector<std::int64_t> even_shares(std::int64_t experts, std::int64_t ranks) {
  std::vector<std::int64_t> begin;
  for (std::int64_t r = 0; r <= ranks; ++r) {
    begin.push_back(r * experts / ranks);
  }
  return begin;
}

void check_config(const Config& c, int rank, int ranks) {
  constexpr std::string_view op = "ep_buffer";
  check(ranks >= 1, op, ": ranks: expected at least 1, got ", ranks);
  check(rank >= 0 && rank < ranks, op, ": rank: expected 0..", ranks - 1, ", got ", rank);
  check(c.experts >= 1, op, ": experts: expected at least 1, got ", c.experts);
  check(c.slots >= 1, op, ": slots: expected at least 1, got ", c.slots);
  check(c.max_tokens >= 0, op, ": max_tokens: expected at least 0, got ", c.max_tokens);
  check(c.row_bytes >= 1, op, ": row_bytes: expected at least 1, got ", c.row_bytes);
  check(c.zero_experts >= 0 && c.copy_experts >= 0 && c.const_experts >= 0, op,
        ": special experts: expected at least 0 of each kind, got ", c.zero_experts, ", ", c.copy_experts, ", ",
        c.const_experts);
  check(c.timeout_seconds > 0.0, op, ": timeout_seconds: expected more than 0, got ", c.timeout_seconds);
  // Pairs and rows are counted in int32.
  check(c.max_tokens <= (std::int64_t{1} << 31) / (c.slots * ranks) - 1, op, ": max_tokens: expected at most ",
        (std::int64_t{1} << 31) / (c.slots * ranks) - 1, " with ", c.slots, " slots and ", ranks, " ranks, got ",
        c.max_tokens);
  if (!c.expert_begin.empty()) {
    const auto& b = c.expert_begin;
    check(static_cast<int>(b.size()) == ranks + 1, op, ": expert_begin: expected ", ranks + 1, " numbers, got ",
          b.size());
    check(b.front() == 0 && b.back() == c.experts && std::is_sorted(b.begin(), b.end()), op,
          ": expert_begin: expected numbers that do not decrease from 0 to ", c.experts, ", got ", b.front(), " to ",
          b.back());
  }
}

std::vector<std::int64_t> expert_shares(const Config& c, std::int64_t ranks) {
  return c.expert_begin.empty() ? even_shares(c.experts, ranks) : c.expert_begin;
}

WindowLayout window_layout(const Config& c, std::int64_t ranks, std::int64_t control_bytes, std::int64_t header_bytes) {
  constexpr std::int64_t kPage = 4096;
  WindowLayout w{};
  w.pairs = c.max_tokens * c.slots;
  w.row_capacity = std::max(c.max_tokens, w.pairs * ranks);  // an expert id may stand in a row more than once
  std::int64_t at = 0;
  const auto take = [&](std::int64_t bytes) {
    const std::int64_t here = at;
    at += row_pitch(bytes);
    return here;
  };
  take(header_bytes);
  w.offsets = take(4 * (c.experts + 1));
  w.values = at;  // a combine has no lists, so its values may take their place
  w.src = take(4 * w.pairs);
  w.weights = take(4 * w.pairs);
  w.scales = take(4 * c.max_tokens);
  at = std::max(at, w.values + row_pitch(4 * w.row_capacity));
  at = (at + kPage - 1) / kPage * kPage;
  w.rows = at;
  at += w.row_capacity * row_pitch(c.row_bytes);
  w.slot = (at + kPage - 1) / kPage * kPage;
  w.bytes = (control_bytes + kPage - 1) / kPage * kPage + 2 * w.slot;
  return w;
}

void place_rows(Handle& h, std::int64_t rank, std::span<const std::int64_t> begin,
                std::span<const SourcePairs> sources) {
  const auto ranks = static_cast<std::int64_t>(sources.size());
  const auto at = [](auto& list, std::int64_t i) -> auto& { return list[static_cast<std::size_t>(i)]; };
  const auto count = [&](std::int64_t r, std::int64_t e) {
    const SourcePairs& s = at(sources, r);
    return static_cast<std::int64_t>(s.offsets[e + 1]) - s.offsets[e];
  };
  // My pairs: behind the rows of earlier experts of that rank and those of earlier ranks for this expert.
  const auto pairs = static_cast<std::size_t>(h.tokens * h.slots);
  h.rank.assign(pairs, -1);
  h.place.assign(pairs, -1);
  const SourcePairs& mine = at(sources, rank);
  for (std::int64_t owner = 0; owner < ranks; ++owner) {
    std::int64_t row = 0;
    for (std::int64_t e = at(begin, owner); e < at(begin, owner + 1); ++e) {
      std::int64_t before = row;
      for (std::int64_t r = 0; r < ranks; ++r) {
        before += r < rank ? count(r, e) : 0;
        row += count(r, e);
      }
      for (std::int64_t i = mine.offsets[e]; i < mine.offsets[e + 1]; ++i) {
        at(h.rank, mine.src[i]) = static_cast<std::int32_t>(owner);
        at(h.place, mine.src[i]) = static_cast<std::int32_t>(before + i - mine.offsets[e]);
      }
    }
    if (owner == rank) {
      h.rows = row;
    }
  }
  // Rows that I receive.
  const std::int64_t local = at(begin, rank + 1) - at(begin, rank);
  h.expert_rows.assign(static_cast<std::size_t>(local), 0);
  h.source_rows.assign(static_cast<std::size_t>(local * ranks), 0);
  h.source_tokens.clear();
  h.row_rank.clear();
  h.row_pair.clear();
  h.row_weights.clear();
  h.row_rank.reserve(static_cast<std::size_t>(h.rows));
  h.row_pair.reserve(static_cast<std::size_t>(h.rows));
  for (const SourcePairs& s : sources) {
    h.source_tokens.push_back(s.tokens);
  }
  for (std::int64_t i = 0; i < local; ++i) {
    const std::int64_t e = at(begin, rank) + i;
    for (std::int64_t r = 0; r < ranks; ++r) {
      const SourcePairs& s = at(sources, r);
      at(h.source_rows, r * local + i) = count(r, e);
      at(h.expert_rows, i) += count(r, e);
      h.row_rank.insert(h.row_rank.end(), static_cast<std::size_t>(count(r, e)), static_cast<std::int32_t>(r));
      h.row_pair.insert(h.row_pair.end(), s.src + s.offsets[e], s.src + s.offsets[e + 1]);
      for (std::int64_t j = s.offsets[e]; s.weights != nullptr && j < s.offsets[e + 1]; ++j) {
        h.row_weights.push_back(s.weights[s.src[j]]);
      }
    }
  }
}

std::uint64_t hash_bytes(const void* data, std::size_t bytes, std::uint64_t seed) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; ++i) {
    seed = (seed ^ p[i]) * 1099511628211u;
  }
  return seed;
}

}  // namespace tidegate::ep
