// The backward of the experts. gate and up come from the forward or are computed again; what is kept of a pair are a
// times its routing weight (fp16: a alone), dgate and dup, in x's type.
#include <cstring>

#include "ops/moe_experts/collect.h"
#include "ops/moe_experts/low_rank.h"

namespace tidegate::moe_experts {
namespace {

using namespace grouped_matmul;

// What the backward of a set needs and leaves behind.
struct Trail {
  const void** dout_rows;  // [places]
  char *dgate, *dup;       // [places][width], absent: not wanted
  float* dfactors;         // [places][blocks]: parts of <da, a>, absent: not wanted
  std::int64_t blocks;
  // Gradients on the narrow sides of low-rank additions, times their scales: of down before the routing weight.
  float *narrow_down, *narrow_hidden;
  bool wants_da, wants_a;
  // Of ddown's rows, where they are not in a: fp16 has no range for a times a routing weight. Else absent.
  const float* factors;
};

struct Needs {
  bool x, factors, hidden, down;  // dx; the routing weights or the gate; gate and up; down
};

Trail make_trail(const Plan& p, const Set& s, const TensorView& dout, const Needs& needs, std::int64_t blocks,
                 Scratch& scratch) {
  Trail t{};
  t.dout_rows = row_pointers(s.places, scratch, [&](std::int64_t j) { return row_at(dout, s.src[j] / s.slots); });
  t.blocks = blocks;
  const auto bytes = static_cast<std::size_t>(std::max<std::int64_t>(s.places * s.width(), 1) * p.bytes);
  if (needs.x || needs.hidden) {
    t.dgate = static_cast<char*>(scratch.bytes(bytes));
    t.dup = static_cast<char*>(scratch.bytes(bytes));
  }
  if (needs.factors) {
    t.dfactors = scratch.floats(std::max<std::int64_t>(s.places * blocks, 1));
  }
  t.wants_da = needs.x || needs.hidden || needs.factors;
  t.wants_a = needs.down;
  t.factors = p.type == data_type_index(DType::kF16) ? s.place_weights : nullptr;
  return t;
}

// gate, up and da of a block, then what follows from them.
void run_block(const Plan& p, const Set& s, const Trail& trail, const BlockTasks::Task& t) {
  Scratch own;
  const HiddenBlock h = hidden_place(s, t, own);
  float* da = own.floats(t.rows * kBlockColumns);
  float* room = own.floats(grouped_matmul_kernels_for(active_isa()).room_floats);
  if (s.hidden == nullptr) {
    hidden_block(p, s, t, h, room);
  }
  Activation v{};
  if (trail.wants_da) {
    multiply({s.down, t.group, t.column, t.columns, true}, trail.dout_rows + t.row, p.type, t.rows, da, kBlockColumns,
             false, room);
    if (const LowRank& l = s.down_lora; l.rank > 0) {
      widen({l.a, t.group, t.column, t.columns, true}, trail.narrow_down, l.rank, t.row, t.rows, da, kBlockColumns,
            room);
    }
    v.da = da;
  }
  v.factors = s.place_weights + t.row;
  v.weighted = trail.factors == nullptr;
  const std::int64_t at = (t.row * s.width() + t.column) * p.bytes;
  v.gate = h.gate;
  v.up = h.up;
  v.rows = t.rows;
  v.columns = t.columns;
  v.pitch = h.pitch;
  v.da_pitch = kBlockColumns;
  v.a = trail.wants_a ? s.a + at : nullptr;
  v.a_row = s.width();
  v.dgate = trail.dgate != nullptr ? trail.dgate + at : nullptr;
  v.dup = trail.dgate != nullptr ? trail.dup + at : nullptr;
  v.dh_row = s.width();
  v.dfactors = trail.dfactors != nullptr ? trail.dfactors + t.row * trail.blocks + t.column_block : nullptr;
  v.dfactors_step = trail.blocks;
  moe_experts_kernels_for(active_isa()).backward[p.type](v);
}

// <da, a> of a place, its blocks in their order.
float factor_gradient(const Trail& t, std::int64_t place) {
  float total = 0.0f;
  for (std::int64_t b = 0; b < t.blocks; ++b) {
    total += t.dfactors[place * t.blocks + b];
  }
  return total;
}

void weight_gradients(const Plan& p, const Set& s, const Trail& t, const Weights* dgate, const Weights* dup,
                      const Weights* ddown) {
  Scratch own;
  OuterProducts q{nullptr, s.x_rows, nullptr, p.type, p.type, s.offsets, s.groups, false};
  for (int i = 0; i < 2; ++i) {
    if (const Weights* out = i == 0 ? dgate : dup; out != nullptr) {
      q.left = hidden_rows(p, s, i == 0 ? t.dgate : t.dup, own);
      outer_products(q, *out);
    }
  }
  if (ddown != nullptr) {
    q.left = t.dout_rows;
    q.right = hidden_rows(p, s, s.a, own);
    q.factors = t.factors;
    outer_products(q, *ddown);
  }
}

// b's gradient is that of the product times u, a's the narrow gradient times the input.
void low_rank_gradients(const Plan& p, const Set& s, const Trail& t, const MoeExpertsGradients& g,
                        const MoeExpertsOptions& o) {
  Scratch own;
  constexpr int kFloat = 0;
  const LowRank& hidden = s.hidden_lora;
  const LowRank& down = s.down_lora;
  if (g.dgate_up_lora_b.defined()) {
    const GateUp both = gate_up_of(g.dgate_up_lora_b, WeightAxes::kNK, o.interleaved);
    const void** u = narrow_rows(s, hidden.u, hidden.rank, own);
    outer_products({hidden_rows(p, s, t.dgate, own), u, nullptr, p.type, kFloat, s.offsets, s.groups, false},
                   both.gate);
    outer_products({hidden_rows(p, s, t.dup, own), u, nullptr, p.type, kFloat, s.offsets, s.groups, false}, both.up);
  }
  if (g.dgate_up_lora_a.defined()) {
    outer_products({narrow_rows(s, t.narrow_hidden, hidden.rank, own), s.x_rows, nullptr, kFloat, p.type, s.offsets,
                    s.groups, false},
                   weights_of(g.dgate_up_lora_a, WeightAxes::kNK));
  }
  if (g.ddown_lora_b.defined()) {
    narrow_hidden(p, s, own);
    outer_products(
        {t.dout_rows, narrow_rows(s, down.u, down.rank, own), t.factors, p.type, kFloat, s.offsets, s.groups, false},
        weights_of(g.ddown_lora_b, WeightAxes::kNK));
  }
  if (g.ddown_lora_a.defined()) {
    outer_products({narrow_rows(s, t.narrow_down, down.rank, own), hidden_rows(p, s, s.a, own), t.factors, kFloat,
                    p.type, s.offsets, s.groups, false},
                   weights_of(g.ddown_lora_a, WeightAxes::kNK));
  }
}

}  // namespace

void backward(Plan p, const TensorView& dout, const MoeExpertsGradients& g, const MoeExpertsOptions& o,
              Scratch& scratch) {
  const bool router = p.has_shared && (g.dx.defined() || g.dshared_router.defined());
  const Needs needs[2] = {
      {g.dx.defined(), g.dweights.defined(),
       g.dgate_up.defined() || g.dgate_up_lora_a.defined() || g.dgate_up_lora_b.defined(),
       g.ddown.defined() || g.ddown_lora_a.defined() || g.ddown_lora_b.defined()},
      {g.dx.defined(), router, g.dshared_gate.defined() || g.dshared_up.defined(), g.dshared_down.defined()}};
  const BlockTasks routed(p.routed.offsets, p.routed.groups, p.routed.width(), scratch);
  const BlockTasks shared(p.shared.offsets, p.shared.groups, p.has_shared ? p.shared.width() : 0, scratch);
  p.routed.a = take_hidden(p, p.routed, scratch);
  p.shared.a = p.has_shared ? take_hidden(p, p.shared, scratch) : nullptr;
  Trail trails[2] = {make_trail(p, p.routed, dout, needs[0], routed.column_blocks(), scratch),
                     p.has_shared ? make_trail(p, p.shared, dout, needs[1], shared.column_blocks(), scratch) : Trail{}};
  const LowRank& hidden_lora = p.routed.hidden_lora;
  const LowRank& down_lora = p.routed.down_lora;
  if (p.routed.hidden == nullptr || g.dgate_up_lora_b.defined()) {
    narrow_x(p, p.routed, scratch);
  }
  if (down_lora.rank > 0) {
    trails[0].narrow_down = take<float>(scratch, p.routed.places * down_lora.rank);
    narrow(p.routed, {{&down_lora.b[0], nullptr}, {trails[0].dout_rows, nullptr}, p.type, true, down_lora.scale},
           down_lora.rank, trails[0].narrow_down, scratch);
  }
  parallel_for(gate_tasks(p), [&](std::int64_t i) { run_gate_task(p, i); });
  parallel_for(routed.count() + shared.count(), [&](std::int64_t i) {
    const bool first = i < routed.count();
    const Trail& t = trails[first ? 0 : 1];
    if (t.wants_da || t.wants_a) {
      run_block(p, first ? p.routed : p.shared, t, first ? routed[i] : shared[i - routed.count()]);
    }
  });
  const std::int64_t k = p.routed.slots;
  for (std::int64_t i = 0; g.dweights.defined() && i < p.T * k; ++i) {
    const std::int64_t place = p.routed.pos[i];
    write_element(g.dweights, offset_of(g.dweights, i / k, i % k),
                  place < 0 ? 0.0f : factor_gradient(trails[0], place));
  }
  float* steps = nullptr;  // of the shared gate's logit
  if (router) {
    steps = scratch.floats(std::max<std::int64_t>(p.T, 1));
    for (std::int64_t t = 0; t < p.T; ++t) {
      steps[t] = p.shared_gate[t] * (1.0f - p.shared_gate[t]) * factor_gradient(trails[1], t);
    }
  }
  if (hidden_lora.rank > 0 && (g.dx.defined() || g.dgate_up_lora_a.defined())) {
    trails[0].narrow_hidden = take<float>(scratch, p.routed.places * hidden_lora.rank);
    narrow(p.routed,
           {{&hidden_lora.b[0], &hidden_lora.b[1]},
            {hidden_rows(p, p.routed, trails[0].dgate, scratch), hidden_rows(p, p.routed, trails[0].dup, scratch)},
            p.type,
            true,
            hidden_lora.scale},
           hidden_lora.rank, trails[0].narrow_hidden, scratch);
  }
  if (g.dx.defined()) {
    collect(
        p, g.dx,
        [&](const Set& s, const Run& run, const Collected& to) {
          const Trail& t = trails[&s == &p.routed ? 0 : 1];
          for_column_blocks(to, [&](std::int64_t column, std::int64_t columns) {
            for (int i = 0; i < 2; ++i) {
              for_row_blocks(run.count, [&](std::int64_t first, std::int64_t count, std::int64_t) {
                const void* rows[kBlockRows];
                for (std::int64_t r = 0; r < count; ++r) {
                  rows[r] = (i == 0 ? t.dgate : t.dup) + (run.place + first + r) * s.width() * p.bytes;
                }
                Factor f{i == 0 ? s.gate : s.up, run.group, column, columns, true};
                f.same_weight = first > 0;
                multiply(f, rows, p.type, count, to.at(first, column), to.pitch, i == 1, to.room);
              });
            }
            if (const LowRank& l = s.hidden_lora; l.rank > 0) {
              for_row_blocks(run.count, [&](std::int64_t first, std::int64_t count, std::int64_t) {
                widen({l.a, run.group, column, columns, true}, t.narrow_hidden, l.rank, run.place + first, count,
                      to.at(first, column), to.pitch, to.room);
              });
            }
          });
        },
        {nullptr, nullptr},
        [&](Result& r, std::int64_t first, std::int64_t column) {
          r.direction = p.has_shared ? p.router + column : nullptr;
          r.steps = p.has_shared ? steps + first : nullptr;
        });
  }
  const GateUp both = g.dgate_up.defined() ? gate_up_of(g.dgate_up, o.weight_axes, o.interleaved) : GateUp{};
  const Weights down = g.ddown.defined() ? weights_of(g.ddown, o.weight_axes) : Weights{};
  weight_gradients(p, p.routed, trails[0], g.dgate_up.defined() ? &both.gate : nullptr,
                   g.dgate_up.defined() ? &both.up : nullptr, g.ddown.defined() ? &down : nullptr);
  low_rank_gradients(p, p.routed, trails[0], g, o);
  if (!p.has_shared) {
    return;
  }
  const auto matrix = [](const TensorView& t) { return t.defined() ? matrix_of(t) : Weights{}; };
  const Weights shared_out[3] = {matrix(g.dshared_gate), matrix(g.dshared_up), matrix(g.dshared_down)};
  weight_gradients(p, p.shared, trails[1], g.dshared_gate.defined() ? &shared_out[0] : nullptr,
                   g.dshared_up.defined() ? &shared_out[1] : nullptr,
                   g.dshared_down.defined() ? &shared_out[2] : nullptr);
  if (g.dshared_router.defined()) {
    const void** rows = row_pointers(p.T, scratch, [&](std::int64_t t) { return steps + t; });
    const TensorView& r = g.dshared_router;
    outer_products({rows, p.shared.x_rows, nullptr, 0, p.type, p.shared.offsets, 1, false},
                   {static_cast<char*>(r.data), 1, p.H, 0, p.H, 1, data_type_index(r.dtype), dtype_bytes(r.dtype)});
  }
}

}  // namespace tidegate::moe_experts
