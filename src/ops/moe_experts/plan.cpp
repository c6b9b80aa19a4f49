// What a call of the experts is made of, and the parts that its two directions share.
#include "ops/moe_experts/plan.h"

#include <cmath>

#include "tidegate/cpu.h"

namespace tidegate::moe_experts {
namespace {

using namespace grouped_matmul;

constexpr std::int64_t kGateTokens = 64;  // of a task

void set_places(Set& s, const Routing& r, std::int64_t slots, const MoeExpertsInputs& in, Scratch& scratch) {
  s.groups = r.experts;
  s.places = r.routed();
  s.slots = slots;
  s.offsets = r.offsets;
  s.src = r.src;
  s.pos = r.pos;
  s.x_rows = row_pointers(s.places, scratch, [&](std::int64_t j) {
    const std::int64_t t = s.src[j] / slots;
    return in.x_rows != nullptr ? in.x_rows[t] : row_at(in.x, t);
  });
}

// Inside a group places ascend with the tokens, so those of a block of tokens are neighbours.
void set_cuts(Set& s, const Plan& p, Scratch& scratch) {
  auto* cuts = take<std::int64_t>(scratch, s.groups * p.token_blocks + 1);
  for (std::int64_t g = 0; g < s.groups; ++g) {
    const std::int32_t* from = s.src + s.offsets[g];
    for (std::int64_t b = 0; b < p.token_blocks; ++b) {
      cuts[g * p.token_blocks + b] =
          std::lower_bound(from, s.src + s.offsets[g + 1], b * p.token_block * s.slots) - s.src;
    }
  }
  cuts[s.groups * p.token_blocks] = s.offsets[s.groups];
  s.cuts = cuts;
}

// The shared expert has none: it is made of linear layers, which have their own.
void set_low_rank(Set& s, const MoeExpertsInputs& in, const MoeExpertsOptions& o, Scratch& scratch) {
  if (in.gate_up_lora_a.defined()) {
    const GateUp both = gate_up_of(in.gate_up_lora_b, WeightAxes::kNK, o.interleaved);
    s.hidden_lora = {in.gate_up_lora_a.sizes[1],
                     weights_of(in.gate_up_lora_a, WeightAxes::kNK),
                     {both.gate, both.up},
                     static_cast<float>(o.gate_up_lora_scale),
                     nullptr};
  }
  if (in.down_lora_a.defined()) {
    s.down_lora = {in.down_lora_a.sizes[1],
                   weights_of(in.down_lora_a, WeightAxes::kNK),
                   {weights_of(in.down_lora_b, WeightAxes::kNK), {}},
                   static_cast<float>(o.down_lora_scale),
                   nullptr};
  }
  for (LowRank* l : {&s.hidden_lora, &s.down_lora}) {
    l->u = take<float>(scratch, s.places * l->rank);
  }
}

}  // namespace

Plan make_plan(const MoeExpertsInputs& in, const std::int32_t* ids, const MoeExpertsOptions& o,
               const TensorView& hidden, Scratch& scratch) {
  Plan p{};
  p.T = in.x.sizes[0];
  p.H = in.x.sizes[1];
  p.type = data_type_index(in.x.dtype);
  p.bytes = dtype_bytes(in.x.dtype);
  p.round_y = o.round_y;
  const std::int64_t k = in.ids.sizes[1];
  p.token_block = kTokenBlock;
  p.token_blocks = (p.T + p.token_block - 1) / p.token_block;
  const GateUp both = gate_up_of(in.gate_up, o.weight_axes, o.interleaved);
  p.routed.gate = both.gate;
  p.routed.up = both.up;
  p.routed.down = weights_of(in.down, o.weight_axes);
  set_places(p.routed, sort_pairs(ids, p.T * k, in.gate_up.sizes[0], scratch), k, in, scratch);
  set_cuts(p.routed, p, scratch);
  set_low_rank(p.routed, in, o, scratch);
  if (hidden.defined()) {
    p.routed.hidden = hidden.as<float>();
    p.routed.hidden_row = hidden.strides[0];
    p.routed.hidden_up = hidden.strides[1];
  }
  auto* place_weights = take<float>(scratch, p.routed.places);
  for (std::int64_t j = 0; j < p.routed.places; ++j) {
    const std::int64_t pair = p.routed.src[j];
    place_weights[j] = static_cast<float>(read_element(in.weights, offset_of(in.weights, pair / k, pair % k)));
  }
  p.routed.place_weights = place_weights;
  p.has_shared = in.shared_gate.defined();
  if (!p.has_shared) {
    return p;
  }
  p.shared.gate = matrix_of(in.shared_gate);
  p.shared.up = matrix_of(in.shared_up);
  p.shared.down = matrix_of(in.shared_down);
  auto* zeros = take<std::int32_t>(scratch, p.T);
  std::fill(zeros, zeros + p.T, 0);
  set_places(p.shared, sort_pairs(zeros, p.T, 1, scratch), 1, in, scratch);
  set_cuts(p.shared, p, scratch);
  p.shared_gate = take<float>(scratch, p.T);
  p.shared.place_weights = p.shared_gate;
  auto* router = take<float>(scratch, p.H);
  copy_parameter(in.shared_router, router);
  p.router = router;
  return p;
}

std::int64_t gate_tasks(const Plan& p) { return p.has_shared ? (p.T + kGateTokens - 1) / kGateTokens : 0; }

void run_gate_task(const Plan& p, std::int64_t task) {
  const std::int64_t first = task * kGateTokens;
  const std::int64_t count = std::min(kGateTokens, p.T - first);
  const grouped_matmul::Kernels& kernels = grouped_matmul_kernels_for(active_isa());
  Scratch own;
  Block b{};
  b.rows = p.shared.x_rows + first;
  b.row_type = p.type;
  b.row_count = count;
  b.columns = 1;
  b.inner = p.H;
  b.out = p.shared_gate + first;
  b.pitch = 1;
  b.room = own.floats(kernels.room_floats);
  set_weight(b, p.router, p.H, 1, 0);
  kernels.product(b);
  for (std::int64_t t = first; t < first + count; ++t) {
    p.shared_gate[t] = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(p.shared_gate[t]))));
  }
}

Block block_of(const Factor& f, const void* const* rows, int row_type, std::int64_t count) {
  const Weights& w = f.w;
  Block b{};
  b.rows = rows;
  b.row_type = row_type;
  b.row_count = count;
  b.columns = f.columns;
  b.inner = f.transposed ? w.N : w.K;
  b.later = f.later;
  b.same_rows = f.same_rows;
  b.same_weight = f.same_weight;
  b.packed = f.packed;
  set_weight(b, f.transposed ? w.at(f.group, 0, f.first) : w.at(f.group, f.first, 0), f.transposed ? w.column : w.row,
             f.transposed ? w.row : w.column, w.type);
  return b;
}

void multiply(const Factor& f, const void* const* rows, int row_type, std::int64_t count, float* out,
              std::int64_t pitch, bool accumulate, float* room) {
  Block b = block_of(f, rows, row_type, count);
  b.out = out;
  b.pitch = pitch;
  b.accumulate = accumulate;
  b.room = room;
  grouped_matmul_kernels_for(active_isa()).product(b);
}

}  // namespace tidegate::moe_experts
