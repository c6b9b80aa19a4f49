// Tensors in difficult memory, random numbers to fill them with, and ways to look at them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

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
  std::uint64_t checksum(std::uint64_t hash = 0xcbf29ce484222325u) const;  // FNV over its bytes, gaps included

 private:
  void swap(Tensor& other) noexcept;

  TensorView view_;
  Form form_;
  unsigned char* map_ = nullptr;  // page, memory, page
  std::size_t map_bytes_ = 0;
  unsigned char* bytes_ = nullptr;
  std::size_t byte_count_ = 0;
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

// Half a unit in the last place of 1.0: the largest relative error that storing in a type makes.
double rounding_of(DType dtype);
// Bound of the relative rms error after storing: fp32's own bound, or what rounding to 16 bits makes of it.
double stored(DType dtype, double fp32_bound);

}  // namespace tidegate::test
