// l2norm in plain loops: the definition, and the fp64 path of the operator.
#include "ops/l2norm/reference.h"

#include <cmath>

#include "base/element.h"
#include "base/row_views.h"

namespace tidegate::l2norm {

template <class Acc>
void reference_fwd(const TensorView& x, const TensorView& y, const TensorView& rstd, double eps) {
  const Rows rx = rows_of(x);
  const Rows ry = rows_of(y);
  const Rows rr = rows_of(rstd, rstd.rank);
  const std::int64_t D = x.size(-1);
  for (std::int64_t r = 0; r < row_count(x); ++r) {
    Acc squares = 0;
    for (std::int64_t c = 0; c < D; ++c) {
      const Acc v = static_cast<Acc>(read_element(x, row_offset(rx, r) + c));
      squares += v * v;
    }
    const Acc scale = 1 / std::sqrt(squares + static_cast<Acc>(eps));
    write_element(rstd, row_offset(rr, r), scale);
    for (std::int64_t c = 0; c < D; ++c) {
      write_element(y, row_offset(ry, r) + c, static_cast<Acc>(read_element(x, row_offset(rx, r) + c)) * scale);
    }
  }
}

template <class Acc>
void reference_bwd(const TensorView& dy, const TensorView& x, const TensorView& rstd, const TensorView& dx,
                   bool zero_row_safe) {
  const Rows rdy = rows_of(dy);
  const Rows rx = rows_of(x);
  const Rows rdx = rows_of(dx);
  const Rows rr = rows_of(rstd, rstd.rank);
  const std::int64_t D = x.size(-1);
  for (std::int64_t r = 0; r < row_count(x); ++r) {
    const Acc scale = static_cast<Acc>(read_element(rstd, row_offset(rr, r)));
    const auto n = [&](std::int64_t c) { return static_cast<Acc>(read_element(x, row_offset(rx, r) + c)) * scale; };
    const auto grad = [&](std::int64_t c) { return static_cast<Acc>(read_element(dy, row_offset(rdy, r) + c)); };
    Acc along = 0;
    bool zero = true;
    for (std::int64_t c = 0; c < D; ++c) {
      along += grad(c) * n(c);
      zero = zero && n(c) == 0;
    }
    for (std::int64_t c = 0; c < D; ++c) {
      write_element(dx, row_offset(rdx, r) + c, zero && zero_row_safe ? Acc(0) : scale * (grad(c) - n(c) * along));
    }
  }
}

template void reference_fwd<double>(const TensorView&, const TensorView&, const TensorView&, double);
template void reference_fwd<float>(const TensorView&, const TensorView&, const TensorView&, double);
template void reference_bwd<double>(const TensorView&, const TensorView&, const TensorView&, const TensorView&, bool);
template void reference_bwd<float>(const TensorView&, const TensorView&, const TensorView&, const TensorView&, bool);

}  // namespace tidegate::l2norm
