// Partial RoPE in plain loops: the definition, and the fp64 path of the operator.
#include "ops/partial_rope/reference.h"

#include "base/element.h"

namespace tidegate::partial_rope {

template <class Acc>
void reference(const TensorView& x, const TensorView& cos, const TensorView& sin, const TensorView& y, Layout layout,
               bool transpose) {
  const int lead = has_batch(layout) ? 1 : 0;
  const int token_dim = lead + (is_head_major(layout) ? 1 : 0);
  const int head_dim = lead + (is_head_major(layout) ? 0 : 1);
  const std::int64_t half = cos.size(-1) / 2;
  const std::int64_t rows = lead == 1 ? x.size(0) : 1;
  for (std::int64_t b = 0; b < rows; ++b) {
    for (std::int64_t t = 0; t < x.size(token_dim); ++t) {
      const auto angle = [&](const TensorView& table, std::int64_t i) {
        const std::int64_t row = table.rank == 3 ? b * table.stride(0) : 0;
        return static_cast<Acc>(read_element(table, row + t * table.stride(-2) + i));
      };
      for (std::int64_t h = 0; h < x.size(head_dim); ++h) {
        const auto base = [&](const TensorView& v) {
          return (lead == 1 ? b * v.stride(0) : 0) + t * v.stride(token_dim) + h * v.stride(head_dim);
        };
        for (std::int64_t i = 0; i < half; ++i) {
          const Acc xi = static_cast<Acc>(read_element(x, base(x) + i));
          const Acc xj = static_cast<Acc>(read_element(x, base(x) + half + i));
          const Acc ci = angle(cos, i);
          const Acc cj = angle(cos, half + i);
          const Acc si = angle(sin, i);
          const Acc sj = angle(sin, half + i);
          write_element(y, base(y) + i, transpose ? xi * ci + xj * sj : xi * ci - xj * si);
          write_element(y, base(y) + half + i, transpose ? xj * cj - xi * si : xj * cj + xi * sj);
        }
        for (std::int64_t i = 2 * half; i < x.size(-1); ++i) {
          write_element(y, base(y) + i, read_element(x, base(x) + i));
        }
      }
    }
  }
}

template void reference<double>(const TensorView&, const TensorView&, const TensorView&, const TensorView&, Layout,
                                bool);
template void reference<float>(const TensorView&, const TensorView&, const TensorView&, const TensorView&, Layout,
                               bool);

}  // namespace tidegate::partial_rope
