// What the operator tests share: tensors in difficult memory, error measures, loops over instruction sets and threads.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tidegate/cpu.h"
#include "tidegate/parallel.h"
#include "tidegate/tensor.h"

namespace tidegate::test {

using Sizes = std::vector<std::int64_t>;

// The kernels' types; fp64 is the reference path.
inline constexpr DType kKernelTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
// Widths around the vector lengths, head sizes of real models, and more than one block of channels.
inline constexpr std::int64_t kWidths[] = {1, 3, 8, 15, 16, 17, 60, 83, 100, 128, 130, 256, 520, 1030};

// The same numbers in every run (splitmix64).
class Random {
 public:
  explicit Random(std::uint64_t seed = 1) : state_(seed) {}
  double uniform();  // [0, 1)
  double normal();
  std::int64_t integer(std::int64_t low, std::int64_t high);  // both ends included

 private:
  std::uint64_t state_;
};

// How a tensor lies in memory.
struct Form {
  std::vector<int> order;  // dimensions from the outermost to the innermost one in memory; empty: as they are
  std::int64_t gap = 0;    // unused elements after every run of every dimension but the innermost
  bool reversed = false;   // negative strides in all dimensions but the innermost
  bool low = false;        // the memory starts after an unmapped page; else it ends before one
};
Form padded(std::int64_t gap = 5);
Form reversed(std::int64_t gap = 3);
Form permuted(std::vector<int> order, std::int64_t gap = 0);
Form low(Form form = {});

// A tensor that owns its memory. Every byte starts as 0xFF, NaN in all float types: in outputs that shows elements that
// were not written, in gaps it shows what was read or written outside the tensor. An unmapped page follows the last
// byte (Form::low: comes before the first one). Copies are deep.
class Tensor {
 public:
  Tensor() = default;  // absent
  Tensor(DType dtype, const Sizes& sizes, const Form& form = {});
  Tensor(const Tensor& other);
  Tensor(Tensor&& other) noexcept { swap(other); }
  Tensor& operator=(Tensor other) noexcept {
    swap(other);
    return *this;
  }
  ~Tensor();

  const TensorView& view() const { return view_; }
  operator const TensorView&() const { return view_; }  // NOLINT: stands for its view in every operator call
  bool defined() const { return view_.defined(); }
  const Form& form() const { return form_; }
  Sizes sizes() const { return {view_.sizes, view_.sizes + (defined() ? view_.rank : 0)}; }

  // Element number i in logical order.
  double get(std::int64_t i) const;
  Tensor& set(std::int64_t i, double value);
  Tensor& fill(double value);
  Tensor& fill(const std::function<double(std::int64_t)>& value);

  bool gaps_untouched() const;

 private:
  void swap(Tensor& other) noexcept;

  TensorView view_;
  Form form_;
  unsigned char* map_ = nullptr;  // page, memory, page
  std::size_t map_bytes_ = 0;
  unsigned char* bytes_ = nullptr;
  std::size_t byte_count_ = 0;
  friend std::uint64_t checksum_of_all_tensors();
};

Tensor normal(Random& random, DType dtype, const Sizes& sizes, const Form& form = {}, double scale = 1.0);
Tensor uniform(Random& random, DType dtype, const Sizes& sizes, double from, double to, const Form& form = {});
// The same values in another type and dense memory; an absent tensor stays absent.
Tensor converted(const Tensor& t, DType dtype);
inline Tensor wide(const Tensor& t) { return converted(t, DType::kF64); }
// The values of a view in dense memory of their own.
Tensor copied(const TensorView& t);
using Views = std::vector<TensorView>;
inline Views views_of(const std::vector<Tensor>& tensors) { return {tensors.begin(), tensors.end()}; }
// An unwritten tensor of t's sizes.
Tensor like(const Tensor& t);
Tensor like(const Tensor& t, DType dtype, const Form& form = {});

// FNV over the bytes of all tensors that there are.
std::uint64_t checksum_of_all_tensors();

// Offset, in elements, of element number i in logical order.
std::int64_t offset_at(const TensorView& t, std::int64_t i);
std::vector<double> values(const TensorView& t);
// Indices [begin, end) of one dimension.
TensorView part(const TensorView& t, int dimension, std::int64_t begin, std::int64_t end);
// As t, with two dimensions exchanged.
TensorView exchanged(const TensorView& t, int a, int b);

// As t, with one thing changed: ways to make an argument wrong.
TensorView ranked(TensorView t, int rank);
TensorView typed(TensorView t, DType dtype);
TensorView sized(TensorView t, int dimension, std::int64_t size);
TensorView strided(TensorView t, int dimension, std::int64_t stride);

// Equal sizes and equal bits in every element.
testing::AssertionResult same_bits(const TensorView& a, const TensorView& b);

// Half a unit in the last place of 1.0: the largest relative error that storing in a type makes.
double rounding_of(DType dtype);
// Bound of the relative rms error after storing: fp32's own bound, or what rounding to 16 bits makes of it.
double stored(DType dtype, double fp32_bound);

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
