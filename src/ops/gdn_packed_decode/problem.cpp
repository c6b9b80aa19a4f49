#include "ops/gdn_packed_decode/problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/row_checks.h"

namespace tidegate {

Projection parse_projection(std::string_view op, std::string_view name) {
  check(name == "qkv" || name == "qkvz_ba", op, ": projection: expected qkv or qkvz_ba, got ", name);
  return name == "qkv" ? Projection::kQkv : Projection::kQkvzBa;
}

namespace packed_decode {
namespace {

using causal_conv1d::StateMode;
using causal_conv1d::UpdateRow;

// A [T, width] tensor of mixed's type.
void check_rows_of(std::string_view op, Named t, Named mixed, std::int64_t width) {
  check_shape(op, t, {mixed.tensor.size(0), width});
  check_same_dtype(op, t, mixed);
  check_inner_stride(op, t);
}

Parts check_projections(std::string_view op, const Tensors& t, const Options& o) {
  const Named mixed{"mixed", t.mixed};
  const std::int64_t G = o.HV / o.HK, keys = o.HK * o.K;
  check_rank(op, mixed, 2);
  check(t.mixed.dtype == DType::kF32 || t.mixed.dtype == DType::kBF16 || t.mixed.dtype == DType::kF16, op,
        ": mixed: expected dtype float32, bfloat16 or float16, got dtype ", t.mixed.dtype);
  if (o.projection == Projection::kQkv) {
    check_rows_of(op, mixed, mixed, 2 * keys + o.HV * o.V);
    check_rows_of(op, {"z", t.z}, mixed, o.HV * o.V);
    check_rows_of(op, {"a", t.a}, mixed, o.HV);
    check_rows_of(op, {"b", t.b}, mixed, o.HV);
    return {{&t.mixed, 0, o.K}, {&t.mixed, keys, o.K}, {&t.mixed, 2 * keys, G * o.V},
            {&t.z, 0, G * o.V}, {&t.a, 0, G},          {&t.b, 0, G}};
  }
  const std::int64_t row = 2 * o.K + 2 * G * o.V;
  check_rows_of(op, mixed, mixed, o.HK * row);
  check(!t.z.defined(), op, ": z: expected none with projection qkvz_ba, got a tensor");
  check(!t.a.defined(), op, ": a: expected none with projection qkvz_ba, got a tensor");
  check_rows_of(op, {"b", t.b}, mixed, 2 * o.HV);
  return {{&t.mixed, 0, row}, {&t.mixed, o.K, row}, {&t.mixed, 2 * o.K, row}, {&t.mixed, 2 * o.K + G * o.V, row},
          {&t.b, G, 2 * G},   {&t.b, 0, 2 * G}};
}

void check_parameter(std::string_view op, Named t, std::int64_t size) {
  check_shape(op, t, {size});
  check_float(op, t);
}

// The row of conv_state of every sequence that is not skipped.
const UpdateRow* check_conv_rows(std::string_view op, const Problem& p, const Tensors& t, const SeqLens& seq,
                                 const Options& o, Scratch& scratch) {
  const std::int64_t count = seq.count(), rows = t.conv_state.size(0), S = t.conv_state.size(2);
  check(o.conv_indices.empty() || static_cast<std::int64_t>(o.conv_indices.size()) == count, op,
        ": conv_indices: expected ", count, " entries (one per sequence), got ", o.conv_indices.size());
  auto* list = static_cast<UpdateRow*>(scratch.bytes(static_cast<std::size_t>(count) * sizeof(UpdateRow)));
  const auto bytes = static_cast<std::size_t>(rows + 7) / 8;
  auto* used = static_cast<unsigned char*>(scratch.bytes(bytes));
  std::memset(used, 0, bytes);
  for (std::int64_t n = 0; n < count; ++n) {
    list[n] = {-1, false, 0};
    if (p.states.start[n] == recurrence::kSkipped) {
      continue;
    }
    const auto at = static_cast<std::size_t>(n);
    const std::int64_t row = o.conv_indices.empty() ? p.states.slots_of(n)[0] : o.conv_indices[at];
    check(row >= 0 && row < rows, op, ": conv_indices[", n, "]: expected 0 to ", rows - 1, " (sequence ", n,
          " has a state), got ", row);
    check((used[row / 8] >> (row % 8) & 1) == 0, op, ": conv_indices[", n, "]: expected a row of its own, got ", row,
          " (also of another sequence)");
    used[row / 8] |= static_cast<unsigned char>(1 << row % 8);
    list[n].slot = row;
    if (p.mode == StateMode::kSpeculative) {
      list[n].count = o.num_accepted_tokens[at];
      const std::int64_t most = S - p.taps + 2, length = seq[n].length();
      check(list[n].count <= most, op, ": num_accepted_tokens[", n, "]: expected 1 to ", most, " (conv state length ",
            S, "), got ", list[n].count);
      check(length <= most, op, ": conv_state: expected state length >= ", p.taps - 2 + length, " for ", length,
            " tokens of sequence ", n, ", got ", S);
    }
  }
  return list;
}

recurrence::Options state_options(const Options& o) {
  recurrence::Options s;
  s.state_indices = o.state_indices;
  s.states_per_sequence = o.states_per_sequence;
  s.num_accepted_tokens = o.num_accepted_tokens;
  s.null_slot = o.null_slot;
  return s;
}

}  // namespace

std::int64_t sequences_per_task(std::int64_t sequences, std::int64_t key_heads, std::int64_t threads) {
  constexpr std::int64_t kMost = 8;  // sequences that share the packed weights of their channels
  const std::int64_t most = std::clamp<std::int64_t>(sequences, 1, kMost);
  return std::clamp<std::int64_t>(sequences * key_heads / (4 * threads), 1, most);
}

Problem check_call(std::string_view op, const Tensors& t, const SeqLens& seq, const Options& o, Scratch& scratch) {
  check(o.HK >= 1, op, ": HK: expected >= 1, got ", o.HK);
  check(o.HV >= 1 && o.HV % o.HK == 0, op, ": HV: expected a multiple of ", o.HK, " (HK), got ", o.HV);
  check(o.K >= 1, op, ": K: expected >= 1, got ", o.K);
  check(o.V >= 1, op, ": V: expected >= 1, got ", o.V);
  Problem p{};
  p.parts = check_projections(op, t, o);
  const std::int64_t channels = 2 * o.HK * o.K + o.HV * o.V;
  check_rank(op, {"conv_weight", t.conv_weight}, 2);
  check_float(op, {"conv_weight", t.conv_weight});
  p.taps = t.conv_weight.size(1);
  check(p.taps >= 2 && p.taps <= 4, op, ": conv_weight: expected 2 to 4 taps [D, W], got ", Shape{t.conv_weight});
  check_shape(op, {"conv_weight", t.conv_weight}, {channels, p.taps});
  if (t.conv_bias.defined()) {
    check_parameter(op, {"conv_bias", t.conv_bias}, channels);
  }
  check_parameter(op, {"A_log", t.A_log}, o.HV);
  if (t.dt_bias.defined()) {
    check_parameter(op, {"dt_bias", t.dt_bias}, o.HV);
  }
  check_parameter(op, {"norm_weight", t.norm_weight}, o.V);
  check_eps(op, o.norm.eps);
  check(o.norm.activation != Activation::kNone, op, ": activation: expected silu, swish or sigmoid, got None");
  const Named mixed{"mixed", t.mixed};
  check_rank(op, {"conv_state", t.conv_state}, 3);
  check_same_dtype(op, {"conv_state", t.conv_state}, mixed);
  check(t.conv_state.size(1) == channels, op, ": conv_state: expected ", channels, " channels, got ",
        t.conv_state.size(1));
  check(t.conv_state.size(2) >= p.taps - 1, op, ": conv_state: expected state length >= ", p.taps - 1, ", got ",
        t.conv_state.size(2));
  p.states.sizes = {1, t.mixed.size(0), o.HK, o.HV, o.K, o.V};
  p.states.layout = Layout::kTND;
  p.states.scale = o.scale.value_or(1.0 / std::sqrt(static_cast<double>(o.K)));
  check(std::isfinite(p.states.scale), op, ": scale: expected a finite number, got ", p.states.scale);
  check_rank(op, {"state", t.state}, 4);
  check_states(op, {"state", t.state}, mixed, p.states.sizes, t.state.size(0), "slots", o.state_v_first);
  check_stored(op, {"state", t.state});
  check_inner_stride(op, {"state", t.state});
  check_rows_of(op, {"y", t.y}, mixed, o.HV * o.V);
  check_boundaries(op, seq, p.states.sizes);
  recurrence::check_indices(op, p.states, seq, state_options(o), t.state.size(0), scratch);
  // Longer ones take chunks in the separate operators; this one is for steps.
  check(p.states.per_token || seq.longest() <= recurrence::kTokenByToken, op, ": cu_seqlens: expected at most ",
        recurrence::kTokenByToken, " tokens per sequence, got ", seq.longest());
  p.mode = o.num_accepted_tokens.empty() ? StateMode::kTail : StateMode::kSpeculative;
  p.rows = check_conv_rows(op, p, t, seq, o, scratch);
  check_outputs(op, {{"y", t.y}, {"conv_state", t.conv_state}, {"state", t.state}},
                {mixed,
                 {"z", t.z},
                 {"a", t.a},
                 {"b", t.b},
                 {"conv_weight", t.conv_weight},
                 {"conv_bias", t.conv_bias},
                 {"A_log", t.A_log},
                 {"dt_bias", t.dt_bias},
                 {"norm_weight", t.norm_weight},
                 {"state_indices", list_view(o.state_indices)},
                 {"conv_indices", list_view(o.conv_indices)},
                 {"num_accepted_tokens", list_view(o.num_accepted_tokens)}});
  return p;
}

}  // namespace packed_decode
}  // namespace tidegate
