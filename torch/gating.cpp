// gdn_gating_fwd and _bwd as torch operators. Contract: include/tidegate/gating.h.
#include "adapter.h"

namespace tidegate::adapter {
namespace {

GdnGatingOptions options_of(std::string_view op, double beta_scale, const std::string& layout) {
  return {beta_scale, parse_layout(op, layout)};
}

ScalarType wide(const TensorView& a) { return a.dtype == DType::kF64 ? ScalarType::Double : ScalarType::Float; }

std::tuple<Tensor, Tensor> fwd(Tensor a, Tensor b, Tensor A_log, Optional dt_bias, double beta_scale,
                               std::optional<ScalarType> beta_dtype, std::string layout) {
  constexpr std::string_view op = "gdn_gating_fwd";
  const TensorView av = dense(op, "a", a);
  const TensorView bv = dense(op, "b", b);
  const std::vector<std::int64_t> sizes(av.sizes, av.sizes + av.rank);
  Tensor g = empty(sizes, wide(av));
  Tensor beta = empty(sizes, beta_dtype.value_or(scalar_type(bv.dtype)));
  gdn_gating_fwd(av, bv, view(op, "A_log", A_log), view(op, "dt_bias", dt_bias), view(op, "g", g),
                 view(op, "beta", beta), options_of(op, beta_scale, layout));
  return {g, beta};
}

void fwd_out(Tensor a, Tensor b, Tensor A_log, Optional dt_bias, double beta_scale, std::string layout, Tensor g,
             Tensor beta) {
  constexpr std::string_view op = "gdn_gating_fwd";
  gdn_gating_fwd(dense(op, "a", a), dense(op, "b", b), view(op, "A_log", A_log), view(op, "dt_bias", dt_bias),
                 view(op, "g", g), view(op, "beta", beta), options_of(op, beta_scale, layout));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bwd(Tensor dg, Tensor dbeta, Tensor a, Tensor b, Tensor A_log,
                                               Optional dt_bias, double beta_scale, std::string layout) {
  constexpr std::string_view op = "gdn_gating_bwd";
  const TensorView av = dense(op, "a", a);
  const TensorView bv = dense(op, "b", b);
  const TensorView logv = view(op, "A_log", A_log);
  Tensor da = empty_like(av);
  Tensor db = empty_like(bv);
  Tensor dA_log = empty(std::vector<std::int64_t>(logv.sizes, logv.sizes + logv.rank), wide(av));
  Tensor ddt_bias = dt_bias.has_value() ? empty(std::vector<std::int64_t>(logv.sizes, logv.sizes + logv.rank), wide(av))
                                        : nothing(wide(av));
  gdn_gating_bwd(dense(op, "dg", dg), dense(op, "dbeta", dbeta), av, bv, logv, view(op, "dt_bias", dt_bias),
                 view(op, "da", da), view(op, "db", db), view(op, "dA_log", dA_log),
                 dt_bias.has_value() ? view(op, "ddt_bias", ddt_bias) : TensorView{},
                 options_of(op, beta_scale, layout));
  return {da, db, dA_log, ddt_bias};
}

void bwd_out(Tensor dg, Tensor dbeta, Tensor a, Tensor b, Tensor A_log, Optional dt_bias, double beta_scale,
             std::string layout, Optional da, Optional db, Optional dA_log, Optional ddt_bias) {
  constexpr std::string_view op = "gdn_gating_bwd";
  gdn_gating_bwd(dense(op, "dg", dg), dense(op, "dbeta", dbeta), dense(op, "a", a), dense(op, "b", b),
                 view(op, "A_log", A_log), view(op, "dt_bias", dt_bias), view(op, "da", da), view(op, "db", db),
                 view(op, "dA_log", dA_log), view(op, "ddt_bias", ddt_bias), options_of(op, beta_scale, layout));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  m.def(
      "gdn_gating_fwd(Tensor a, Tensor b, Tensor A_log, Tensor? dt_bias=None, *, float beta_scale=1.0, "
      "ScalarType? beta_dtype=None, str layout='BSND') -> (Tensor g, Tensor beta)");
  m.def(
      "gdn_gating_fwd.out(Tensor a, Tensor b, Tensor A_log, Tensor? dt_bias=None, *, float beta_scale=1.0, "
      "str layout='BSND', Tensor(a!) g, Tensor(b!) beta) -> ()");
  m.def(
      "gdn_gating_bwd(Tensor dg, Tensor dbeta, Tensor a, Tensor b, Tensor A_log, Tensor? dt_bias=None, *, "
      "float beta_scale=1.0, str layout='BSND') -> (Tensor da, Tensor db, Tensor dA_log, Tensor ddt_bias)");
  m.def(
      "gdn_gating_bwd.out(Tensor dg, Tensor dbeta, Tensor a, Tensor b, Tensor A_log, Tensor? dt_bias=None, *, "
      "float beta_scale=1.0, str layout='BSND', Tensor(a!)? da=None, Tensor(b!)? db=None, Tensor(c!)? dA_log=None, "
      "Tensor(d!)? ddt_bias=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tidegate, CPU, m) {
  m.impl("gdn_gating_fwd", TORCH_BOX(&fwd));
  m.impl("gdn_gating_fwd.out", TORCH_BOX(&fwd_out));
  m.impl("gdn_gating_bwd", TORCH_BOX(&bwd));
  m.impl("gdn_gating_bwd.out", TORCH_BOX(&bwd_out));
}

}  // namespace tidegate::adapter
