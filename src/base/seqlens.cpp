#include "tidegate/seqlens.h"

#include <algorithm>
#include <limits>
#include <unordered_set>

#include "tidegate/error.h"

namespace tidegate {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

std::int64_t length_of(std::span<const std::int64_t> values) { return static_cast<std::int64_t>(values.size()); }

// Every later product rows * tokens relies on this.
void check_sizes(std::string_view op, std::int64_t rows, std::int64_t tokens) {
  check(rows >= 0, op, ": rows: expected >= 0, got ", rows);
  check(tokens >= 0, op, ": tokens: expected >= 0, got ", tokens);
  const std::int64_t limit = rows == 0 ? kMax : kMax / rows;
  check(tokens <= limit, op, ": tokens: expected <= ", limit, " (", rows, " rows must fit in int64), got ", tokens);
}

// The first sequence at or after n that has tokens; count() if there is none.
std::int64_t next_filled(const SeqLens& seq, std::int64_t n) {
  while (n < seq.count() && seq[n].length() == 0) {
    ++n;
  }
  return n;
}

}  // namespace

void SeqLens::add(Sequence s) {
  sequences_.push_back(s);
  longest_ = std::max(longest_, s.length());
  covered_ += s.length();
}

SeqLens SeqLens::from_cu(std::span<const std::int64_t> cu, std::int64_t tokens, bool allow_tail, std::string_view op) {
  check_sizes(op, 1, tokens);
  check(cu.size() >= 2, op, ": cu_seqlens: expected at least 2 entries, got ", cu.size());
  check(cu[0] == 0, op, ": cu_seqlens[0]: expected 0, got ", cu[0]);
  SeqLens seq(1, tokens);
  seq.sequences_.reserve(cu.size() - 1);
  for (std::size_t i = 1; i < cu.size(); ++i) {
    check(cu[i] >= cu[i - 1], op, ": cu_seqlens[", i, "]: expected >= ", cu[i - 1], ", got ", cu[i]);
    check(cu[i] <= tokens, op, ": cu_seqlens[", i, "]: expected <= ", tokens, " (tokens), got ", cu[i]);
    seq.add({0, cu[i - 1], cu[i]});
  }
  check(allow_tail || cu.back() == tokens, op, ": cu_seqlens[", cu.size() - 1, "]: expected ", tokens,
        " (tokens), got ", cu.back());
  return seq;
}

SeqLens SeqLens::from_lengths(std::span<const std::int64_t> lengths, std::string_view op) {
  SeqLens seq(1, 0);
  seq.sequences_.reserve(lengths.size());
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const std::int64_t left = kMax - seq.tokens_;
    check(lengths[i] >= 0, op, ": lengths[", i, "]: expected >= 0, got ", lengths[i]);
    check(lengths[i] <= left, op, ": lengths[", i, "]: expected <= ", left, " (the sum must fit in int64), got ",
          lengths[i]);
    seq.add({0, seq.tokens_, seq.tokens_ + lengths[i]});
    seq.tokens_ += lengths[i];
  }
  return seq;
}

SeqLens SeqLens::from_seq_idx(std::span<const std::int64_t> seq_idx, std::string_view op) {
  const std::int64_t tokens = length_of(seq_idx);
  SeqLens seq(1, tokens);
  std::unordered_set<std::int64_t> used;
  for (std::int64_t begin = 0; begin < tokens;) {
    const std::int64_t id = seq_idx[begin];
    check(used.insert(id).second, op, ": seq_idx[", begin, "]: expected an id not used before, got ", id);
    std::int64_t end = begin + 1;
    while (end < tokens && seq_idx[end] == id) {
      ++end;
    }
    seq.add({0, begin, end});
    begin = end;
  }
  return seq;
}

SeqLens SeqLens::from_position_ids(std::span<const std::int64_t> ids, int axes, std::string_view op) {
  check(axes == 1 || axes == 3, op, ": axes: expected 1 or 3, got ", axes);
  check(ids.size() % static_cast<std::size_t>(axes) == 0, op, ": position_ids: expected a multiple of ", axes,
        " entries, got ", ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    check(ids[i] >= 0, op, ": position_ids[", i, "]: expected >= 0, got ", ids[i]);
  }
  const std::int64_t tokens = length_of(ids) / axes;
  const auto starts_at = [&](std::int64_t t) {
    if (axes == 3) {
      return ids[t] == 0 && ids[tokens + t] == 0 && ids[2 * tokens + t] == 0;
    }
    if (ids[t] - 1 == ids[t - 1]) {
      return false;
    }
    // Unsigned, because the largest position has no successor and the sum is made even when the check passes.
    const auto next = static_cast<std::int64_t>(static_cast<std::uint64_t>(ids[t - 1]) + 1);
    check(ids[t] == ids[0], op, ": position_ids[", t, "]: expected ", next, " (same sequence) or ", ids[0],
          " (new sequence), got ", ids[t]);
    return true;
  };
  SeqLens seq(1, tokens);
  std::int64_t begin = 0;
  for (std::int64_t t = 1; t < tokens; ++t) {
    if (starts_at(t)) {
      seq.add({0, begin, t});
      begin = t;
    }
  }
  if (tokens > 0) {
    seq.add({0, begin, tokens});
  }
  return seq;
}

SeqLens SeqLens::from_mask(std::span<const std::int64_t> mask, std::int64_t rows, std::int64_t tokens,
                           std::string_view op) {
  check_sizes(op, rows, tokens);
  check(length_of(mask) == rows * tokens, op, ": mask: expected ", rows * tokens, " entries (", rows, " rows of ",
        tokens, " tokens), got ", mask.size());
  SeqLens seq(rows, tokens);
  seq.sequences_.reserve(static_cast<std::size_t>(rows));
  for (std::int64_t row = 0; row < rows; ++row) {
    Sequence s{row, 0, 0};  // a row of zeros stays an empty sequence, so that sequence n is row n
    for (std::int64_t t = 0; t < tokens; ++t) {
      const std::int64_t i = row * tokens + t;
      check(mask[i] == 0 || mask[i] == 1, op, ": mask[", i, "]: expected 0 or 1, got ", mask[i]);
      if (mask[i] == 0) {
        continue;
      }
      s.begin = s.end == 0 ? t : s.begin;
      check(s.end == 0 || s.end == t, op, ": mask[", i, "]: expected 0 (the ones of row ", row, " ended at column ",
            s.end, "), got 1");
      s.end = t + 1;
    }
    seq.add(s);
  }
  return seq;
}

SeqLens SeqLens::dense(std::int64_t rows, std::int64_t tokens) {
  check_sizes("seqlens", rows, tokens);
  SeqLens seq(rows, tokens);
  seq.sequences_.reserve(static_cast<std::size_t>(rows));
  for (std::int64_t row = 0; row < rows; ++row) {
    seq.add({row, 0, tokens});
  }
  return seq;
}

std::vector<Chunk> SeqLens::chunks(std::int64_t chunk_size) const {
  check(chunk_size >= 1, "seqlens: chunk_size: expected >= 1, got ", chunk_size);
  std::vector<Chunk> list;
  for (std::int64_t n = 0; n < count(); ++n) {
    const Sequence& s = (*this)[n];
    for (std::int64_t begin = s.begin; begin < s.end;) {
      const std::int64_t end = begin + std::min(chunk_size, s.end - begin);
      list.push_back({n, begin, end});
      begin = end;
    }
  }
  return list;
}

std::vector<std::int64_t> SeqLens::seq_idx() const {
  std::vector<std::int64_t> list(static_cast<std::size_t>(rows_ * tokens_), -1);
  for (std::int64_t n = 0; n < count(); ++n) {
    const Sequence& s = (*this)[n];
    std::fill_n(list.begin() + s.row * tokens_ + s.begin, s.length(), n);
  }
  return list;
}

std::vector<std::int64_t> SeqLens::boundaries() const {
  check(rows_ == 1, "seqlens: boundaries: expected 1 row, got ", rows_);
  std::vector<std::int64_t> list;
  for (const Sequence& s : sequences_) {
    if (s.length() > 0) {
      if (list.empty()) {
        list.push_back(s.begin);  // not 0 in a left-padded mask
      }
      list.push_back(s.end);
    }
  }
  if (list.empty()) {
    list.push_back(0);
  }
  return list;
}

void SeqLens::check_agree(const SeqLens& a, std::string_view name_a, const SeqLens& b, std::string_view name_b,
                          std::string_view op) {
  check(a.rows_ == b.rows_ && a.tokens_ == b.tokens_, op, ": ", name_b, ": expected ", a.rows_, " x ", a.tokens_,
        " tokens (as ", name_a, "), got ", b.rows_, " x ", b.tokens_);
  std::int64_t n = next_filled(a, 0);
  std::int64_t m = next_filled(b, 0);
  for (; n < a.count() && m < b.count(); n = next_filled(a, n + 1), m = next_filled(b, m + 1)) {
    const auto same = [&](std::string_view what, std::int64_t x, std::int64_t y) {
      check(x == y, op, ": ", name_b, ": expected ", x, " (", what, " of sequence ", n, " in ", name_a, "), got ", y);
    };
    same("row", a[n].row, b[m].row);
    same("begin", a[n].begin, b[m].begin);
    same("end", a[n].end, b[m].end);
  }
  check(n == a.count(), op, ": ", name_b, ": expected sequence ", n, " of ", name_a, ", got no more sequences");
  check(m == b.count(), op, ": ", name_b, ": expected no more sequences (as ", name_a, "), got sequence ", m);
}

}  // namespace tidegate
