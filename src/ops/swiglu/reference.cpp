// swiglu in plain loops: the definition, and the fp64 path of the operator.
#include "ops/swiglu/reference.h"

#include <cmath>

#include "base/element.h"
#include "base/row_views.h"

namespace tidegate::swiglu {

template <class Acc>
void reference_fwd(const TensorView& gate, const TensorView& up, const TensorView& y) {
  const Rows gates = rows_of(gate), ups = rows_of(up), results = rows_of(y);
  for (std::int64_t r = 0; r < row_count(gate); ++r) {
    for (std::int64_t c = 0; c < gate.size(-1); ++c) {
      const Acc g = static_cast<Acc>(read_element(gate, row_offset(gates, r) + c));
      const Acc u = static_cast<Acc>(read_element(up, row_offset(ups, r) + c));
      write_element(y, row_offset(results, r) + c, g / (1 + std::exp(-g)) * u);
    }
  }
}

template <class Acc>
void reference_bwd(const TensorView& dy, const TensorView& gate, const TensorView& up, const TensorView& dgate,
                   const TensorView& dup) {
  const Rows grads = rows_of(dy), gates = rows_of(gate), ups = rows_of(up), dgates = rows_of(dgate),
             dups = rows_of(dup);
  for (std::int64_t r = 0; r < row_count(gate); ++r) {
    for (std::int64_t c = 0; c < gate.size(-1); ++c) {
      const Acc grad = static_cast<Acc>(read_element(dy, row_offset(grads, r) + c));
      const Acc g = static_cast<Acc>(read_element(gate, row_offset(gates, r) + c));
      const Acc u = static_cast<Acc>(read_element(up, row_offset(ups, r) + c));
      const Acc s = 1 / (1 + std::exp(-g));
      if (dgate.defined()) {
        write_element(dgate, row_offset(dgates, r) + c, grad * u * s * (1 + g * (1 - s)));
      }
      if (dup.defined()) {
        write_element(dup, row_offset(dups, r) + c, grad * g * s);
      }
    }
  }
}

template void reference_fwd<double>(const TensorView&, const TensorView&, const TensorView&);
template void reference_fwd<float>(const TensorView&, const TensorView&, const TensorView&);
template void reference_bwd<double>(const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                    const TensorView&);
template void reference_bwd<float>(const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                   const TensorView&);

}  // namespace tidegate::swiglu
