// Zero-centred RMSNorm in plain loops: the definition, and the fp64 path of the operator.
#include "ops/rms_norm/reference.h"

#include <cmath>

#include "base/element.h"
#include "base/row_views.h"

namespace tidegate::rms_norm {
namespace {

template <class Acc>
Acc element(const TensorView& t, const Rows& rows, std::int64_t r, std::int64_t c) {
  return static_cast<Acc>(read_element(t, row_offset(rows, r) + c));
}
template <class Acc>
Acc factor(const TensorView& weight, std::int64_t c) {
  return 1 + static_cast<Acc>(read_element(weight, c * weight.strides[0]));
}

}  // namespace

template <class Acc>
void reference_fwd(const TensorView& x, const TensorView& weight, const TensorView& y, const TensorView& rstd,
                   double eps) {
  const Rows rx = rows_of(x);
  const std::int64_t D = x.size(-1);
  for (std::int64_t r = 0; r < row_count(x); ++r) {
    Acc squares = 0;
    for (std::int64_t c = 0; c < D; ++c) {
      squares += element<Acc>(x, rx, r, c) * element<Acc>(x, rx, r, c);
    }
    const Acc scale = 1 / std::sqrt(squares / static_cast<Acc>(D) + static_cast<Acc>(eps));
    write_element(rstd, row_offset(rows_of(rstd, rstd.rank), r), scale);
    for (std::int64_t c = 0; c < D; ++c) {
      write_element(y, row_offset(rows_of(y), r) + c, element<Acc>(x, rx, r, c) * scale * factor<Acc>(weight, c));
    }
  }
}

template <class Acc>
void reference_bwd(const TensorView& dy, const TensorView& x, const TensorView& weight, const TensorView& rstd,
                   const TensorView& dx, const TensorView& dweight) {
  const Rows rx = rows_of(x);
  const Rows rdy = rows_of(dy);
  const std::int64_t D = x.size(-1);
  for (std::int64_t c = 0; c < D && dweight.defined(); ++c) {
    write_element(dweight, c * dweight.strides[0], 0.0);
  }
  for (std::int64_t r = 0; r < row_count(x); ++r) {
    const Acc scale = static_cast<Acc>(read_element(rstd, row_offset(rows_of(rstd, rstd.rank), r)));
    Acc mean = 0;
    for (std::int64_t c = 0; c < D; ++c) {
      const Acc term = element<Acc>(dy, rdy, r, c) * element<Acc>(x, rx, r, c) * scale;
      mean += term * factor<Acc>(weight, c) / static_cast<Acc>(D);
      if (dweight.defined()) {
        const std::int64_t at = c * dweight.strides[0];
        write_element(dweight, at, static_cast<Acc>(read_element(dweight, at)) + term);
      }
    }
    for (std::int64_t c = 0; c < D && dx.defined(); ++c) {
      const Acc e = element<Acc>(dy, rdy, r, c) * factor<Acc>(weight, c);
      write_element(dx, row_offset(rows_of(dx), r) + c, scale * (e - element<Acc>(x, rx, r, c) * scale * mean));
    }
  }
}

template void reference_fwd<double>(const TensorView&, const TensorView&, const TensorView&, const TensorView&, double);
template void reference_fwd<float>(const TensorView&, const TensorView&, const TensorView&, const TensorView&, double);
template void reference_bwd<double>(const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                    const TensorView&, const TensorView&);
template void reference_bwd<float>(const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                   const TensorView&, const TensorView&);

}  // namespace tidegate::rms_norm
