// Gated RMSNorm in plain loops: the definition, and the fp64 path of the operator.
#include "ops/rms_norm_gated/reference.h"

#include <cmath>

#include "base/element.h"
#include "base/row_views.h"

namespace tidegate::rms_norm_gated {
namespace {

template <class Acc>
struct Gate {
  Acc value, slope;
};
template <class Acc>
Gate<Acc> gate(Acc z, Activation activation) {
  const Acc e = std::exp(-std::abs(z));
  const Acc s = (z < 0 ? e : Acc(1)) / (1 + e);
  return activation == Activation::kSigmoid ? Gate<Acc>{s, s * (1 - s)} : Gate<Acc>{z * s, s * (1 + z * (1 - s))};
}

// Rounds to a dtype and back.
double rounded(double value, DType dtype) {
  if (dtype == DType::kBF16) return widen(narrow_bf16(static_cast<float>(value)));
  if (dtype == DType::kF16) return widen(narrow_f16(static_cast<float>(value)));
  return value;
}

template <class Acc>
Acc element(const TensorView& t, const Rows& rows, std::int64_t r, std::int64_t c) {
  return static_cast<Acc>(read_element(t, row_offset(rows, r) + c));
}
template <class Acc>
Acc weight_at(const TensorView& w, std::int64_t c) {
  return w.defined() ? static_cast<Acc>(read_element(w, c * w.strides[0])) : Acc(1);
}

}  // namespace

template <class Acc>
void reference_fwd(const TensorView& x, const TensorView& z, const TensorView& weight, const TensorView& y,
                   const TensorView& rstd, const RmsNormGatedOptions& options) {
  const Rows rx = rows_of(x);
  const Rows rz = rows_of(z);
  const Rows ry = rows_of(y);
  const std::int64_t D = x.size(-1);
  const bool hf = options.rounding == Rounding::kHf;
  for (std::int64_t r = 0; r < row_count(x); ++r) {
    Acc squares = 0;
    for (std::int64_t c = 0; c < D; ++c) {
      squares += element<Acc>(x, rx, r, c) * element<Acc>(x, rx, r, c);
    }
    const Acc scale = 1 / std::sqrt(squares / static_cast<Acc>(D) + static_cast<Acc>(options.eps));
    write_element(rstd, row_offset(rows_of(rstd, rstd.rank), r), scale);
    for (std::int64_t c = 0; c < D; ++c) {
      Acc n = element<Acc>(x, rx, r, c) * scale;
      n = hf ? static_cast<Acc>(rounded(n, x.dtype)) : n;
      n *= weight_at<Acc>(weight, c);
      n = hf && rounds_product(x.dtype, weight) ? static_cast<Acc>(rounded(n, x.dtype)) : n;
      write_element(y, row_offset(ry, r) + c, n * gate(element<Acc>(z, rz, r, c), options.activation).value);
    }
  }
}

template <class Acc>
void reference_bwd(const TensorView& dy, const TensorView& x, const TensorView& z, const TensorView& weight,
                   const TensorView& rstd, const TensorView& dx, const TensorView& dz, const TensorView& dweight,
                   const RmsNormGatedOptions& options) {
  const Rows rdy = rows_of(dy);
  const Rows rx = rows_of(x);
  const Rows rz = rows_of(z);
  const std::int64_t D = x.size(-1);
  for (std::int64_t c = 0; c < D && dweight.defined(); ++c) {
    write_element(dweight, c * dweight.strides[0], 0.0);
  }
  for (std::int64_t r = 0; r < row_count(x); ++r) {
    const Acc scale = static_cast<Acc>(read_element(rstd, row_offset(rows_of(rstd, rstd.rank), r)));
    Acc mean = 0;
    for (std::int64_t c = 0; c < D; ++c) {
      const Acc n = element<Acc>(x, rx, r, c) * scale;
      const Gate<Acc> g = gate(element<Acc>(z, rz, r, c), options.activation);
      const Acc grad = element<Acc>(dy, rdy, r, c);
      mean += grad * weight_at<Acc>(weight, c) * g.value * n / static_cast<Acc>(D);
      if (dz.defined()) {
        write_element(dz, row_offset(rows_of(dz), r) + c, grad * weight_at<Acc>(weight, c) * n * g.slope);
      }
      if (dweight.defined()) {
        const std::int64_t at = c * dweight.strides[0];
        write_element(dweight, at, static_cast<Acc>(read_element(dweight, at)) + grad * n * g.value);
      }
    }
    for (std::int64_t c = 0; c < D && dx.defined(); ++c) {
      const Acc n = element<Acc>(x, rx, r, c) * scale;
      const Acc act = gate(element<Acc>(z, rz, r, c), options.activation).value;
      const Acc e = element<Acc>(dy, rdy, r, c) * weight_at<Acc>(weight, c) * act;
      write_element(dx, row_offset(rows_of(dx), r) + c, scale * (e - n * mean));
    }
  }
}

template void reference_fwd<double>(const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                    const TensorView&, const RmsNormGatedOptions&);
template void reference_fwd<float>(const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                   const TensorView&, const RmsNormGatedOptions&);
template void reference_bwd<double>(const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                    const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                    const RmsNormGatedOptions&);
template void reference_bwd<float>(const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                   const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                   const RmsNormGatedOptions&);

}  // namespace tidegate::rms_norm_gated
