// Grouped products in plain loops: the definition, and the fp64 path of the operator.
#include "ops/grouped_matmul/reference.h"

#include "base/element.h"

namespace tidegate::grouped_matmul {
namespace {

template <class Acc, class... Index>
Acc element(const TensorView& t, Index... index) {
  return static_cast<Acc>(read_element(t, offset_of(t, index...)));
}
std::int64_t weight_offset(const TensorView& w, WeightAxes axes, std::int64_t g, std::int64_t n, std::int64_t k) {
  return axes == WeightAxes::kNK ? offset_of(w, g, n, k) : offset_of(w, g, k, n);
}

}  // namespace

template <class Acc>
void reference_fwd(const TensorView& x, const TensorView& weight, const std::int64_t* offsets, const TensorView& bias,
                   const TensorView& y, WeightAxes axes) {
  for (std::int64_t g = 0; g < weight.sizes[0]; ++g) {
    for (std::int64_t j = offsets[g]; j < offsets[g + 1]; ++j) {
      for (std::int64_t n = 0; n < y.sizes[1]; ++n) {
        Acc total = 0;
        for (std::int64_t k = 0; k < x.sizes[1]; ++k) {
          total += element<Acc>(x, j, k) * static_cast<Acc>(read_element(weight, weight_offset(weight, axes, g, n, k)));
        }
        write_element(y, offset_of(y, j, n), bias.defined() ? total + element<Acc>(bias, g, n) : total);
      }
    }
  }
}

template <class Acc>
void reference_bwd(const TensorView& dy, const TensorView& x, const TensorView& weight, const std::int64_t* offsets,
                   std::int64_t groups, const TensorView& dx, const TensorView& dweight, const TensorView& dbias,
                   const GroupedMatmulOptions& options) {
  const std::int64_t N = dy.sizes[1];
  for (std::int64_t g = 0; g < groups; ++g) {
    for (std::int64_t j = offsets[g]; dx.defined() && j < offsets[g + 1]; ++j) {
      for (std::int64_t k = 0; k < dx.sizes[1]; ++k) {
        Acc total = 0;
        for (std::int64_t n = 0; n < N; ++n) {
          total += element<Acc>(dy, j, n) *
                   static_cast<Acc>(read_element(weight, weight_offset(weight, options.weight_axes, g, n, k)));
        }
        write_element(dx, offset_of(dx, j, k), total);
      }
    }
    for (std::int64_t n = 0; n < N; ++n) {
      for (std::int64_t k = 0; dweight.defined() && k < x.sizes[1]; ++k) {
        Acc total = 0;
        for (std::int64_t j = offsets[g]; j < offsets[g + 1]; ++j) {
          total += element<Acc>(dy, j, n) * element<Acc>(x, j, k);
        }
        const std::int64_t at = weight_offset(dweight, options.weight_axes, g, n, k);
        write_element(dweight, at, options.accumulate ? static_cast<Acc>(read_element(dweight, at)) + total : total);
      }
      if (dbias.defined()) {
        Acc total = 0;
        for (std::int64_t j = offsets[g]; j < offsets[g + 1]; ++j) {
          total += element<Acc>(dy, j, n);
        }
        write_element(dbias, offset_of(dbias, g, n), options.accumulate ? element<Acc>(dbias, g, n) + total : total);
      }
    }
  }
}

#define TIDEGATE_INSTANCES(Acc)                                                                                  \
  template void reference_fwd<Acc>(const TensorView&, const TensorView&, const std::int64_t*, const TensorView&, \
                                   const TensorView&, WeightAxes);                                               \
  template void reference_bwd<Acc>(const TensorView&, const TensorView&, const TensorView&, const std::int64_t*, \
                                   std::int64_t, const TensorView&, const TensorView&, const TensorView&,        \
                                   const GroupedMatmulOptions&);
TIDEGATE_INSTANCES(float)
TIDEGATE_INSTANCES(double)

}  // namespace tidegate::grouped_matmul
