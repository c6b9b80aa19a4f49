#include "ops/chunk_gated_delta_rule/problem.h"

#include <cmath>
#include <string>

namespace tidegate {

Precision parse_precision(std::string_view op, std::string_view name) {
  check(name == "fp32" || name == "bf16", op, ": precision: expected fp32 or bf16, got ", name);
  return name == "bf16" ? Precision::kBf16 : Precision::kFp32;
}

namespace chunk_gated_delta_rule {
namespace {

void check_parameter(std::string_view op, Named t, const Problem& p) {
  check_shape(op, t, {p.sizes.HV});
  check_float(op, t);
}

// Slot of every sequence, each used once.
std::vector<std::int64_t> check_slots(std::string_view op, const SeqLens& seq,
                                      const ChunkGatedDeltaRuleOptions& options, std::int64_t slots) {
  const std::int64_t N = seq.count();
  std::vector<std::int64_t> out(static_cast<std::size_t>(N));
  if (options.state_indices.empty()) {
    for (std::int64_t n = 0; n < N; ++n) {
      out[static_cast<std::size_t>(n)] = n;
    }
    return out;
  }
  check(static_cast<std::int64_t>(options.state_indices.size()) == N, op, ": state_indices: expected ", N,
        " entries (one per sequence), got ", options.state_indices.size());
  std::vector<std::int64_t> user(static_cast<std::size_t>(slots), -1);
  for (std::int64_t n = 0; n < N; ++n) {
    const std::int64_t slot = options.state_indices[static_cast<std::size_t>(n)];
    if (slot == options.null_slot) {
      out[static_cast<std::size_t>(n)] = -1;
      continue;
    }
    check(slots > 0, op, ": state_indices[", n, "]: expected ", options.null_slot, " (null slot) in a pool of 0, got ",
          slot);
    check(slot >= 0 && slot < slots, op, ": state_indices[", n, "]: expected 0 to ", slots - 1, " or ",
          options.null_slot, " (null slot), got ", slot);
    std::int64_t& other = user[static_cast<std::size_t>(slot)];
    check(other < 0, op, ": state_indices[", n, "]: expected a slot of its own, got ", slot, " (also of sequence ",
          other, ")");
    other = n;
    out[static_cast<std::size_t>(n)] = slot;
  }
  return out;
}

void check_snapshots(std::string_view op, const Tensors& t, const SeqLens& seq, const Problem& p,
                     const ChunkGatedDeltaRuleOptions& options) {
  const auto count = static_cast<std::int64_t>(options.snapshot_at.size());
  check(count == 0 || t.snapshots.defined(), op, ": snapshots: expected a tensor (snapshot_at has ", count,
        " entries), got none");
  if (t.snapshots.defined()) {
    check_states(op, {"snapshots", t.snapshots}, {"k", t.k}, p.sizes, count, "one per entry of snapshot_at",
                 options.state_v_first);
    check_dtype(op, {"snapshots", t.snapshots}, t.k.dtype == DType::kF64 ? DType::kF64 : DType::kF32);
  }
  for (std::int64_t m = 0; m < count; ++m) {
    const SnapshotPoint& at = options.snapshot_at[static_cast<std::size_t>(m)];
    check(seq.count() > 0, op, ": snapshot_at: expected no entries without a sequence, got ", count);
    check(at.sequence >= 0 && at.sequence < seq.count(), op, ": snapshot_at[", m, "]: expected a sequence from 0 to ",
          seq.count() - 1, ", got ", at.sequence);
    check(p.slots[static_cast<std::size_t>(at.sequence)] >= 0, op, ": snapshot_at[", m,
          "]: expected a sequence with a slot, got ", at.sequence, " (null slot)");
    check(at.tokens >= 0 && at.tokens <= seq[at.sequence].length(), op, ": snapshot_at[", m, "]: expected 0 to ",
          seq[at.sequence].length(), " tokens, got ", at.tokens);
  }
}

}  // namespace

Problem check_inputs(std::string_view op, const Tensors& t, const SeqLens& seq,
                     const ChunkGatedDeltaRuleOptions& options) {
  Problem p{};
  p.layout = options.layout;
  p.out_layout = options.out_layout.value_or(options.layout);
  check(has_batch(p.layout) == has_batch(p.out_layout), op,
        ": out_layout: expected BSND or BNSD with a batched layout,",
        " TND or NTD with a packed one, got another kind");
  p.sizes = key_sizes(op, {"k", t.k}, p.layout);
  value_sizes(op, {"v", t.v}, {"k", t.k}, p.layout, p.sizes);
  if (t.q.defined() || t.o.defined()) {
    check_tokens_heads(op, {"q", t.q}, p.layout, p.sizes, p.sizes.HK, p.sizes.K);
    check_same_dtype(op, {"q", t.q}, {"k", t.k});
  }
  check_boundaries(op, seq, p.sizes);
  if (options.A_log.defined()) {
    check_parameter(op, {"A_log", options.A_log}, p);
  }
  if (options.dt_bias.defined()) {
    check(options.A_log.defined(), op, ": dt_bias: expected none without A_log, got a tensor");
    check_parameter(op, {"dt_bias", options.dt_bias}, p);
  }
  check(options.beta_sigmoid || options.beta_scale == 1.0, op, ": beta_scale: expected 1 without beta_sigmoid, got ",
        options.beta_scale);
  check(std::isfinite(options.beta_scale), op, ": beta_scale: expected a finite number, got ", options.beta_scale);
  p.scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(p.sizes.K)));
  check(std::isfinite(p.scale), op, ": scale: expected a finite number, got ", p.scale);
  return p;
}

Problem check_call(std::string_view op, const Tensors& t, const SeqLens& seq, const ChunkGatedDeltaRuleOptions& options,
                   const StateNames& names) {
  Problem p = check_inputs(op, t, seq, options);
  check_gate(op, {"g", t.g}, {"k", t.k}, p.layout, p.sizes);
  check_gate(op, {"beta", t.beta}, {"k", t.k}, p.layout, p.sizes);
  check(options.time_segments >= 1, op, ": time_segments: expected >= 1, got ", options.time_segments);
  if (options.time_segments > 1) {
    check(seq.rows() == 1, op, ": time_segments: expected 1 with ", seq.rows(), " rows, got ", options.time_segments);
    check(options.snapshot_at.empty() && options.state_indices.empty(), op,
          ": time_segments: expected 1 with snapshots or a pool, got ", options.time_segments);
  }
  const bool pool = !options.state_indices.empty();
  check(!pool || t.initial_state.defined() || t.final_state.defined(), op,
        ": state_indices: expected none without states, got a list");
  const TensorView& states = t.initial_state.defined() ? t.initial_state : t.final_state;
  const std::int64_t count = pool && states.rank > 0 ? states.size(0) : seq.count();
  const std::string what = pool ? "as the other states" : "one per sequence of " + std::to_string(seq.count());
  check_states(op, {names.initial, t.initial_state}, {"k", t.k}, p.sizes, count, what, options.state_v_first);
  check_states(op, {names.last, t.final_state}, {"k", t.k}, p.sizes, count, what, options.state_v_first);
  check_stored(op, {names.last, t.final_state});
  p.slots = check_slots(op, seq, options, count);
  check(options.has_initial_state.empty() || static_cast<std::int64_t>(options.has_initial_state.size()) == seq.count(),
        op, ": has_initial_state: expected ", seq.count(), " entries (one per sequence), got ",
        options.has_initial_state.size());
  check_snapshots(op, t, seq, p, options);

  if (t.o.defined()) {
    check_tokens_heads(op, {"o", t.o}, p.out_layout, p.sizes, p.sizes.HV, p.sizes.V);
    check_same_dtype(op, {"o", t.o}, {"k", t.k});
  }
  // A pool that is read and written must be one and the same memory, or two that do not meet.
  const bool in_place = t.initial_state.defined() && t.final_state.defined() &&
                        t.initial_state.data == t.final_state.data && t.initial_state.dtype == t.final_state.dtype &&
                        std::equal(t.initial_state.strides, t.initial_state.strides + 4, t.final_state.strides);
  const TensorView none;
  check_outputs(op, {{"o", t.o}, {names.last, t.final_state}, {"snapshots", t.snapshots}},
                {{"q", t.q},
                 {"k", t.k},
                 {"v", t.v},
                 {"g", t.g},
                 {"beta", t.beta},
                 {names.initial, in_place ? none : t.initial_state},
                 {"A_log", options.A_log},
                 {"dt_bias", options.dt_bias},
                 {"snapshot_at", list_view(options.snapshot_at)},
                 {"state_indices", list_view(options.state_indices)},
                 {"has_initial_state", list_view(options.has_initial_state)}});
  return p;
}

}  // namespace chunk_gated_delta_rule
}  // namespace tidegate
