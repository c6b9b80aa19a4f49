// What the operator tests share beside guarded.h: error measures, loops over instruction sets and threads.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "guarded.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate::test {

// Equal sizes and equal bits in every element.
testing::AssertionResult same_bits(const TensorView& a, const TensorView& b);

// Error of a result, and of the plain fp32 loops on the same inputs, against fp64. Results of several calls add up.
class Accuracy {
 public:
  // Also expects every element within its rounding plus 10 fp32 bounds of `scale` (the largest result if 0): a wrong
  // small case must not hide among large ones.
  void add(const TensorView& got, const TensorView& plain, const TensorView& truth, double fp32_bound,
           double scale = 0.0);
  // rms error <= bound, rms and maximum <= twice the plain ones. Recorded as property `name` of the test.
  void expect(const std::string& name, double bound) const;

 private:
  struct Sums {
    double error = 0.0;
    double max = 0.0;
  };
  Sums got_, plain_;
  double truth_ = 0.0;
};

// `rows` rows of `width` random elements that overlap: a large input from little memory.
Tensor sliding_source(Random& random, DType dtype, std::int64_t rows, std::int64_t width);
TensorView sliding(const Tensor& source, std::int64_t rows, std::int64_t width);
// f writes a [rows, width] result twice: to aligned memory, where a large one is written past the caches, and to an odd
// address, where that is impossible. Expects the same bits.
void expect_streamed_bits(DType dtype, std::int64_t rows, std::int64_t width, const std::function<void(TensorView)>& f);

// Expects Error with exactly this text, and that no byte of any Tensor has changed.
void expect_error(const std::function<void()>& f, std::string_view message);

// Expects the derivative of loss by every element of `input` (fp64, changed in turn) to be `gradient`.
void expect_gradient(Tensor& input, const Tensor& gradient, const std::function<double()>& loss);
double dot(const Tensor& a, const Tensor& b);

void for_each_isa(const std::function<void()>& f);
// 1, 2, 3 and 8 threads.
void for_each_thread_count(const std::function<void()>& f);
// f(i) for i < 8 on as many threads of the caller.
void on_eight_callers(const std::function<void(int)>& f);

// Flush-to-zero and denormals-are-zero, as some callers set them.
class FlushDenormals {
 public:
  FlushDenormals();
  ~FlushDenormals();
  bool still_set() const;

 private:
  unsigned saved_ = 0;
};

}  // namespace tidegate::test
