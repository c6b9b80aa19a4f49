// From torch tensors to views, and back. Everything the operator files of this folder share.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "tidegate/tidegate.h"

namespace tidegate::adapter {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

// The view of a tensor as it is. Throws for another device than the CPU, an unknown dtype, or too many dimensions.
TensorView view(std::string_view op, std::string_view name, const Tensor& t);
TensorView view(std::string_view op, std::string_view name, const Optional& t);  // absent stays absent

// An input whose inner stride is not 1 is copied; `t` then holds the copy for as long as the view is used.
TensorView dense(std::string_view op, std::string_view name, Tensor& t);
TensorView dense(std::string_view op, std::string_view name, Optional& t);

ScalarType scalar_type(DType dtype);
DType dtype_of(std::string_view op, std::string_view name, ScalarType type);

Tensor empty(std::vector<std::int64_t> sizes, ScalarType type);
Tensor zeros(std::vector<std::int64_t> sizes, ScalarType type);
inline Tensor nothing(ScalarType type) { return empty({0}, type); }  // an output that was not asked for
Tensor empty_like(const TensorView& t);                              // dense, same sizes and dtype
// The same for the gradient of a parameter: a matrix whose rows are its inner dimension in memory stays that way.
Tensor empty_weight_like(const TensorView& t);

// A 1-D int32 or int64 tensor as a list; the same of bool, int32 or int64 as 0 and 1. Absent: empty.
void check_index_type(std::string_view op, std::string_view name, const Tensor& t);
// An index tensor as it is.
inline TensorView index_view(std::string_view op, std::string_view name, const Tensor& t) {
  check_index_type(op, name, t);
  return view(op, name, t);
}
inline TensorView index_view(std::string_view op, std::string_view name, const Optional& t) {
  return t.has_value() ? index_view(op, name, *t) : TensorView{};
}
std::vector<std::int64_t> integers(std::string_view op, std::string_view name, const Tensor& t);
std::vector<std::int64_t> integers(std::string_view op, std::string_view name, const Optional& t);
std::vector<std::uint8_t> booleans(std::string_view op, std::string_view name, const Optional& t);

// Boundaries of a call: cu_seqlens if given (one row only), else every row of x is one sequence.
SeqLens boundaries(std::string_view op, const Optional& cu_seqlens, std::int64_t rows, std::int64_t tokens);

// Index tensors are read into lists before the operator sees them, so it is here that outputs are kept out of them.
using NamedTensor = std::pair<std::string_view, Optional>;
void check_apart(std::string_view op, std::initializer_list<NamedTensor> outputs,
                 std::initializer_list<NamedTensor> indices);

}  // namespace tidegate::adapter
