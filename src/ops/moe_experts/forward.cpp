// The forward of the experts in two parallel regions: silu(gate) * up of all pairs, then down and the sum over slots.
// A low-rank addition has one of its own before each of them.
#include "ops/moe_experts/collect.h"
#include "ops/moe_experts/low_rank.h"

namespace tidegate::moe_experts {
namespace {

using namespace grouped_matmul;

// gate, up and silu(gate) * up of a task, block by block of its columns. `after`: the first weight of the next task.
void run_task(const Plan& p, const Set& s, const BlockTasks::Task& t, const void* after) {
  Scratch own;
  float* room = own.floats(grouped_matmul_kernels_for(active_isa()).room_floats);
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
    v.a = s.a + (t.row * s.width() + part.column) * p.bytes;
    v.a_row = s.width();
    moe_experts_kernels_for(active_isa()).forward[p.type](v);
  }
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

void forward(const Plan& p, const TensorView& out, Scratch& scratch) {
  const BlockTasks routed(p.routed.offsets, p.routed.groups, p.routed.width(), scratch, true);
  const BlockTasks shared(p.shared.offsets, p.shared.groups, p.has_shared ? p.shared.width() : 0, scratch, true);
  const std::int64_t blocks = routed.count() + shared.count();
  clear_unrouted(p);
  narrow_x(p, p.routed, scratch);
  parallel_for(blocks + gate_tasks(p), [&](std::int64_t i) {
    if (i >= blocks) {
      run_gate_task(p, i - blocks);
      return;
    }
    const void* after = nullptr;
    if (i + 1 < routed.count()) {
      const BlockTasks::Task next = routed[i + 1];
      after = p.routed.gate.at(next.group, next.column, 0);
    }
    if (i < routed.count()) {
      run_task(p, p.routed, routed[i], after);
    } else {
      run_task(p, p.shared, shared[i - routed.count()], nullptr);
    }
  });
  narrow_hidden(p, p.routed, scratch);
  collect(
      p, out,
      [&](const Set& s, std::int64_t g, std::int64_t place, std::int64_t count, std::int64_t column,
          std::int64_t columns, std::int64_t next, float* to, float* room) {
        const void* rows[kBlockRows];
        for (std::int64_t r = 0; r < count; ++r) {
          rows[r] = s.a + (place + r) * s.width() * p.bytes;
        }
        multiply({s.down, g, column, columns, false, s.down.at(next, column, 0)}, rows, p.type, count, to,
                 kCollectColumns, false, room);
        if (const LowRank& l = s.down_lora; l.rank > 0) {
          widen({l.b[0], g, column, columns, false}, l.u, l.rank, place, count, to, kCollectColumns, room);
        }
      },
      [&](Combine& c, std::int64_t first, std::int64_t) {
        c.weights = p.routed.pair_weights + first * p.routed.slots;
        c.shared_weights = p.has_shared ? p.shared_gate + first : nullptr;
        c.round_y = p.round_y;
      });
}

}  // namespace tidegate::moe_experts
