// What every row norm promises about memory and threads, written once.
#pragma once

#include "toolkit.h"

namespace tidegate::test {

struct RowNorm {
  int rows;     // inputs of x's shape: x, and perhaps a gate
  bool weight;  // one more input [D]; its gradient comes last
  void (*fwd)(const Views& in, const TensorView& y, const TensorView& rstd);
  void (*bwd)(const Views& in, const TensorView& dy, const TensorView& rstd, const Views& gradients);
};

struct RowNormCall {
  std::vector<Tensor> in;
  Tensor dy, rstd;
  Form form;
  Sizes leading() const {
    Sizes s = dy.sizes();
    s.pop_back();
    return s;
  }
  std::vector<Tensor> blank_results() const {
    Form without_last = form;
    without_last.order.clear();
    std::vector<Tensor> out;
    out.push_back(like(dy));
    out.emplace_back(DType::kF32, leading(), without_last);
    return out;
  }
  std::vector<Tensor> blank_gradients(const RowNorm& norm) const {
    std::vector<Tensor> out(static_cast<std::size_t>(norm.rows), like(dy));
    if (norm.weight) {
      out.emplace_back(DType::kF32, Sizes{dy.sizes().back()});
    }
    return out;
  }
};

// y and rstd; the gradients in the order of the inputs.
inline std::vector<Tensor> forward(const RowNorm& norm, const RowNormCall& c) {
  std::vector<Tensor> out = c.blank_results();
  norm.fwd(views_of(c.in), out[0], out[1]);
  return out;
}
inline std::vector<Tensor> backward(const RowNorm& norm, const RowNormCall& c) {
  std::vector<Tensor> out = c.blank_gradients(norm);
  norm.bwd(views_of(c.in), c.dy, c.rstd, views_of(out));
  return out;
}

inline RowNormCall make_rows(const RowNorm& norm, Random& random, DType dtype, const Sizes& sizes,
                             const Form& form = {}) {
  RowNormCall c;
  c.form = form;
  for (int i = 0; i < norm.rows; ++i) {
    c.in.push_back(normal(random, dtype, sizes, form));
  }
  if (norm.weight) {
    c.in.push_back(normal(random, dtype, {sizes.back()}));
  }
  c.dy = normal(random, dtype, sizes, form);
  c.rstd = forward(norm, c)[1];
  return c;
}

inline void expect_same(const std::vector<Tensor>& got, const std::vector<Tensor>& want) {
  for (std::size_t i = 0; i < want.size(); ++i) {
    EXPECT_TRUE(same_bits(got[i], want[i])) << "result " << i;
    EXPECT_TRUE(got[i].gaps_untouched()) << "result " << i;
  }
}

inline void expect_bits_of_rows(const RowNorm& norm) {
  for_each_isa([&] {
    Random random;
    const RowNormCall c = make_rows(norm, random, DType::kBF16, {700, 100});
    const std::vector<Tensor> once = forward(norm, c);
    const std::vector<Tensor> gradients = backward(norm, c);
    const auto again = [&] {
      expect_same(forward(norm, c), once);
      expect_same(backward(norm, c), gradients);
    };
    for_each_thread_count(again);
    on_eight_callers([&](int) { again(); });
    Views few = views_of(c.in);  // rows without their neighbours
    for (int i = 0; i < norm.rows; ++i) {
      few[static_cast<std::size_t>(i)] = part(few[static_cast<std::size_t>(i)], 0, 350, 353);
    }
    const Tensor y(DType::kBF16, {3, 100});
    norm.fwd(few, y, Tensor(DType::kF32, {3}));
    EXPECT_TRUE(same_bits(y, part(once[0], 0, 350, 353)));
  });
}

inline void expect_any_memory_of_rows(const RowNorm& norm) {
  for_each_isa([&] {
    for (const DType dtype : kKernelTypes) {
      for (const std::int64_t D : {1, 7, 21, 131}) {
        Random random(3);
        const RowNormCall dense = make_rows(norm, random, dtype, {2, 3, 5, D});
        const std::vector<Tensor> once = forward(norm, dense);
        const std::vector<Tensor> gradients = backward(norm, dense);
        for (const Form& form : {low(), padded(), low(reversed()), permuted({2, 0, 1, 3}, 3)}) {
          Random same(3);
          const RowNormCall c = make_rows(norm, same, dtype, {2, 3, 5, D}, form);
          expect_same(forward(norm, c), once);
          expect_same(backward(norm, c), gradients);
        }
        // Head-major rows to a token-major result: what the output projection wants.
        const Tensor y(dtype, {2, 3, 5, D}, permuted({0, 2, 1, 3}));
        norm.fwd(views_of(dense.in), y, Tensor(DType::kF32, {2, 3, 5}));
        EXPECT_TRUE(same_bits(y, once[0]));
      }
      Random random(5);  // one row, no leading dimension; and none at all
      EXPECT_EQ(forward(norm, make_rows(norm, random, dtype, {9}))[1].view().rank, 0);
      const std::vector<Tensor> none = backward(norm, make_rows(norm, random, dtype, {0, 9}));
      EXPECT_TRUE(!norm.weight || none.back().get(8) == 0.0);
    }
  });
}

// Denormal x and y, then denormal gradients, sums over rows among them; every second weight is denormal.
inline void expect_rows_ignore_flush_to_zero(const RowNorm& norm) {
  for_each_isa([&] {
    for (const double size : {1e-41, 1.0}) {
      Random random;
      RowNormCall c = make_rows(norm, random, DType::kF32, {6, 21});
      c.in[0].fill([&](std::int64_t) { return random.normal() * size; });
      c.dy.fill([&](std::int64_t) { return random.normal() * 1e-40; });
      if (norm.weight) {
        c.in.back().fill([&](std::int64_t i) { return random.normal() * (i % 2 == 0 ? 1e-40 : 1.0); });
      }
      const std::vector<Tensor> once = forward(norm, c);
      const std::vector<Tensor> gradients = backward(norm, c);
      ASSERT_NE(once[0].get(3), 0.0);
      for (const Tensor& gradient : gradients) {
        ASSERT_TRUE(size < 1.0 || gradient.get(3) != 0.0);
      }
      const std::vector<Tensor> out = c.blank_results();
      const std::vector<Tensor> got = c.blank_gradients(norm);
      {
        const FlushDenormals flush;
        norm.fwd(views_of(c.in), out[0], out[1]);
        norm.bwd(views_of(c.in), c.dy, c.rstd, views_of(got));
        EXPECT_TRUE(flush.still_set());
      }
      expect_same(out, once);
      expect_same(got, gradients);
    }
  });
}

inline void expect_streamed_rows(const RowNorm& norm, DType dtype, DType y_type) {
  constexpr std::int64_t rows = 70000;
  Random random;
  std::vector<Tensor> sources;
  Views in;
  for (int i = 0; i < norm.rows; ++i) {
    sources.push_back(sliding_source(random, dtype, rows, 128));
    in.push_back(sliding(sources.back(), rows, 128));
  }
  const Tensor weight = normal(random, dtype, {128});
  if (norm.weight) {
    in.push_back(weight);
  }
  for_each_isa([&] {
    const Tensor rstd(DType::kF32, {rows});
    expect_streamed_bits(y_type, rows, 128, [&](const TensorView& y) { norm.fwd(in, y, rstd); });
  });
}

}  // namespace tidegate::test
