// A convolution problem of the tests: the numbers that describe it, its tensors, and the calls on them.
#pragma once

#include <sstream>
#include <string>

#include "guarded.h"
#include "ops/causal_conv1d/problem.h"
#include "tidegate/conv.h"

namespace tidegate::test {

struct ConvCase {
  std::int64_t T = 0, D = 1, W = 4;
  DType dtype = DType::kF32;
  Layout layout = Layout::kTND;
  std::int64_t B = 1;
  std::int64_t heads = 1;     // of x in head-major layouts
  std::int64_t head_num = 0;  // of y
  bool bias = true, silu = true;
  std::int64_t state = 0;        // length of the initial state, 0: none
  std::int64_t final_state = 0;  // length of the final state, 0: none
  Sizes lengths = {};            // packed sequences; empty: B sequences of T tokens
  DType weight_type = DType::kF32;
  Form form = {};        // of x, y and their gradients
  Form state_form = {};  // of the states

  std::string text() const {
    std::ostringstream out;
    out << "T=" << T << " D=" << D << " W=" << W << " " << dtype_name(dtype) << " layout=" << static_cast<int>(layout)
        << " B=" << B << " heads=" << heads << " head_num=" << head_num << " bias=" << bias << " silu=" << silu
        << " state=" << state << "/" << final_state << " lengths=";
    for (const std::int64_t n : lengths) {
      out << n << ",";
    }
    return out.str();
  }
  Sizes x_sizes() const {
    Sizes sizes = is_head_major(layout) ? Sizes{heads, T, D / heads} : Sizes{T, D};
    sizes.insert(sizes.begin(), has_batch(layout) ? 1 : 0, B);
    return sizes;
  }
  Sizes y_sizes() const {
    if (head_num == 0) {
      return x_sizes();
    }
    Sizes sizes = {head_num, T, D / head_num};
    sizes.insert(sizes.begin(), has_batch(layout) ? 1 : 0, B);
    return sizes;
  }
  SeqLens seq() const { return lengths.empty() ? SeqLens::dense(B, T) : SeqLens::from_lengths(lengths); }
  CausalConv1dOptions options() const { return {silu ? Activation::kSilu : Activation::kNone, head_num, layout}; }
};

// Inputs of forward and backward.
struct Conv {
  ConvCase c;
  SeqLens seq;
  Tensor x, weight, bias, initial, dy, dfinal;
};
struct ConvForward {
  Tensor y, final_state;
};
struct ConvBackward {
  Tensor dx, dweight, dbias, dinitial;
};

inline Conv make_conv(Random& random, const ConvCase& c) {
  Conv v{c, c.seq(), {}, {}, {}, {}, {}, {}};
  v.x = normal(random, c.dtype, c.x_sizes(), c.form);
  v.weight = normal(random, c.weight_type, {c.D, c.W}, {}, 0.5);
  v.dy = normal(random, c.dtype, c.y_sizes(), c.form);
  if (c.bias) v.bias = normal(random, c.weight_type, {c.D});
  if (c.state > 0) v.initial = normal(random, c.dtype, {v.seq.count(), c.D, c.state}, c.state_form);
  if (c.final_state > 0) v.dfinal = normal(random, c.dtype, {v.seq.count(), c.D, c.final_state}, c.state_form);
  return v;
}

// The same problem in fp64: the operator's reference path.
inline Conv wide(const Conv& v) {
  Conv w{v.c, v.seq, wide(v.x), wide(v.weight), wide(v.bias), wide(v.initial), wide(v.dy), wide(v.dfinal)};
  w.c.form = {};
  w.c.state_form = {};
  w.c.dtype = DType::kF64;
  return w;
}

inline ConvForward outputs_of(const Conv& v) {
  ConvForward out;
  out.y = Tensor(v.c.dtype, v.c.y_sizes(), v.c.form);
  if (v.c.final_state > 0) {
    out.final_state = Tensor(v.c.dtype, {v.seq.count(), v.c.D, v.c.final_state}, v.c.state_form);
  }
  return out;
}
inline ConvForward forward(const Conv& v) {
  ConvForward out = outputs_of(v);
  causal_conv1d_fwd(v.x, v.weight, v.bias, v.initial, out.y, out.final_state, v.seq, v.c.options());
  return out;
}
// Plain loops in fp32 on the same types.
inline Tensor plain_forward(const Conv& v) {
  Tensor y = outputs_of(v).y;
  causal_conv1d::reference_fwd<float>(v.x, v.weight, v.bias, v.initial, y, v.seq, v.c.options());
  return y;
}

inline ConvBackward gradients_of(const Conv& v) {
  const DType sums = v.c.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  ConvBackward out;
  out.dx = Tensor(v.c.dtype, v.c.x_sizes(), v.c.form);
  out.dweight = Tensor(sums, {v.c.D, v.c.W});
  out.dbias = Tensor(sums, {v.c.D});
  out.dinitial = v.c.state > 0 ? Tensor(v.c.dtype, {v.seq.count(), v.c.D, v.c.state}, v.c.state_form) : Tensor();
  return out;
}
inline ConvBackward backward(const Conv& v) {
  ConvBackward out = gradients_of(v);
  causal_conv1d_bwd(v.dy, v.x, v.weight, v.bias, v.initial, v.dfinal, out.dx, out.dweight, out.dbias, out.dinitial,
                    v.seq, v.c.options());
  return out;
}
inline ConvBackward plain_backward(const Conv& v) {
  ConvBackward out = gradients_of(v);
  causal_conv1d::reference_bwd<float>(v.dy, v.x, v.weight, v.bias, v.initial, v.dfinal, out.dx, out.dweight, out.dbias,
                                      out.dinitial, v.seq, v.c.options());
  return out;
}

// Sequence n of a packed problem without heads, as a problem of its own.
inline Conv sequence_of(const Conv& v, std::int64_t n) {
  const Sequence& s = v.seq[n];
  const auto copy = [](const Tensor& t, std::int64_t begin, std::int64_t end) {
    return t.defined() ? copied(part(t, 0, begin, end)) : Tensor();
  };
  Conv one{v.c,    SeqLens::dense(1, s.length()), copy(v.x, s.begin, s.end),  v.weight,
           v.bias, copy(v.initial, n, n + 1),     copy(v.dy, s.begin, s.end), copy(v.dfinal, n, n + 1)};
  one.c.T = s.length();
  one.c.lengths = {};
  return one;
}

// [.., D] as [.., n, D / n].
inline TensorView with_heads(const TensorView& t, std::int64_t n) {
  TensorView out = t;
  out.rank += 1;
  out.sizes[t.rank] = t.size(-1) / n;
  out.strides[t.rank] = 1;
  out.sizes[t.rank - 1] = n;
  out.strides[t.rank - 1] = out.sizes[t.rank];
  return out;
}

}  // namespace tidegate::test
