// l2norm, rms_norm_gated and rms_norm as torch operators. Contracts: include/tidegate/norm.h.
#include "adapter.h"

namespace tidegate::adapter {
namespace {

ScalarType wide(const TensorView& x) { return x.dtype == DType::kF64 ? ScalarType::Double : ScalarType::Float; }

std::vector<std::int64_t> sizes_of(const TensorView& t) { return {t.sizes, t.sizes + t.rank}; }

Tensor empty_rstd(const TensorView& x) {
  return empty(std::vector<std::int64_t>(x.sizes, x.sizes + std::max(0, x.rank - 1)), wide(x));
}

// y like x; with x head-major [B,H,T,D] and token-major wanted (or the reverse) the memory is laid out the other way.
Tensor empty_output(std::string_view op, const TensorView& x, const std::optional<std::string>& memory) {
  if (!memory.has_value() || *memory == "same") {
    return empty_like(x);
  }
  check(*memory == "swapped", op, ": out_memory: expected same or swapped, got ", *memory);
  check(x.rank >= 3, op, ": x: expected at least 3 dimensions with out_memory swapped, got ", x.rank);
  std::vector<std::int64_t> sizes = sizes_of(x);
  std::swap(sizes[sizes.size() - 3], sizes[sizes.size() - 2]);
  return torch::stable::transpose(empty(sizes, scalar_type(x.dtype)), -3, -2);
}

std::tuple<Tensor, Tensor> l2_fwd(Tensor x, double eps, std::optional<ScalarType> out_dtype) {
  constexpr std::string_view op = "l2norm_fwd";
  const TensorView xv = dense(op, "x", x);
  Tensor y = empty(sizes_of(xv), out_dtype.value_or(scalar_type(xv.dtype)));
  Tensor rstd = empty_rstd(xv);
  l2norm_fwd(xv, view(op, "y", y), view(op, "rstd", rstd), eps);
  return {y, rstd};
}

void l2_fwd_out(Tensor x, double eps, Tensor y, Tensor rstd) {
  constexpr std::string_view op = "l2norm_fwd";
  l2norm_fwd(dense(op, "x", x), view(op, "y", y), view(op, "rstd", rstd), eps);
}

Tensor l2_bwd(Tensor dy, Tensor x, Tensor rstd, bool zero_row_safe) {
  constexpr std::string_view op = "l2norm_bwd";
  const TensorView xv = dense(op, "x", x);
  Tensor dx = empty_like(xv);
  l2norm_bwd(dense(op, "dy", dy), xv, view(op, "rstd", rstd), view(op, "dx", dx), zero_row_safe);
  return dx;
}

void l2_bwd_out(Tensor dy, Tensor x, Tensor rstd, bool zero_row_safe, Tensor dx) {
  constexpr std::string_view op = "l2norm_bwd";
  l2norm_bwd(dense(op, "dy", dy), dense(op, "x", x), view(op, "rstd", rstd), view(op, "dx", dx), zero_row_safe);
}

RmsNormGatedOptions gated_options(std::string_view op, double eps, const std::string& activation,
                                  const std::string& rounding) {
  return {eps, parse_activation(op, activation), parse_rounding(op, rounding)};
}

std::tuple<Tensor, Tensor> gated_fwd(Tensor x, Tensor z, Optional weight, double eps, std::string activation,
                                     std::string rounding, std::optional<std::string> out_memory) {
  constexpr std::string_view op = "rms_norm_gated_fwd";
  const TensorView xv = dense(op, "x", x);
  Tensor y = empty_output(op, xv, out_memory);
  Tensor rstd = empty_rstd(xv);
  rms_norm_gated_fwd(xv, dense(op, "z", z), view(op, "weight", weight), view(op, "y", y), view(op, "rstd", rstd),
                     gated_options(op, eps, activation, rounding));
  return {y, rstd};
}

void gated_fwd_out(Tensor x, Tensor z, Optional weight, double eps, std::string activation, std::string rounding,
                   Tensor y, Tensor rstd) {
  constexpr std::string_view op = "rms_norm_gated_fwd";
  rms_norm_gated_fwd(dense(op, "x", x), dense(op, "z", z), view(op, "weight", weight), view(op, "y", y),
                     view(op, "rstd", rstd), gated_options(op, eps, activation, rounding));
}

std::tuple<Tensor, Tensor, Tensor> gated_bwd(Tensor dy, Tensor x, Tensor z, Optional weight, Tensor rstd,
                                             std::string activation, std::string rounding) {
  constexpr std::string_view op = "rms_norm_gated_bwd";
  const TensorView xv = dense(op, "x", x);
  const TensorView zv = dense(op, "z", z);
  Tensor dx = empty_like(xv);
  Tensor dz = empty_like(zv);
  Tensor dweight = weight.has_value() && xv.rank > 0 ? empty({xv.size(-1)}, wide(xv)) : nothing(wide(xv));
  rms_norm_gated_bwd(dense(op, "dy", dy), xv, zv, view(op, "weight", weight), view(op, "rstd", rstd),
                     view(op, "dx", dx), view(op, "dz", dz),
                     weight.has_value() ? view(op, "dweight", dweight) : TensorView{},
                     gated_options(op, 0.0, activation, rounding));
  return {dx, dz, dweight};
}

void gated_bwd_out(Tensor dy, Tensor x, Tensor z, Optional weight, Tensor rstd, std::string activation,
                   std::string rounding, Optional dx, Optional dz, Optional dweight) {
  constexpr std::string_view op = "rms_norm_gated_bwd";
  rms_norm_gated_bwd(dense(op, "dy", dy), dense(op, "x", x), dense(op, "z", z), view(op, "weight", weight),
                     view(op, "rstd", rstd), view(op, "dx", dx), view(op, "dz", dz), view(op, "dweight", dweight),
                     gated_options(op, 0.0, activation, rounding));
}

std::tuple<Tensor, Tensor> rms_fwd(Tensor x, Tensor weight, double eps) {
  constexpr std::string_view op = "rms_norm_fwd";
  const TensorView xv = dense(op, "x", x);
  Tensor y = empty_like(xv);
  Tensor rstd = empty_rstd(xv);
  rms_norm_fwd(xv, view(op, "weight", weight), view(op, "y", y), view(op, "rstd", rstd), eps);
  return {y, rstd};
}

void rms_fwd_out(Tensor x, Tensor weight, double eps, Tensor y, Tensor rstd) {
  constexpr std::string_view op = "rms_norm_fwd";
  rms_norm_fwd(dense(op, "x", x), view(op, "weight", weight), view(op, "y", y), view(op, "rstd", rstd), eps);
}

std::tuple<Tensor, Tensor> rms_bwd(Tensor dy, Tensor x, Tensor weight, Tensor rstd) {
  constexpr std::string_view op = "rms_norm_bwd";
  const TensorView xv = dense(op, "x", x);
  Tensor dx = empty_like(xv);
  Tensor dweight = empty(sizes_of(view(op, "weight", weight)), wide(xv));
  rms_norm_bwd(dense(op, "dy", dy), xv, view(op, "weight", weight), view(op, "rstd", rstd), view(op, "dx", dx),
               view(op, "dweight", dweight));
  return {dx, dweight};
}

void rms_bwd_out(Tensor dy, Tensor x, Tensor weight, Tensor rstd, Optional dx, Optional dweight) {
  constexpr std::string_view op = "rms_norm_bwd";
  rms_norm_bwd(dense(op, "dy", dy), dense(op, "x", x), view(op, "weight", weight), view(op, "rstd", rstd),
               view(op, "dx", dx), view(op, "dweight", dweight));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  m.def("l2norm_fwd(Tensor x, *, float eps=1e-6, ScalarType? out_dtype=None) -> (Tensor y, Tensor rstd)");
  m.def("l2norm_fwd.out(Tensor x, *, float eps=1e-6, Tensor(a!) y, Tensor(b!) rstd) -> ()");
  m.def("l2norm_bwd(Tensor dy, Tensor x, Tensor rstd, *, bool zero_row_safe=False) -> Tensor dx");
  m.def("l2norm_bwd.out(Tensor dy, Tensor x, Tensor rstd, *, bool zero_row_safe=False, Tensor(a!) dx) -> ()");
  m.def(
      "rms_norm_gated_fwd(Tensor x, Tensor z, Tensor? weight, *, float eps=1e-6, str activation='silu', "
      "str rounding='hf', str? out_memory=None) -> (Tensor y, Tensor rstd)");
  m.def(
      "rms_norm_gated_fwd.out(Tensor x, Tensor z, Tensor? weight, *, float eps=1e-6, str activation='silu', "
      "str rounding='hf', Tensor(a!) y, Tensor(b!) rstd) -> ()");
  m.def(
      "rms_norm_gated_bwd(Tensor dy, Tensor x, Tensor z, Tensor? weight, Tensor rstd, *, str activation='silu', "
      "str rounding='hf') -> (Tensor dx, Tensor dz, Tensor dweight)");
  m.def(
      "rms_norm_gated_bwd.out(Tensor dy, Tensor x, Tensor z, Tensor? weight, Tensor rstd, *, str activation='silu', "
      "str rounding='hf', Tensor(a!)? dx=None, Tensor(b!)? dz=None, Tensor(c!)? dweight=None) -> ()");
  m.def("rms_norm_fwd(Tensor x, Tensor weight, *, float eps=1e-6) -> (Tensor y, Tensor rstd)");
  m.def("rms_norm_fwd.out(Tensor x, Tensor weight, *, float eps=1e-6, Tensor(a!) y, Tensor(b!) rstd) -> ()");
  m.def("rms_norm_bwd(Tensor dy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor dx, Tensor dweight)");
  m.def(
      "rms_norm_bwd.out(Tensor dy, Tensor x, Tensor weight, Tensor rstd, *, Tensor(a!)? dx=None, "
      "Tensor(b!)? dweight=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tidegate, CPU, m) {
  m.impl("l2norm_fwd", TORCH_BOX(&l2_fwd));
  m.impl("l2norm_fwd.out", TORCH_BOX(&l2_fwd_out));
  m.impl("l2norm_bwd", TORCH_BOX(&l2_bwd));
  m.impl("l2norm_bwd.out", TORCH_BOX(&l2_bwd_out));
  m.impl("rms_norm_gated_fwd", TORCH_BOX(&gated_fwd));
  m.impl("rms_norm_gated_fwd.out", TORCH_BOX(&gated_fwd_out));
  m.impl("rms_norm_gated_bwd", TORCH_BOX(&gated_bwd));
  m.impl("rms_norm_gated_bwd.out", TORCH_BOX(&gated_bwd_out));
  m.impl("rms_norm_fwd", TORCH_BOX(&rms_fwd));
  m.impl("rms_norm_fwd.out", TORCH_BOX(&rms_fwd_out));
  m.impl("rms_norm_bwd", TORCH_BOX(&rms_bwd));
  m.impl("rms_norm_bwd.out", TORCH_BOX(&rms_bwd_out));
}

}  // namespace tidegate::adapter
