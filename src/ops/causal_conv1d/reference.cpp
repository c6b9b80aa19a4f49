// The convolution in plain loops: the definition that the kernels are tested against, and the fp64 path of the
// operator.
#include <cmath>
#include <vector>

#include "base/element.h"
#include "ops/causal_conv1d/problem.h"

namespace tidegate::causal_conv1d {
namespace {

std::int64_t offset(const Grid& g, std::int64_t row, std::int64_t channel, std::int64_t token) {
  return row * g.batch + channel / g.width * g.head + token * g.token + channel % g.width;
}

// One channel of one sequence, with W-1 samples of history in front.
template <class Acc>
std::vector<Acc> samples(const TensorView& x, const Grid& grid, const TensorView& initial, std::int64_t n,
                         const Sequence& s, std::int64_t channel, std::int64_t W) {
  std::vector<Acc> v;
  for (std::int64_t i = -(W - 1); i < s.length(); ++i) {
    if (i >= 0) {
      v.push_back(static_cast<Acc>(read_element(x, offset(grid, s.row, channel, s.begin + i))));
    } else {
      v.push_back(initial.defined()
                      ? static_cast<Acc>(read_element(initial, offset_of(initial, n, channel, initial.size(2) + i)))
                      : Acc(0));
    }
  }
  return v;
}

template <class Acc>
Acc pre_activation(const std::vector<Acc>& v, const std::vector<Acc>& w, Acc bias, std::size_t t) {
  Acc p = bias;
  for (std::size_t j = 0; j < w.size(); ++j) {
    p += w[j] * v[t + j];
  }
  return p;
}

template <class Acc>
std::vector<Acc> taps_of(const TensorView& weight, std::int64_t channel) {
  std::vector<Acc> w;
  for (std::int64_t j = 0; j < weight.size(1); ++j) {
    w.push_back(static_cast<Acc>(read_element(weight, offset_of(weight, channel, j))));
  }
  return w;
}

template <class Acc>
Acc bias_of(const TensorView& bias, std::int64_t channel) {
  return bias.defined() ? static_cast<Acc>(read_element(bias, offset_of(bias, channel))) : Acc(0);
}

}  // namespace

template <class Acc>
void reference_fwd(const TensorView& x, const TensorView& weight, const TensorView& bias, const TensorView& initial,
                   const TensorView& y, const SeqLens& seq, const CausalConv1dOptions& options) {
  const std::int64_t channels = weight.size(0);
  const Grid in = grid_of(x, options.layout, 0, channels);
  const Grid out = grid_of(y, options.layout, options.head_num, channels);
  for (std::int64_t c = 0; c < channels; ++c) {
    const std::vector<Acc> w = taps_of<Acc>(weight, c);
    for (std::int64_t n = 0; n < seq.count(); ++n) {
      const Sequence& s = seq[n];
      const std::vector<Acc> v = samples<Acc>(x, in, initial, n, s, c, weight.size(1));
      for (std::int64_t t = 0; t < s.length(); ++t) {
        const Acc p = pre_activation(v, w, bias_of<Acc>(bias, c), static_cast<std::size_t>(t));
        const Acc act = options.activation == Activation::kSilu ? p / (1 + std::exp(-p)) : p;
        write_element(y, offset(out, s.row, c, s.begin + t), act);
      }
    }
  }
}

template <class Acc>
void reference_bwd(const TensorView& dy, const TensorView& x, const TensorView& weight, const TensorView& bias,
                   const TensorView& initial, const TensorView& dfinal, const TensorView& dx, const TensorView& dweight,
                   const TensorView& dbias, const TensorView& dinitial, const SeqLens& seq,
                   const CausalConv1dOptions& options) {
  const std::int64_t channels = weight.size(0);
  const std::int64_t W = weight.size(1);
  const Grid in = grid_of(x, options.layout, 0, channels);
  const Grid out = grid_of(dy, options.layout, options.head_num, channels);
  const Grid grad = grid_of(dx, options.layout, 0, channels);
  for (std::int64_t c = 0; c < channels; ++c) {
    const std::vector<Acc> w = taps_of<Acc>(weight, c);
    std::vector<Acc> dw(static_cast<std::size_t>(W), Acc(0));
    Acc db = 0;
    for (std::int64_t n = 0; n < seq.count(); ++n) {
      const Sequence& s = seq[n];
      const std::int64_t L = s.length();
      const std::vector<Acc> v = samples<Acc>(x, in, initial, n, s, c, W);
      std::vector<Acc> dv(v.size(), Acc(0));
      for (std::int64_t t = 0; t < L; ++t) {
        const auto at = static_cast<std::size_t>(t);
        Acc e = static_cast<Acc>(read_element(dy, offset(out, s.row, c, s.begin + t)));
        if (options.activation == Activation::kSilu) {
          const Acc p = pre_activation(v, w, bias_of<Acc>(bias, c), at);
          const Acc sig = 1 / (1 + std::exp(-p));
          e *= sig * (1 + p * (1 - sig));
        }
        db += e;
        for (std::size_t j = 0; j < w.size(); ++j) {
          dw[j] += e * v[at + j];
          dv[at + j] += e * w[j];
        }
      }
      // Sample i of (history, tokens) may also have become part of the final state.
      const std::int64_t oldest = dinitial.defined() ? -dinitial.size(2) : 0;
      for (std::int64_t i = oldest; i < L; ++i) {
        Acc d = i >= -(W - 1) ? dv[static_cast<std::size_t>(i + W - 1)] : Acc(0);
        const std::int64_t column = dfinal.defined() ? i - L + dfinal.size(2) : -1;
        if (column >= 0) {
          d += static_cast<Acc>(read_element(dfinal, offset_of(dfinal, n, c, column)));
        }
        if (i < 0) {
          write_element(dinitial, offset_of(dinitial, n, c, dinitial.size(2) + i), d);
        } else if (dx.defined()) {
          write_element(dx, offset(grad, s.row, c, s.begin + i), d);
        }
      }
    }
    for (std::int64_t j = 0; j < W && dweight.defined(); ++j) {
      write_element(dweight, offset_of(dweight, c, j), dw[static_cast<std::size_t>(j)]);
    }
    if (dbias.defined()) {
      write_element(dbias, offset_of(dbias, c), db);
    }
  }
}

template void reference_fwd<double>(const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                    const TensorView&, const SeqLens&, const CausalConv1dOptions&);
template void reference_fwd<float>(const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                   const TensorView&, const SeqLens&, const CausalConv1dOptions&);
template void reference_bwd<double>(const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                    const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                    const TensorView&, const TensorView&, const SeqLens&, const CausalConv1dOptions&);
template void reference_bwd<float>(const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                   const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                   const TensorView&, const TensorView&, const SeqLens&, const CausalConv1dOptions&);

}  // namespace tidegate::causal_conv1d
