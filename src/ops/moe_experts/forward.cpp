// The forward of the experts in two parallel regions: silu(gate) * up of all pairs, then down and the sums of tokens.
// A low-rank addition has one of its own before each of them.
#include "ops/moe_experts/collect.h"
#include "ops/moe_experts/low_rank.h"

namespace tidegate::moe_experts {
namespace {

using namespace grouped_matmul;

// silu(gate) * up of a set, block of rows by block of rows. Every block of down's columns meets them, so they are left
// as those products want them: packed, where that is of use.
class Hidden {
 public:
  Hidden(const Plan& p, const Set& s, Scratch& scratch)
      : p_(p), s_(s), tasks_(s.cuts, s.groups * p.token_blocks, s.width(), scratch, true) {
    begin_ = take<std::int64_t>(scratch, tasks_.row_blocks() + 1);
    begin_[0] = 0;
    for (std::int64_t g = 0; g < s.groups * p.token_blocks; ++g) {
      for (std::int64_t b = tasks_.first_row_block(g); b < tasks_.first_row_block(g + 1); ++b) {
        const std::int64_t rows = tasks_.rows_of(g, b).count;
        const std::int64_t packed = packed_bytes(rows);
        begin_[b + 1] = begin_[b] + (packed > 0 ? packed : rows * row_bytes());
      }
    }
    data_ = take<char>(scratch, begin_[tasks_.row_blocks()]);
  }
  const BlockTasks& tasks() const { return tasks_; }
  char* data() const { return data_; }  // without packed blocks: [places][width] of x's type
  char* at(std::int64_t row_block) const { return data_ + begin_[row_block]; }
  std::int64_t row_bytes() const { return s_.width() * p_.bytes; }
  // A low-rank addition wants plain rows.
  std::int64_t packed_bytes(std::int64_t rows) const {
    return s_.down_lora.rank > 0 ? 0
                                 : kernels().packed_bytes(block_of({s_.down, 0, 0, 1, false}, nullptr, p_.type, rows));
  }
  static const grouped_matmul::Kernels& kernels() { return grouped_matmul_kernels_for(active_isa()); }

 private:
  const Plan& p_;
  const Set& s_;
  BlockTasks tasks_;
  std::int64_t* begin_;
  char* data_;
};

// gate, up and silu(gate) * up of a task, block by block of its columns. `after`: the first weight of the next task.
void run_task(const Plan& p, const Set& s, const Hidden& hidden, BlockTasks::Task t, const void* after) {
  Scratch own;
  float* room = own.floats(Hidden::kernels().room_floats);
  const bool packed = hidden.packed_bytes(t.rows) > 0;
  const std::int64_t pitch = packed ? kBlockColumns : s.width();
  char* rows = packed ? take<char>(own, t.rows * pitch * p.bytes) : nullptr;
  t.group /= p.token_blocks;
  const std::int64_t end = t.column + t.columns;
  BlockTasks::Task part = t;
  for (; part.column < end; part.column += kBlockColumns) {
    part.columns = std::min(kBlockColumns, end - part.column);
    const std::int64_t next = part.column + kBlockColumns;
    Scratch block;
    const HiddenBlock h = hidden_place(s, part, block);
    hidden_block(p, s, part, h, room, next < end ? s.gate.at(t.group, next, 0) : after, part.column > t.column);
    Activation v{};
    v.gate = h.gate;
    v.up = h.up;
    v.rows = t.rows;
    v.columns = part.columns;
    v.pitch = h.pitch;
    v.a = packed ? rows : hidden.at(t.row_block) + part.column * p.bytes;
    v.a_row = pitch;
    moe_experts_kernels_for(active_isa()).forward[p.type](v);
    if (packed) {
      const void* list[kBlockRows];
      for (std::int64_t r = 0; r < t.rows; ++r) {
        list[r] = rows + r * pitch * p.bytes;
      }
      Hidden::kernels().pack(block_of({s.down, t.group, 0, 1, false}, list, p.type, t.rows), part.column, part.columns,
                             hidden.at(t.row_block));
    }
  }
}

// down of a run of places, for some columns.
void run_down(const Plan& p, const Set& s, const Hidden& hidden, const Run& run, const Collected& to) {
  for_row_blocks(run.count, [&](std::int64_t first, std::int64_t count, std::int64_t number) {
    const char* a = hidden.at(hidden.tasks().first_row_block(run.cut) + number);
    const bool packed = hidden.packed_bytes(count) > 0;
    const void* rows[kBlockRows];
    for (std::int64_t r = 0; r < count; ++r) {
      rows[r] = packed ? nullptr : a + r * hidden.row_bytes();
    }
    for_column_blocks(to, [&](std::int64_t column, std::int64_t columns) {
      Factor f{s.down, run.group, column, columns, false};
      const bool more = column + columns < to.first + to.count;
      f.later = more                        ? s.down.at(run.group, column + columns, 0)
                : first + count < run.count ? s.down.at(run.group, to.first, 0)
                                            : s.down.at(run.next, to.first, 0);
      f.packed = packed ? a : nullptr;
      multiply(f, rows, p.type, count, to.at(first, column), to.pitch, false, to.room);
      if (const LowRank& l = s.down_lora; l.rank > 0) {
        widen({l.b[0], run.group, column, columns, false}, l.u, l.rank, run.place + first, count, to.at(first, column),
              to.pitch, to.room);
      }
    });
  });
}

// Rows of pairs that are not routed: what is kept for a backward has no leftovers of the memory it lies in.
void clear_unrouted(const Plan& p) {
  const Set& s = p.routed;
  parallel_for(s.hidden != nullptr ? p.T * s.slots - s.places : 0, [&](std::int64_t i) {
    float* gate = s.hidden + (s.places + i) * s.hidden_row;
    std::fill_n(gate, s.width(), 0.0f);
    std::fill_n(gate + s.hidden_up, s.width(), 0.0f);
  });
}

}  // namespace

void forward(Plan p, const TensorView& out, Scratch& scratch) {
  const Hidden routed(p, p.routed, scratch), shared(p, p.shared, scratch);
  p.routed.a = routed.data();
  const std::int64_t first_shared = routed.tasks().count();
  const std::int64_t blocks = first_shared + shared.tasks().count();
  clear_unrouted(p);
  narrow_x(p, p.routed, scratch);
  parallel_for(blocks + gate_tasks(p), [&](std::int64_t i) {
    if (i >= blocks) {
      run_gate_task(p, i - blocks);
      return;
    }
    const void* after = nullptr;
    if (i + 1 < first_shared) {
      const BlockTasks::Task next = routed.tasks()[i + 1];
      after = p.routed.gate.at(next.group / p.token_blocks, next.column, 0);
    }
    if (i < first_shared) {
      run_task(p, p.routed, routed, routed.tasks()[i], after);
    } else {
      run_task(p, p.shared, shared, shared.tasks()[i - first_shared], nullptr);
    }
  });
  narrow_hidden(p, p.routed, scratch);
  collect(
      p, out,
      [&](const Set& s, const Run& run, const Collected& to) {
        run_down(p, s, &s == &p.routed ? routed : shared, run, to);
      },
      {p.routed.place_weights, p.shared.place_weights}, [](Result&, std::int64_t, std::int64_t) {});
}

}  // namespace tidegate::moe_experts
