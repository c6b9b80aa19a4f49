// The gated delta rule over whole sequences as torch operators. Contract: include/tidegate/delta_rule.h.
#include <cstring>

#include "rule_call.h"

namespace tidegate::adapter {
namespace {

// The states that a backward wants, K-first. How many there are depends on the boundaries, the size of the tensor must
// not (under torch.compile): it has room for the most, and what is not used is 0.
Tensor room_for_saved_states(const RuleCall& c) {
  const std::int64_t most = c.keys.rows * ((std::max<std::int64_t>(c.keys.tokens, 1) - 1) / kSavedStateTokens);
  return empty({most, c.values.heads, c.keys.width, c.values.width}, c.wide);
}
TensorView used_states(TensorView room, std::int64_t count, bool v_first) {
  const std::int64_t bytes = dtype_bytes(room.dtype) * room.strides[0];
  std::memset(static_cast<char*>(room.data) + count * bytes, 0,
              static_cast<std::size_t>((room.sizes[0] - count) * bytes));
  room.sizes[0] = count;
  if (v_first) {
    std::swap(room.sizes[2], room.sizes[3]);
    std::swap(room.strides[2], room.strides[3]);
  }
  return room;
}

// Rows (sequence, tokens) of an integer tensor [M, 2].
std::vector<SnapshotPoint> snapshot_points(std::string_view op, const Optional& snapshot_at) {
  std::vector<SnapshotPoint> points;
  if (!snapshot_at.has_value()) {
    return points;
  }
  check_index_type(op, "snapshot_at", *snapshot_at);
  const TensorView at = view(op, "snapshot_at", *snapshot_at);
  check(at.rank == 2 && at.size(1) == 2, op, ": snapshot_at: expected rows (sequence, tokens) [M, 2], got ", Shape{at});
  const auto flat = integers(op, "snapshot_at", torch::stable::flatten(*snapshot_at, 0, -1));
  for (std::size_t m = 0; m < flat.size(); m += 2) {
    points.push_back({flat[m], flat[m + 1]});
  }
  return points;
}

std::tuple<Tensor, Tensor, Tensor> fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Optional initial_state,
                                       Optional cu_seqlens, Optional A_log, Optional dt_bias, Optional snapshot_at,
                                       std::optional<double> scale, bool output_final_state, bool use_qk_l2norm,
                                       bool beta_sigmoid, double beta_scale, bool state_v_first, std::string precision,
                                       std::string layout, std::optional<std::string> out_layout,
                                       std::int64_t time_segments, bool save_states, bool) {
  constexpr std::string_view op = "chunk_gated_delta_rule_fwd";
  RuleCall c = rule_call(op, k, v, g, beta, cu_seqlens, A_log, dt_bias,
                         {use_qk_l2norm, beta_sigmoid, beta_scale, precision, layout});
  add_output_options(c, scale, state_v_first, out_layout);
  c.options.time_segments = time_segments;
  check(!save_states || !snapshot_at.has_value(), op, ": save_states: expected False with snapshot_at, got True");
  const auto points = save_states ? saved_states(c.seq) : snapshot_points(op, snapshot_at);
  c.options.snapshot_at = points;
  const TensorView qv = dense(op, "q", q);
  const TensorView initial = view(op, "initial_state", initial_state);
  Tensor o = empty_output(c);
  Tensor final_state = output_final_state ? empty_states(c, c.seq.count()) : nothing(c.wide);
  Tensor snapshots = save_states               ? room_for_saved_states(c)
                     : snapshot_at.has_value() ? empty_states(c, static_cast<std::int64_t>(points.size()))
                                               : nothing(c.wide);
  TensorView target = save_states || snapshot_at.has_value() ? view(op, "snapshots", snapshots) : TensorView{};
  if (save_states) {
    target = used_states(target, static_cast<std::int64_t>(points.size()), state_v_first);
  }
  chunk_gated_delta_rule_fwd(qv, c.k, c.v, c.g, c.beta, initial, view(op, "o", o),
                             output_final_state ? view(op, "final_state", final_state) : TensorView{}, target, c.seq,
                             c.options);
  return {o, final_state, snapshots};
}

void fwd_out(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Optional initial_state, Optional cu_seqlens,
             Optional A_log, Optional dt_bias, Optional snapshot_at, std::optional<double> scale, bool use_qk_l2norm,
             bool beta_sigmoid, double beta_scale, bool state_v_first, std::string precision, std::string layout,
             std::optional<std::string> out_layout, std::int64_t time_segments, Tensor o, Optional final_state,
             Optional snapshots) {
  constexpr std::string_view op = "chunk_gated_delta_rule_fwd";
  RuleCall c = rule_call(op, k, v, g, beta, cu_seqlens, A_log, dt_bias,
                         {use_qk_l2norm, beta_sigmoid, beta_scale, precision, layout});
  add_output_options(c, scale, state_v_first, out_layout);
  c.options.time_segments = time_segments;
  const auto points = snapshot_points(op, snapshot_at);
  c.options.snapshot_at = points;
  check_apart(op, {{"o", o}, {"final_state", final_state}, {"snapshots", snapshots}},
              {{"cu_seqlens", cu_seqlens}, {"snapshot_at", snapshot_at}});
  chunk_gated_delta_rule_fwd(dense(op, "q", q), c.k, c.v, c.g, c.beta, view(op, "initial_state", initial_state),
                             view(op, "o", o), view(op, "final_state", final_state), view(op, "snapshots", snapshots),
                             c.seq, c.options);
}

void run_pool(Tensor& q, Tensor& k, Tensor& v, const Tensor& g, const Tensor& beta, const Tensor& state,
              const Tensor& state_indices, const Optional& cu_seqlens, const Optional& has_initial_state,
              const Optional& A_log, const Optional& dt_bias, std::int64_t null_slot, std::optional<double> scale,
              bool state_v_first, const std::optional<std::string>& out_layout, const Flags& flags, const Tensor* given,
              Tensor* made) {
  constexpr std::string_view op = "chunk_gated_delta_rule_pool";
  RuleCall c = rule_call(op, k, v, g, beta, cu_seqlens, A_log, dt_bias, flags);
  add_output_options(c, scale, state_v_first, out_layout);
  const auto slots = integers(op, "state_indices", state_indices);
  const auto initial = booleans(op, "has_initial_state", has_initial_state);
  check(!has_initial_state.has_value() || !initial.empty() || c.seq.count() == 0, op, ": has_initial_state: expected ",
        c.seq.count(), " entries (one per sequence), got 0");
  c.options.state_indices = slots;
  c.options.null_slot = null_slot;
  c.options.has_initial_state = initial;
  check_apart(op, {{"state", state}, {"o", given != nullptr ? Optional(*given) : Optional()}},
              {{"cu_seqlens", cu_seqlens}, {"state_indices", state_indices}, {"has_initial_state", has_initial_state}});
  const TensorView qv = dense(op, "q", q);
  if (made != nullptr) {
    *made = empty_output(c);
  }
  chunk_gated_delta_rule_pool(qv, c.k, c.v, c.g, c.beta, view(op, "state", state),
                              view(op, "o", made != nullptr ? *made : *given), c.seq, c.options);
}

Tensor pool(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state, Tensor state_indices,
            Optional cu_seqlens, Optional has_initial_state, Optional A_log, Optional dt_bias, std::int64_t null_slot,
            std::optional<double> scale, bool use_qk_l2norm, bool beta_sigmoid, double beta_scale, bool state_v_first,
            std::string precision, std::string layout, std::optional<std::string> out_layout) {
  Tensor o;
  run_pool(q, k, v, g, beta, state, state_indices, cu_seqlens, has_initial_state, A_log, dt_bias, null_slot, scale,
           state_v_first, out_layout, {use_qk_l2norm, beta_sigmoid, beta_scale, precision, layout}, nullptr, &o);
  return o;
}

void pool_out(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state, Tensor state_indices,
              Optional cu_seqlens, Optional has_initial_state, Optional A_log, Optional dt_bias, std::int64_t null_slot,
              std::optional<double> scale, bool use_qk_l2norm, bool beta_sigmoid, double beta_scale, bool state_v_first,
              std::string precision, std::string layout, std::optional<std::string> out_layout, Tensor o) {
  run_pool(q, k, v, g, beta, state, state_indices, cu_seqlens, has_initial_state, A_log, dt_bias, null_slot, scale,
           state_v_first, out_layout, {use_qk_l2norm, beta_sigmoid, beta_scale, precision, layout}, &o, nullptr);
}

std::tuple<Tensor, Tensor> segment_map(Tensor k, Tensor v, Tensor g, Tensor beta, Optional cu_seqlens, Optional A_log,
                                       Optional dt_bias, bool use_qk_l2norm, bool beta_sigmoid, double beta_scale,
                                       std::string precision, std::string layout) {
  constexpr std::string_view op = "gdn_segment_map";
  const RuleCall c = rule_call(op, k, v, g, beta, cu_seqlens, A_log, dt_bias,
                               {use_qk_l2norm, beta_sigmoid, beta_scale, precision, layout});
  Tensor phi = empty({c.seq.count(), c.values.heads, c.keys.width, c.keys.width}, c.wide);
  Tensor s = empty_states(c, c.seq.count());
  gdn_segment_map(c.k, c.v, c.g, c.beta, view(op, "phi", phi), view(op, "s", s), c.seq, c.options);
  return {phi, s};
}

void segment_map_out(Tensor k, Tensor v, Tensor g, Tensor beta, Optional cu_seqlens, Optional A_log, Optional dt_bias,
                     bool use_qk_l2norm, bool beta_sigmoid, double beta_scale, std::string precision,
                     std::string layout, Tensor phi, Tensor s) {
  constexpr std::string_view op = "gdn_segment_map";
  const RuleCall c = rule_call(op, k, v, g, beta, cu_seqlens, A_log, dt_bias,
                               {use_qk_l2norm, beta_sigmoid, beta_scale, precision, layout});
  check_apart(op, {{"phi", phi}, {"s", s}}, {{"cu_seqlens", cu_seqlens}});
  gdn_segment_map(c.k, c.v, c.g, c.beta, view(op, "phi", phi), view(op, "s", s), c.seq, c.options);
}

std::tuple<Tensor, Tensor> segment_combine(Tensor phi1, Tensor s1, Tensor phi2, Tensor s2) {
  constexpr std::string_view op = "gdn_segment_combine";
  const TensorView phi1v = dense(op, "phi1", phi1);
  const TensorView s1v = dense(op, "s1", s1);
  Tensor phi = empty_like(phi1v);
  Tensor s = empty_like(s1v);
  gdn_segment_combine(phi1v, s1v, dense(op, "phi2", phi2), dense(op, "s2", s2), view(op, "phi", phi), view(op, "s", s));
  return {phi, s};
}

void segment_combine_out(Tensor phi1, Tensor s1, Tensor phi2, Tensor s2, Tensor phi, Tensor s) {
  constexpr std::string_view op = "gdn_segment_combine";
  gdn_segment_combine(dense(op, "phi1", phi1), dense(op, "s1", s1), dense(op, "phi2", phi2), dense(op, "s2", s2),
                      view(op, "phi", phi), view(op, "s", s));
}

std::int64_t rule_chunk_size() { return chunk_size(); }

}  // namespace

// Optional tensors stand before the star because torch registers autograd only for positional tensors; pass them by
// keyword. The pool form has no gradient and needs no such order.
STABLE_TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  m.def(
      "chunk_gated_delta_rule_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state=None, "
      "Tensor? cu_seqlens=None, Tensor? A_log=None, Tensor? dt_bias=None, Tensor? snapshot_at=None, *, "
      "float? scale=None, bool output_final_state=False, bool use_qk_l2norm=False, bool beta_sigmoid=False, "
      "float beta_scale=1.0, bool state_v_first=False, str precision='fp32', str layout='BSND', str? out_layout=None, "
      "int time_segments=1, bool save_states=False, bool zero_row_safe=False) "
      "-> (Tensor o, Tensor final_state, Tensor snapshots)");
  m.def(
      "chunk_gated_delta_rule_fwd.out(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
      "Tensor? initial_state=None, Tensor? cu_seqlens=None, Tensor? A_log=None, Tensor? dt_bias=None, "
      "Tensor? snapshot_at=None, *, float? scale=None, bool use_qk_l2norm=False, bool beta_sigmoid=False, "
      "float beta_scale=1.0, bool state_v_first=False, str precision='fp32', str layout='BSND', str? out_layout=None, "
      "int time_segments=1, "
      "Tensor(a!) o, Tensor(b!)? final_state=None, Tensor(c!)? snapshots=None) -> ()");
  m.def(
      "chunk_gated_delta_rule_pool(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, *, "
      "Tensor state_indices, Tensor? cu_seqlens=None, Tensor? has_initial_state=None, Tensor? A_log=None, "
      "Tensor? dt_bias=None, int null_slot=-1, float? scale=None, bool use_qk_l2norm=False, bool beta_sigmoid=False, "
      "float beta_scale=1.0, bool state_v_first=False, str precision='fp32', str layout='BSND', str? out_layout=None) "
      "-> Tensor o");
  m.def(
      "chunk_gated_delta_rule_pool.out(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, *, "
      "Tensor state_indices, Tensor? cu_seqlens=None, Tensor? has_initial_state=None, Tensor? A_log=None, "
      "Tensor? dt_bias=None, int null_slot=-1, float? scale=None, bool use_qk_l2norm=False, bool beta_sigmoid=False, "
      "float beta_scale=1.0, bool state_v_first=False, str precision='fp32', str layout='BSND', str? out_layout=None, "
      "Tensor(b!) o) -> ()");
  m.def(
      "gdn_segment_map(Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? cu_seqlens=None, Tensor? A_log=None, "
      "Tensor? dt_bias=None, *, bool use_qk_l2norm=False, bool beta_sigmoid=False, float beta_scale=1.0, "
      "str precision='fp32', str layout='BSND') -> (Tensor phi, Tensor s)");
  m.def(
      "gdn_segment_map.out(Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? cu_seqlens=None, Tensor? A_log=None, "
      "Tensor? dt_bias=None, *, bool use_qk_l2norm=False, bool beta_sigmoid=False, float beta_scale=1.0, "
      "str precision='fp32', str layout='BSND', Tensor(a!) phi, Tensor(b!) s) -> ()");
  m.def("gdn_segment_combine(Tensor phi1, Tensor s1, Tensor phi2, Tensor s2) -> (Tensor phi, Tensor s)");
  m.def(
      "gdn_segment_combine.out(Tensor phi1, Tensor s1, Tensor phi2, Tensor s2, *, Tensor(a!) phi, Tensor(b!) s) -> ()");
  m.def("chunk_size() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(tidegate, CPU, m) {
  m.impl("chunk_gated_delta_rule_fwd", TORCH_BOX(&fwd));
  m.impl("chunk_gated_delta_rule_fwd.out", TORCH_BOX(&fwd_out));
  m.impl("chunk_gated_delta_rule_pool", TORCH_BOX(&pool));
  m.impl("chunk_gated_delta_rule_pool.out", TORCH_BOX(&pool_out));
  m.impl("gdn_segment_map", TORCH_BOX(&segment_map));
  m.impl("gdn_segment_map.out", TORCH_BOX(&segment_map_out));
  m.impl("gdn_segment_combine", TORCH_BOX(&segment_combine));
  m.impl("gdn_segment_combine.out", TORCH_BOX(&segment_combine_out));
}

STABLE_TORCH_LIBRARY_IMPL(tidegate, CompositeExplicitAutograd, m) { m.impl("chunk_size", TORCH_BOX(&rule_chunk_size)); }

}  // namespace tidegate::adapter
