// The gated delta rule token by token as torch operators. Contract: include/tidegate/recurrent.h.
#include "slots.h"

namespace tidegate::adapter {
namespace {

using Options = RecurrentGatedDeltaRuleOptions;

// The inputs of both forms, as torch hands them over.
struct Inputs {
  Tensor q, k, v;
  Optional g, gk;
  Tensor beta;
  Optional cu_seqlens, A_log, dt_bias;
  std::optional<double> scale;
  bool use_qk_l2norm, beta_sigmoid;
  double beta_scale;
  bool state_v_first;
  const std::string& layout;
};

struct Call {
  TensorView q, k, v, g, gk, beta;
  SeqLens seq;
  Options options;
};

SeqLens sequences(std::string_view op, const Inputs& in, const TensorView& k, Layout layout) {
  const int rank = has_batch(layout) ? 4 : 3;
  check(k.rank == rank, op, ": k: expected ", rank, " dimensions, got ", k.rank, " in ", Shape{k});
  const std::int64_t tokens = k.size(is_head_major(layout) ? -2 : -3);
  return has_batch(layout) ? boundaries(op, in.cu_seqlens, k.size(0), tokens)
                           : packed_sequences(op, in.cu_seqlens, tokens);
}

Call make_call(std::string_view op, Inputs& in) {
  Options o;
  o.layout = parse_layout(op, in.layout);
  o.scale = in.scale;
  o.use_qk_l2norm = in.use_qk_l2norm;
  o.beta_sigmoid = in.beta_sigmoid;
  o.beta_scale = in.beta_scale;
  o.state_v_first = in.state_v_first;
  o.A_log = view(op, "A_log", in.A_log);
  o.dt_bias = view(op, "dt_bias", in.dt_bias);
  const TensorView k = dense(op, "k", in.k);
  const bool channels = view(op, "beta", in.beta).rank == k.rank;
  return {dense(op, "q", in.q),           k,
          dense(op, "v", in.v),           view(op, "g", in.g),
          dense(op, "gk", in.gk),         channels ? dense(op, "beta", in.beta) : view(op, "beta", in.beta),
          sequences(op, in, k, o.layout), o};
}

// What only the pool form has.
struct Pool {
  const Tensor& state;
  const Tensor& state_indices;
  const Optional& num_accepted_tokens;
  const Optional& has_initial_state;
  std::int64_t null_slot;
};

void run_pool(Inputs in, const Pool& pool, const Tensor* given, Tensor* made) {
  constexpr std::string_view op = "recurrent_gated_delta_rule";
  Call c = make_call(op, in);
  const SlotIndices indices = slot_indices(op, pool.state_indices, c.seq);
  const auto accepted = per_sequence(op, "num_accepted_tokens", pool.num_accepted_tokens, c.seq);
  const auto has_initial = per_sequence_flags(op, "has_initial_state", pool.has_initial_state, c.seq);
  c.options.state_indices = indices.slots;
  c.options.states_per_sequence = indices.per_sequence;
  c.options.num_accepted_tokens = accepted;
  c.options.has_initial_state = has_initial;
  c.options.null_slot = pool.null_slot;
  check_apart(op, {{"state", pool.state}, {"o", given != nullptr ? Optional(*given) : Optional()}},
              {{"cu_seqlens", in.cu_seqlens},
               {"state_indices", pool.state_indices},
               {"num_accepted_tokens", pool.num_accepted_tokens},
               {"has_initial_state", pool.has_initial_state}});
  if (made != nullptr) {
    *made = empty_like(c.v);
  }
  recurrent_gated_delta_rule(c.q, c.k, c.v, c.g, c.gk, c.beta, view(op, "state", pool.state),
                             view(op, "o", made != nullptr ? *made : *given), c.seq, c.options);
}

Tensor pool(Tensor q, Tensor k, Tensor v, Optional g, Tensor beta, Tensor state, Tensor state_indices, Optional gk,
            Optional cu_seqlens, Optional num_accepted_tokens, Optional has_initial_state, Optional A_log,
            Optional dt_bias, std::int64_t null_slot, std::optional<double> scale, bool use_qk_l2norm,
            bool beta_sigmoid, double beta_scale, bool state_v_first, std::string layout) {
  Tensor o;
  run_pool({q, k, v, g, gk, beta, cu_seqlens, A_log, dt_bias, scale, use_qk_l2norm, beta_sigmoid, beta_scale,
            state_v_first, layout},
           {state, state_indices, num_accepted_tokens, has_initial_state, null_slot}, nullptr, &o);
  return o;
}

void pool_out(Tensor q, Tensor k, Tensor v, Optional g, Tensor beta, Tensor state, Tensor state_indices, Optional gk,
              Optional cu_seqlens, Optional num_accepted_tokens, Optional has_initial_state, Optional A_log,
              Optional dt_bias, std::int64_t null_slot, std::optional<double> scale, bool use_qk_l2norm,
              bool beta_sigmoid, double beta_scale, bool state_v_first, std::string layout, Tensor o) {
  run_pool({q, k, v, g, gk, beta, cu_seqlens, A_log, dt_bias, scale, use_qk_l2norm, beta_sigmoid, beta_scale,
            state_v_first, layout},
           {state, state_indices, num_accepted_tokens, has_initial_state, null_slot}, &o, nullptr);
}

constexpr std::string_view kFwd = "recurrent_gated_delta_rule_fwd";

// States of the functional form are as wide as sums are.
void check_wide_state(const Call& c, std::string_view name, const TensorView& t) {
  const DType wide = c.k.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  check(!t.defined() || t.dtype == wide, kFwd, ": ", name, ": expected dtype ", dtype_name(wide), ", got dtype ",
        dtype_name(t.dtype));
}

std::tuple<Tensor, Tensor> fwd(Tensor q, Tensor k, Tensor v, Optional g, Tensor beta, Optional initial_state,
                               Optional cu_seqlens, Optional A_log, Optional dt_bias, Optional gk,
                               std::optional<double> scale, bool output_final_state, bool use_qk_l2norm,
                               bool beta_sigmoid, double beta_scale, bool state_v_first, std::string layout) {
  Inputs in{q,
            k,
            v,
            g,
            gk,
            beta,
            cu_seqlens,
            A_log,
            dt_bias,
            scale,
            use_qk_l2norm,
            beta_sigmoid,
            beta_scale,
            state_v_first,
            layout};
  const Call c = make_call(kFwd, in);
  const TensorView initial = dense(kFwd, "initial_state", initial_state);
  check_wide_state(c, "initial_state", initial);
  Tensor o = empty_like(c.v);
  const ScalarType wide = c.k.dtype == DType::kF64 ? ScalarType::Double : ScalarType::Float;
  if (!output_final_state) {
    recurrent_gated_delta_rule_fwd(c.q, c.k, c.v, c.g, c.gk, c.beta, initial, view(kFwd, "o", o), {}, c.seq, c.options);
    return {o, nothing(wide)};
  }
  const bool head_major = is_head_major(c.options.layout);
  const std::int64_t HV = c.v.rank > 2 ? c.v.size(head_major ? -3 : -2) : 0;
  const std::int64_t K = c.k.size(-1), V = c.v.rank > 0 ? c.v.size(-1) : 0;
  Tensor final_state = empty({c.seq.count(), HV, state_v_first ? V : K, state_v_first ? K : V}, wide);
  recurrent_gated_delta_rule_fwd(c.q, c.k, c.v, c.g, c.gk, c.beta, initial, view(kFwd, "o", o),
                                 view(kFwd, "final_state", final_state), c.seq, c.options);
  return {o, final_state};
}

void fwd_out(Tensor q, Tensor k, Tensor v, Optional g, Tensor beta, Optional initial_state, Optional cu_seqlens,
             Optional A_log, Optional dt_bias, Optional gk, std::optional<double> scale, bool use_qk_l2norm,
             bool beta_sigmoid, double beta_scale, bool state_v_first, std::string layout, Tensor o,
             Optional final_state) {
  Inputs in{q,
            k,
            v,
            g,
            gk,
            beta,
            cu_seqlens,
            A_log,
            dt_bias,
            scale,
            use_qk_l2norm,
            beta_sigmoid,
            beta_scale,
            state_v_first,
            layout};
  const Call c = make_call(kFwd, in);
  check_apart(kFwd, {{"o", o}, {"final_state", final_state}}, {{"cu_seqlens", cu_seqlens}});
  check_wide_state(c, "initial_state", view(kFwd, "initial_state", initial_state));
  check_wide_state(c, "final_state", view(kFwd, "final_state", final_state));
  recurrent_gated_delta_rule_fwd(c.q, c.k, c.v, c.g, c.gk, c.beta, dense(kFwd, "initial_state", initial_state),
                                 view(kFwd, "o", o), view(kFwd, "final_state", final_state), c.seq, c.options);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  m.def(
      "recurrent_gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor(a!) state, *, "
      "Tensor state_indices, Tensor? gk=None, Tensor? cu_seqlens=None, Tensor? num_accepted_tokens=None, "
      "Tensor? has_initial_state=None, Tensor? A_log=None, Tensor? dt_bias=None, int null_slot=-1, float? scale=None, "
      "bool use_qk_l2norm=False, bool beta_sigmoid=False, float beta_scale=1.0, bool state_v_first=False, "
      "str layout='TND') -> Tensor o");
  m.def(
      "recurrent_gated_delta_rule.out(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor(a!) state, *, "
      "Tensor state_indices, Tensor? gk=None, Tensor? cu_seqlens=None, Tensor? num_accepted_tokens=None, "
      "Tensor? has_initial_state=None, Tensor? A_log=None, Tensor? dt_bias=None, int null_slot=-1, float? scale=None, "
      "bool use_qk_l2norm=False, bool beta_sigmoid=False, float beta_scale=1.0, bool state_v_first=False, "
      "str layout='TND', Tensor(b!) o) -> ()");
  m.def(
      "recurrent_gated_delta_rule_fwd(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, "
      "Tensor? initial_state=None, Tensor? cu_seqlens=None, Tensor? A_log=None, Tensor? dt_bias=None, "
      "Tensor? gk=None, *, float? scale=None, bool output_final_state=False, bool use_qk_l2norm=False, "
      "bool beta_sigmoid=False, float beta_scale=1.0, bool state_v_first=False, str layout='BSND') "
      "-> (Tensor o, Tensor final_state)");
  m.def(
      "recurrent_gated_delta_rule_fwd.out(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, "
      "Tensor? initial_state=None, Tensor? cu_seqlens=None, Tensor? A_log=None, Tensor? dt_bias=None, "
      "Tensor? gk=None, *, float? scale=None, bool use_qk_l2norm=False, bool beta_sigmoid=False, "
      "float beta_scale=1.0, bool state_v_first=False, str layout='BSND', Tensor(a!) o, "
      "Tensor(b!)? final_state=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tidegate, CPU, m) {
  m.impl("recurrent_gated_delta_rule", TORCH_BOX(&pool));
  m.impl("recurrent_gated_delta_rule.out", TORCH_BOX(&pool_out));
  m.impl("recurrent_gated_delta_rule_fwd", TORCH_BOX(&fwd));
  m.impl("recurrent_gated_delta_rule_fwd.out", TORCH_BOX(&fwd_out));
}

}  // namespace tidegate::adapter
