// Rows of all experts for some tokens, a block of columns at a time, summed up by token.
#pragma once

#include "ops/moe_experts/plan.h"
#include "tidegate/cpu.h"

namespace tidegate::moe_experts {

// For the tokens [first, last): where the places of every group begin among theirs. Inside a group places ascend with
// the tokens, so those of a run of tokens are a run.
class TokenPlaces {
 public:
  TokenPlaces(const Plan& p, const Set& s, std::int64_t first, std::int64_t last, Scratch& scratch) : set_(s) {
    if (first == 0 && last == p.T) {  // all places are theirs
      begin_ = row_ = s.offsets;
      rows_ = s.pos;
      return;
    }
    auto* begin = take<std::int64_t>(scratch, s.groups);
    auto* row = take<std::int64_t>(scratch, s.groups + 1);
    auto* rows = take<std::int32_t>(scratch, (last - first) * s.slots);
    const auto at = [&](std::int64_t g, std::int64_t token) {
      const std::int32_t* from = s.src + s.offsets[g];
      return std::lower_bound(from, s.src + s.offsets[g + 1], token * s.slots) - s.src;
    };
    row[0] = 0;
    for (std::int64_t g = 0; g < s.groups; ++g) {
      begin[g] = at(g, first);
      row[g + 1] = row[g] + (at(g, last) - begin[g]);
    }
    for (std::int64_t i = first * s.slots; i < last * s.slots; ++i) {
      const std::int64_t g = s.ids[i];
      rows[i - first * s.slots] = static_cast<std::int32_t>(g < 0 ? -1 : s.pos[i] - begin[g] + row[g]);
    }
    begin_ = begin;
    row_ = row;
    rows_ = rows;
  }
  const std::int32_t* rows() const { return rows_; }  // [token][slot]: the collected row, or -1
  std::int64_t count() const { return row_[set_.groups]; }

  // f(group, first place, count, first row, group of the next run), at most kBlockRows at a time.
  template <class F>
  void for_each_run(F f) const {
    std::int64_t next = 0;
    for (std::int64_t g = 0; g < set_.groups; ++g) {
      const std::int64_t count = row_[g + 1] - row_[g];
      for (next = std::max(next, g + 1); next < set_.groups && row_[next + 1] == row_[next];) {
        ++next;
      }
      const std::int64_t blocks = (count + grouped_matmul::kBlockRows - 1) / grouped_matmul::kBlockRows;
      for (std::int64_t b = 0; b < blocks; ++b) {
        const std::int64_t from = count * b / blocks;
        f(g, begin_[g] + from, count * (b + 1) / blocks - from, row_[g] + from,
          b + 1 < blocks || next == set_.groups ? g : next);
      }
    }
  }

 private:
  const Set& set_;
  const std::int64_t* begin_;
  const std::int64_t* row_;
  const std::int32_t* rows_;
};

// fill(set, group, place, count, first column, columns, next group, out, room) writes rows kCollectColumns apart.
// finish(combine, first token, first column) adds what is particular to the direction.
template <class Fill, class Finish>
void collect(const Plan& p, const TensorView& out, Fill fill, Finish finish) {
  const std::int64_t tokens = std::max<std::int64_t>(1, kCollectPairs / std::max<std::int64_t>(1, p.routed.slots));
  const std::int64_t token_blocks = (p.T + tokens - 1) / tokens;
  const std::int64_t column_blocks = (p.H + kCollectColumns - 1) / kCollectColumns;
  const grouped_matmul::Kernels& products = grouped_matmul_kernels_for(active_isa());
  const auto run = moe_experts_kernels_for(active_isa()).combine[p.type];
  parallel_for(token_blocks * column_blocks, [&](std::int64_t task) {
    const std::int64_t first = task / column_blocks * tokens;
    const std::int64_t last = std::min(p.T, first + tokens);
    const std::int64_t column = task % column_blocks * kCollectColumns;
    const std::int64_t columns = std::min(kCollectColumns, p.H - column);
    Scratch own;
    float* room = own.floats(products.room_floats);
    const float* collected[2] = {};
    Combine c{};
    for (int i = 0; i < p.set_count(); ++i) {
      const Set& s = i == 0 ? p.routed : p.shared;
      const TokenPlaces places(p, s, first, last, own);
      float* rows = own.floats(places.count() * kCollectColumns);
      places.for_each_run(
          [&](std::int64_t g, std::int64_t place, std::int64_t count, std::int64_t row, std::int64_t next) {
            fill(s, g, place, count, column, columns, next, rows + row * kCollectColumns, room);
          });
      collected[i] = rows;
      if (i == 0) {
        c.rows = places.rows();
      }
    }
    c.y = collected[0];
    c.shared = collected[1];
    c.pitch = kCollectColumns;
    c.columns = columns;
    c.slots = p.routed.slots;
    c.out = const_cast<char*>(grouped_matmul::row_at(out, first)) + column * p.bytes;
    c.out_row = out.strides[0];
    finish(c, first, column);
    run(c, 0, last - first);
  });
}

}  // namespace tidegate::moe_experts
