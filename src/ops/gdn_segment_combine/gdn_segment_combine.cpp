// gdn_segment_combine: checks, partition, dispatch.
#include <string>

#include "base/arena.h"
#include "base/checks.h"
#include "base/float_environment.h"
#include "base/row_views.h"
#include "ops/gdn_segment_combine/kernel.h"
#include "ops/gdn_segment_combine/problem.h"
#include "tidegate/cpu.h"
#include "tidegate/delta_rule.h"
#include "tidegate/parallel.h"

namespace tidegate {
namespace {

using namespace segment_combine;

Matrix matrix(const TensorView& t, std::int64_t m) {
  if (!t.defined()) {
    return {};
  }
  return {t.as<float>() + row_offset(rows_of(t, t.rank - 2), m), t.stride(-2)};
}

void product(const TensorView& phi2, const TensorView& x, const TensorView& add, const TensorView& out) {
  if (out.dtype == DType::kF64) {
    reference<double>(phi2, x, add, out);
    return;
  }
  const std::int64_t K = out.size(-2);
  const Kernels& kernels = gdn_segment_combine_kernels_for(active_isa());
  parallel_for(out.numel() > 0 ? out.numel() / (K * out.size(-1)) : 0, [&](std::int64_t m) {
    Scratch scratch;
    kernels.combine({matrix(phi2, m), matrix(x, m), matrix(add, m), matrix(out, m), K, out.size(-1)},
                    scratch.floats(2 * K * kernels.panel));
  });
}

}  // namespace

void gdn_segment_combine(const TensorView& phi1, const TensorView& s1, const TensorView& phi2, const TensorView& s2,
                         const TensorView& phi, const TensorView& s) {
  constexpr std::string_view op = "gdn_segment_combine";
  const FloatEnvironment environment;
  if (phi1.defined() || phi.defined()) {
    check_present(op, {"phi1", phi1});
    check_present(op, {"phi", phi});
  }
  const Named lead = phi1.defined() ? Named{"phi1", phi1} : Named{"phi2", phi2};
  check_present(op, lead);
  check(lead.tensor.rank >= 2, op, ": ", lead.name, ": expected at least 2 dimensions, got ", lead.tensor.rank);
  check(lead.tensor.dtype == DType::kF32 || lead.tensor.dtype == DType::kF64, op, ": ", lead.name,
        ": expected dtype float32 or float64, got ", lead.tensor.dtype);
  check(lead.tensor.size(-1) == lead.tensor.size(-2), op, ": ", lead.name, ": expected square matrices, got ",
        Shape{lead.tensor});
  check_present(op, {"s1", s1});
  const std::string wide_name = std::string(lead.name) + " with the width of s1";
  TensorView like = lead.tensor;
  like.sizes[like.rank - 1] = s1.rank == like.rank ? s1.size(-1) : 0;
  check_same_shape(op, {"s1", s1}, {wide_name, like});
  for (const auto& [name, t] : {Named{"phi2", phi2}, Named{"phi", phi.defined() ? phi : lead.tensor}}) {
    check_same_shape(op, {name, t}, lead);
  }
  for (const auto& [name, t] : {Named{"s2", s2}, Named{"s", s}}) {
    check_same_shape(op, {name, t}, {"s1", s1});
  }
  for (const auto& [name, t] :
       {Named{"phi1", phi1}, Named{"s1", s1}, Named{"phi2", phi2}, Named{"s2", s2}, Named{"phi", phi}, Named{"s", s}}) {
    if (t.defined()) {
      check_same_dtype(op, {name, t}, lead);
      check_inner_stride(op, {name, t});
    }
  }
  check_outputs(op, {{"phi", phi}, {"s", s}}, {{"phi1", phi1}, {"s1", s1}, {"phi2", phi2}, {"s2", s2}});
  if (phi.defined()) {
    product(phi2, phi1, {}, phi);
  }
  product(phi2, s1, s2, s);
}

}  // namespace tidegate
