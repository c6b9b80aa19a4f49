// The gradients of the gated delta rule as torch operators. Contract: include/tidegate/delta_rule.h.
#include "rule_call.h"

namespace tidegate::adapter {
namespace {

constexpr std::string_view kOp = "chunk_gated_delta_rule_bwd";
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// What both forms are given, as torch hands it over.
struct Given {
  Optional d_o, dfinal_state;
  Tensor q, k, v, g, beta;
  Optional initial_state, cu_seqlens, A_log, dt_bias, states;
  std::optional<double> scale;
  bool use_qk_l2norm, beta_sigmoid;
  double beta_scale;
  bool state_v_first, zero_row_safe;
  std::string layout;
  std::optional<std::string> out_layout;
};

RuleCall call_of(Given& x) {
  static const std::string fp32 = "fp32";
  RuleCall c = rule_call(kOp, x.k, x.v, x.g, x.beta, x.cu_seqlens, x.A_log, x.dt_bias,
                         {x.use_qk_l2norm, x.beta_sigmoid, x.beta_scale, fp32, x.layout});
  add_output_options(c, x.scale, x.state_v_first, x.out_layout);
  c.options.zero_row_safe = x.zero_row_safe;
  return c;
}

void run(Given& x, const RuleCall& c, const ChunkGatedDeltaRuleGradients& d) {
  TensorView states = view(kOp, "states", x.states);
  if (states.defined() && states.rank > 0) {  // the forward's tensor may have room for more
    const auto count = static_cast<std::int64_t>(saved_states(c.seq).size());
    check(states.size(0) >= count, kOp, ": states: expected at least ", count, " states, got ", states.size(0));
    states.sizes[0] = count;
  }
  chunk_gated_delta_rule_bwd(dense(kOp, "do", x.d_o), view(kOp, "dfinal_state", x.dfinal_state), dense(kOp, "q", x.q),
                             c.k, c.v, c.g, c.beta, view(kOp, "initial_state", x.initial_state), states, d, c.seq,
                             c.options);
}

Gradients bwd(Optional d_o, Optional dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta,
              Optional initial_state, Optional cu_seqlens, Optional A_log, Optional dt_bias, Optional states,
              std::optional<double> scale, bool use_qk_l2norm, bool beta_sigmoid, double beta_scale, bool state_v_first,
              bool zero_row_safe, std::string layout, std::optional<std::string> out_layout, std::int64_t needs) {
  check(needs >= 0 && needs < 256, kOp, ": needs: expected 0 to 255 (a bit for every result), got ", needs);
  Given x{d_o,
          dfinal_state,
          q,
          k,
          v,
          g,
          beta,
          initial_state,
          cu_seqlens,
          A_log,
          dt_bias,
          states,
          scale,
          use_qk_l2norm,
          beta_sigmoid,
          beta_scale,
          state_v_first,
          zero_row_safe,
          layout,
          out_layout};
  const RuleCall c = call_of(x);
  const TensorView initial = view(kOp, "initial_state", initial_state);
  const auto sizes = [](const TensorView& t) { return std::vector<std::int64_t>(t.sizes, t.sizes + t.rank); };
  // A gradient that is not wanted, or of a tensor that is not there, is an empty tensor.
  const auto like = [&](int bit, const TensorView& t, ScalarType type) {
    return (needs >> bit & 1) != 0 && t.defined() ? empty(sizes(t), type) : nothing(type);
  };
  const ScalarType type = scalar_type(c.k.dtype);
  const TensorView qv = dense(kOp, "q", x.q);
  Gradients out{like(0, qv, type),
                like(1, c.k, type),
                like(2, c.v, type),
                like(3, c.g, c.wide),
                like(4, c.beta, scalar_type(c.beta.dtype)),
                like(5, initial, c.wide),
                like(6, c.options.A_log, c.wide),
                like(7, c.options.dt_bias, c.wide)};
  const auto wanted = [&](int bit, const TensorView& t, std::string_view name, const Tensor& made) {
    return (needs >> bit & 1) != 0 && t.defined() ? view(kOp, name, made) : TensorView{};
  };
  run(x, c,
      {wanted(0, qv, "dq", std::get<0>(out)), wanted(1, c.k, "dk", std::get<1>(out)),
       wanted(2, c.v, "dv", std::get<2>(out)), wanted(3, c.g, "dg", std::get<3>(out)),
       wanted(4, c.beta, "dbeta", std::get<4>(out)), wanted(5, initial, "dh0", std::get<5>(out)),
       wanted(6, c.options.A_log, "dA_log", std::get<6>(out)),
       wanted(7, c.options.dt_bias, "ddt_bias", std::get<7>(out))});
  return out;
}

void bwd_out(Optional d_o, Optional dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta,
             Optional initial_state, Optional cu_seqlens, Optional A_log, Optional dt_bias, Optional states,
             std::optional<double> scale, bool use_qk_l2norm, bool beta_sigmoid, double beta_scale, bool state_v_first,
             bool zero_row_safe, std::string layout, std::optional<std::string> out_layout, Optional dq, Optional dk,
             Optional dv, Optional dg, Optional dbeta, Optional dh0, Optional dA_log, Optional ddt_bias) {
  Given x{d_o,
          dfinal_state,
          q,
          k,
          v,
          g,
          beta,
          initial_state,
          cu_seqlens,
          A_log,
          dt_bias,
          states,
          scale,
          use_qk_l2norm,
          beta_sigmoid,
          beta_scale,
          state_v_first,
          zero_row_safe,
          layout,
          out_layout};
  const RuleCall c = call_of(x);
  check_apart(kOp,
              {{"dq", dq},
               {"dk", dk},
               {"dv", dv},
               {"dg", dg},
               {"dbeta", dbeta},
               {"dh0", dh0},
               {"dA_log", dA_log},
               {"ddt_bias", ddt_bias}},
              {{"cu_seqlens", cu_seqlens}});
  run(x, c,
      {view(kOp, "dq", dq), view(kOp, "dk", dk), view(kOp, "dv", dv), view(kOp, "dg", dg), view(kOp, "dbeta", dbeta),
       view(kOp, "dh0", dh0), view(kOp, "dA_log", dA_log), view(kOp, "ddt_bias", ddt_bias)});
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  m.def(
      "chunk_gated_delta_rule_bwd(Tensor? do, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, "
      "Tensor beta, Tensor? initial_state=None, Tensor? cu_seqlens=None, Tensor? A_log=None, Tensor? dt_bias=None, "
      "Tensor? states=None, *, float? scale=None, bool use_qk_l2norm=False, bool beta_sigmoid=False, "
      "float beta_scale=1.0, bool state_v_first=False, bool zero_row_safe=False, str layout='BSND', "
      "str? out_layout=None, int needs=255) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dh0, "
      "Tensor dA_log, Tensor ddt_bias)");
  m.def(
      "chunk_gated_delta_rule_bwd.out(Tensor? do, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, "
      "Tensor beta, Tensor? initial_state=None, Tensor? cu_seqlens=None, Tensor? A_log=None, Tensor? dt_bias=None, "
      "Tensor? states=None, *, float? scale=None, bool use_qk_l2norm=False, bool beta_sigmoid=False, "
      "float beta_scale=1.0, bool state_v_first=False, bool zero_row_safe=False, str layout='BSND', "
      "str? out_layout=None, Tensor(a!)? dq=None, Tensor(b!)? dk=None, Tensor(c!)? dv=None, Tensor(d!)? dg=None, "
      "Tensor(e!)? dbeta=None, Tensor(f!)? dh0=None, Tensor(g!)? dA_log=None, Tensor(h!)? ddt_bias=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tidegate, CPU, m) {
  m.impl("chunk_gated_delta_rule_bwd", TORCH_BOX(&bwd));
  m.impl("chunk_gated_delta_rule_bwd.out", TORCH_BOX(&bwd_out));
}

}  // namespace tidegate::adapter
