// The combine rule in plain loops: the definition, and the fp64 path of the operator.
#include "base/element.h"
#include "base/row_views.h"
#include "ops/gdn_segment_combine/problem.h"

namespace tidegate::segment_combine {
namespace {

double element(const TensorView& t, std::int64_t m, std::int64_t i, std::int64_t j) {
  return read_element(t, row_offset(rows_of(t, t.rank - 2), m) + i * t.stride(-2) + j * t.stride(-1));
}

}  // namespace

template <class Acc>
void reference(const TensorView& phi2, const TensorView& x, const TensorView& add, const TensorView& out) {
  const std::int64_t K = out.size(-2);
  const std::int64_t width = out.size(-1);
  const std::int64_t matrices = K * width > 0 ? out.numel() / (K * width) : 0;
  for (std::int64_t m = 0; m < matrices; ++m) {
    const std::int64_t base = row_offset(rows_of(out, out.rank - 2), m);
    for (std::int64_t i = 0; i < K; ++i) {
      for (std::int64_t j = 0; j < width; ++j) {
        Acc sum = add.defined() ? static_cast<Acc>(element(add, m, i, j)) : Acc(0);
        for (std::int64_t l = 0; l < K; ++l) {
          sum += static_cast<Acc>(element(phi2, m, i, l)) * static_cast<Acc>(element(x, m, l, j));
        }
        write_element(out, base + i * out.stride(-2) + j * out.stride(-1), static_cast<double>(sum));
      }
    }
  }
}

template void reference<double>(const TensorView&, const TensorView&, const TensorView&, const TensorView&);
template void reference<float>(const TensorView&, const TensorView&, const TensorView&, const TensorView&);

}  // namespace tidegate::segment_combine
