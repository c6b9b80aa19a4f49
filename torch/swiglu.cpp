// swiglu_fwd, _bwd as torch operators. Contract: include/tidegate/swiglu.h.
#include "adapter.h"

namespace tidegate::adapter {
namespace {

Tensor fwd(Tensor gate, Tensor up) {
  constexpr std::string_view op = "swiglu_fwd";
  const TensorView g = dense(op, "gate", gate);
  Tensor y = empty_like(g);
  swiglu_fwd(g, dense(op, "up", up), view(op, "y", y));
  return y;
}

void fwd_out(Tensor gate, Tensor up, Tensor y) {
  constexpr std::string_view op = "swiglu_fwd";
  swiglu_fwd(dense(op, "gate", gate), dense(op, "up", up), view(op, "y", y));
}

std::tuple<Tensor, Tensor> bwd(Tensor dy, Tensor gate, Tensor up) {
  constexpr std::string_view op = "swiglu_bwd";
  const TensorView g = dense(op, "gate", gate);
  Tensor dgate = empty_like(g);
  Tensor dup = empty_like(g);
  swiglu_bwd(dense(op, "dy", dy), g, dense(op, "up", up), view(op, "dgate", dgate), view(op, "dup", dup));
  return {dgate, dup};
}

void bwd_out(Tensor dy, Tensor gate, Tensor up, Optional dgate, Optional dup) {
  constexpr std::string_view op = "swiglu_bwd";
  swiglu_bwd(dense(op, "dy", dy), dense(op, "gate", gate), dense(op, "up", up), view(op, "dgate", dgate),
             view(op, "dup", dup));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  m.def("swiglu_fwd(Tensor gate, Tensor up) -> Tensor y");
  m.def("swiglu_fwd.out(Tensor gate, Tensor up, *, Tensor(a!) y) -> ()");
  m.def("swiglu_bwd(Tensor dy, Tensor gate, Tensor up) -> (Tensor dgate, Tensor dup)");
  m.def("swiglu_bwd.out(Tensor dy, Tensor gate, Tensor up, *, Tensor(a!)? dgate=None, Tensor(b!)? dup=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tidegate, CPU, m) {
  m.impl("swiglu_fwd", TORCH_BOX(&fwd));
  m.impl("swiglu_fwd.out", TORCH_BOX(&fwd_out));
  m.impl("swiglu_bwd", TORCH_BOX(&bwd));
  m.impl("swiglu_bwd.out", TORCH_BOX(&bwd_out));
}

}  // namespace tidegate::adapter
