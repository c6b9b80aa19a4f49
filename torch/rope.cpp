// partial_rope_fwd, _bwd, mrope_cos_sin as torch operators. Contracts: include/tidegate/rope.h.
#include "adapter.h"

namespace tidegate::adapter {
namespace {

PartialRopeOptions options_of(std::string_view op, const std::string& layout, const std::string& rounding) {
  return {parse_layout(op, layout), parse_rounding(op, rounding)};
}

Tensor fwd(Tensor x, Tensor cos, Tensor sin, std::string layout, std::string rounding) {
  constexpr std::string_view op = "partial_rope_fwd";
  const TensorView xv = dense(op, "x", x);
  Tensor y = empty_like(xv);
  partial_rope_fwd(xv, dense(op, "cos", cos), dense(op, "sin", sin), view(op, "y", y),
                   options_of(op, layout, rounding));
  return y;
}

// y may be x itself: the in-place form.
void fwd_out(Tensor x, Tensor cos, Tensor sin, std::string layout, std::string rounding, Tensor y) {
  constexpr std::string_view op = "partial_rope_fwd";
  partial_rope_fwd(dense(op, "x", x), dense(op, "cos", cos), dense(op, "sin", sin), view(op, "y", y),
                   options_of(op, layout, rounding));
}

Tensor bwd(Tensor dy, Tensor cos, Tensor sin, std::string layout, std::string rounding) {
  constexpr std::string_view op = "partial_rope_bwd";
  const TensorView dyv = dense(op, "dy", dy);
  Tensor dx = empty_like(dyv);
  partial_rope_bwd(dyv, dense(op, "cos", cos), dense(op, "sin", sin), view(op, "dx", dx),
                   options_of(op, layout, rounding));
  return dx;
}

void bwd_out(Tensor dy, Tensor cos, Tensor sin, std::string layout, std::string rounding, Tensor dx) {
  constexpr std::string_view op = "partial_rope_bwd";
  partial_rope_bwd(dense(op, "dy", dy), dense(op, "cos", cos), dense(op, "sin", sin), view(op, "dx", dx),
                   options_of(op, layout, rounding));
}

std::tuple<Tensor, Tensor> tables(Tensor position_ids, Tensor inv_freq, std::vector<std::int64_t> section,
                                  double scaling, ScalarType dtype) {
  constexpr std::string_view op = "mrope_cos_sin";
  check(section.size() == 3, op, ": section: expected 3 entries, got ", section.size());
  check_index_type(op, "position_ids", position_ids);
  const TensorView ids = view(op, "position_ids", position_ids);
  const TensorView freq = view(op, "inv_freq", inv_freq);
  check(ids.rank >= 2 && freq.rank == 1, op, ": position_ids: expected [B, T] or [3, B, T] and inv_freq [R/2], got ",
        Shape{ids}, " and ", Shape{freq});
  const std::vector<std::int64_t> sizes = {ids.size(-2), ids.size(-1), 2 * freq.size(0)};
  Tensor cos = empty(sizes, dtype);
  Tensor sin = empty(sizes, dtype);
  mrope_cos_sin(ids, freq, section.data(), scaling, view(op, "cos", cos), view(op, "sin", sin));
  return {cos, sin};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  m.def("partial_rope_fwd(Tensor x, Tensor cos, Tensor sin, *, str layout='BNSD', str rounding='hf') -> Tensor y");
  m.def(
      "partial_rope_fwd.out(Tensor x, Tensor cos, Tensor sin, *, str layout='BNSD', str rounding='hf', "
      "Tensor(a!) y) -> ()");
  m.def("partial_rope_bwd(Tensor dy, Tensor cos, Tensor sin, *, str layout='BNSD', str rounding='hf') -> Tensor dx");
  m.def(
      "partial_rope_bwd.out(Tensor dy, Tensor cos, Tensor sin, *, str layout='BNSD', str rounding='hf', "
      "Tensor(a!) dx) -> ()");
  m.def(
      "mrope_cos_sin(Tensor position_ids, Tensor inv_freq, int[] section, *, float scaling=1.0, "
      "ScalarType dtype=float32) -> (Tensor cos, Tensor sin)");
}

STABLE_TORCH_LIBRARY_IMPL(tidegate, CPU, m) {
  m.impl("partial_rope_fwd", TORCH_BOX(&fwd));
  m.impl("partial_rope_fwd.out", TORCH_BOX(&fwd_out));
  m.impl("partial_rope_bwd", TORCH_BOX(&bwd));
  m.impl("partial_rope_bwd.out", TORCH_BOX(&bwd_out));
  m.impl("mrope_cos_sin", TORCH_BOX(&tables));
}

}  // namespace tidegate::adapter
