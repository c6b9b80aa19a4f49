// The forward of the experts in two parallel regions: silu(gate) * up of all pairs, then down and the sum over slots.
// A low-rank addition has one of its own before each of them.
#include "ops/moe_experts/collect.h"
#include "ops/moe_experts/low_rank.h"

namespace tidegate::moe_experts {

using namespace grouped_matmul;

void forward(const Plan& p, const TensorView& out, Scratch& scratch) {
  const BlockTasks routed(p.routed.offsets, p.routed.groups, p.routed.width(), scratch);
  const BlockTasks shared(p.shared.offsets, p.shared.groups, p.has_shared ? p.shared.width() : 0, scratch);
  const std::int64_t blocks = routed.count() + shared.count();
  const grouped_matmul::Kernels& products = grouped_matmul_kernels_for(active_isa());
  const auto activate = moe_experts_kernels_for(active_isa()).forward[p.type];
  narrow_x(p, p.routed, scratch);
  parallel_for(blocks + gate_tasks(p), [&](std::int64_t i) {
    if (i >= blocks) {
      run_gate_task(p, i - blocks);
      return;
    }
    const Set& s = i < routed.count() ? p.routed : p.shared;
    const BlockTasks::Task t = i < routed.count() ? routed[i] : shared[i - routed.count()];
    Scratch own;
    float* gate = own.floats(t.rows * kBlockColumns);
    float* up = own.floats(t.rows * kBlockColumns);
    float* room = own.floats(products.room_floats);
    const void* later = nullptr;
    if (i + 1 < routed.count()) {
      const BlockTasks::Task next = routed[i + 1];
      later = p.routed.gate.at(next.group, next.column, 0);
    }
    hidden_block(p, s, t, gate, up, room, later);
    Activation v{};
    v.gate = gate;
    v.up = up;
    v.rows = t.rows;
    v.columns = t.columns;
    v.pitch = kBlockColumns;
    v.a = s.a + (t.row * s.width() + t.column) * p.bytes;
    v.a_row = s.width();
    activate(v);
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
