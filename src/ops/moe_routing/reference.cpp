// The way from sorted places back to tokens in plain loops: the definition, and the fp64 path of the operator.
#include "ops/moe_routing/reference.h"

#include "base/element.h"

namespace tidegate::moe_routing {
namespace {

template <class Acc>
Acc weight_of(const TensorView& weights, std::int64_t t, std::int64_t s) {
  return weights.defined() ? static_cast<Acc>(read_element(weights, offset_of(weights, t, s))) : Acc(1);
}

}  // namespace

template <class Acc>
void reference_unpermute(const TensorView& y, const std::int32_t* pos, std::int64_t k, const TensorView& weights,
                         const TensorView& out) {
  for (std::int64_t t = 0; t < out.sizes[0]; ++t) {
    for (std::int64_t c = 0; c < out.sizes[1]; ++c) {
      Acc total = 0;
      for (std::int64_t s = 0; s < k; ++s) {
        if (pos[t * k + s] >= 0) {
          total += weight_of<Acc>(weights, t, s) * static_cast<Acc>(read_element(y, offset_of(y, pos[t * k + s], c)));
        }
      }
      write_element(out, offset_of(out, t, c), total);
    }
  }
}

template <class Acc>
void reference_bwd(const TensorView& dout, const TensorView& y, const std::int32_t* pos, std::int64_t k,
                   const TensorView& weights, const TensorView& dy, const TensorView& dweights) {
  for (std::int64_t t = 0; t < dout.sizes[0]; ++t) {
    for (std::int64_t s = 0; s < k; ++s) {
      const std::int64_t place = pos[t * k + s];
      Acc dw = 0;
      for (std::int64_t c = 0; place >= 0 && c < dout.sizes[1]; ++c) {
        const auto grad = static_cast<Acc>(read_element(dout, offset_of(dout, t, c)));
        dw += grad * static_cast<Acc>(read_element(y, offset_of(y, place, c)));
        if (dy.defined()) {
          write_element(dy, offset_of(dy, place, c), weight_of<Acc>(weights, t, s) * grad);
        }
      }
      if (dweights.defined()) {
        write_element(dweights, offset_of(dweights, t, s), dw);
      }
    }
  }
}

#define TIDEGATE_INSTANCES(Acc)                                                                                   \
  template void reference_unpermute<Acc>(const TensorView&, const std::int32_t*, std::int64_t, const TensorView&, \
                                         const TensorView&);                                                      \
  template void reference_bwd<Acc>(const TensorView&, const TensorView&, const std::int32_t*, std::int64_t,       \
                                   const TensorView&, const TensorView&, const TensorView&);
TIDEGATE_INSTANCES(float)
TIDEGATE_INSTANCES(double)

}  // namespace tidegate::moe_routing
