// Results of all experts for a block of tokens, some columns at a time, added up by token.
#pragma once

#include "ops/moe_experts/plan.h"
#include "tidegate/cpu.h"

namespace tidegate::moe_experts {

// The places of a group that belong to a block of tokens.
struct Run {
  std::int64_t group, place, count;
  std::int64_t next;  // the group of the next run
  std::int64_t cut;   // which of the set's cuts begins it
};

// f(run) for all groups that have places.
template <class F>
void for_each_run(const Plan& p, const Set& s, std::int64_t block, F f) {
  const auto run_of = [&](std::int64_t group) {
    const std::int64_t cut = group * p.token_blocks + block;
    return Run{group, s.cuts[cut], s.cuts[cut + 1] - s.cuts[cut], group, cut};
  };
  std::int64_t next = 0;
  for (std::int64_t g = 0; g < s.groups; ++g) {
    Run run = run_of(g);
    for (next = std::max(next, g + 1); next < s.groups && run_of(next).count == 0;) {
      ++next;
    }
    run.next = next < s.groups ? next : g;
    if (run.count > 0) {
      f(run);
    }
  }
}

// f(first, count, number): even blocks of at most kBlockRows rows, cut as BlockTasks cuts them.
template <class F>
void for_row_blocks(std::int64_t count, F f) {
  const std::int64_t blocks = (count + grouped_matmul::kBlockRows - 1) / grouped_matmul::kBlockRows;
  for (std::int64_t b = 0; b < blocks; ++b) {
    const std::int64_t first = count * b / blocks;
    f(first, count * (b + 1) / blocks - first, b);
  }
}

// Columns [first, first + count) of rows `pitch` apart, and memory for products.
struct Collected {
  float* rows;
  std::int64_t first, count, pitch;
  float* room;
  float* at(std::int64_t row, std::int64_t column) const { return rows + row * pitch + column - first; }
};
// f(first, count): blocks of at most kBlockColumns columns.
template <class F>
void for_column_blocks(const Collected& c, F f) {
  for (std::int64_t column = c.first; column < c.first + c.count; column += grouped_matmul::kBlockColumns) {
    f(column, std::min(grouped_matmul::kBlockColumns, c.first + c.count - column));
  }
}

// out: for every token the sum of the rows of its experts, in the order of the groups (of one group in the order of
// slots), then that of the shared one. fill(set, run, collected) writes the rows of a run; weights: by place, of each
// set; finish(result, first token, first column) adds what is particular to the direction.
template <class Fill, class Finish>
void collect(const Plan& p, const TensorView& out, Fill fill, const float* const (&weights)[2], Finish finish) {
  const std::int64_t tokens = std::min(p.T, p.token_block);
  const std::int64_t width = collect_columns(tokens, p.token_blocks, p.H, parallel_threads());
  const std::int64_t column_blocks = (p.H + width - 1) / width;
  const grouped_matmul::Kernels& products = grouped_matmul_kernels_for(active_isa());
  const Kernels& kernels = moe_experts_kernels_for(active_isa());
  parallel_for(p.token_blocks * column_blocks, [&](std::int64_t task) {
    const std::int64_t block = task / column_blocks;
    const std::int64_t first = block * p.token_block;
    const std::int64_t column = task % column_blocks * width;
    Scratch own;
    Collected to{nullptr, column, std::min(width, p.H - column), width, own.floats(products.room_floats)};
    float* sums = own.floats(tokens * width);
    std::fill_n(sums, tokens * width, 0.0f);
    for (int i = 0; i < p.set_count(); ++i) {
      const Set& s = i == 0 ? p.routed : p.shared;
      for_each_run(p, s, block, [&](const Run& run) {
        Scratch rows;
        to.rows = rows.floats(run.count * width);
        fill(s, run, to);
        kernels.add[p.type]({to.rows, width, to.count, run.count, s.src + run.place, s.slots, first,
                             weights[i] != nullptr ? weights[i] + run.place : nullptr, p.round_y, sums, width});
      });
    }
    Result result{sums,
                  width,
                  to.count,
                  std::min(p.token_block, p.T - first),
                  nullptr,
                  nullptr,
                  const_cast<char*>(grouped_matmul::row_at(out, first)) + column * p.bytes,
                  out.strides[0]};
    finish(result, first, column);
    kernels.finish[p.type](result);
  });
}

}  // namespace tidegate::moe_experts
