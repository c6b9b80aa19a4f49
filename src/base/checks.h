// Checks that most operators share. Each throws Error("<op>: <tensor>: expected ..., got ...") or returns.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>

#include "tidegate/error.h"
#include "tidegate/tensor.h"

namespace tidegate {

struct Named {
  std::string_view name;
  const TensorView& tensor;
};

// fp32, bf16, fp16, fp64: what a data tensor may be.
void check_data_type(std::string_view op, Named t);
// The same without fp64: operators that have no fp64 path.
void check_kernel_type(std::string_view op, Named t);
void check_float(std::string_view op, Named t);
void check_dtype(std::string_view op, Named t, DType expected);
void check_same_dtype(std::string_view op, Named t, Named like);

void check_present(std::string_view op, Named t);
void check_rank(std::string_view op, Named t, int expected);
void check_shape(std::string_view op, Named t, std::initializer_list<std::int64_t> expected);
void check_same_shape(std::string_view op, Named t, Named like);
void check_inner_stride(std::string_view op, Named t);

// An output must not write one element twice (a stride of zero, or one shorter than what lies inside it), nor overlap
// an input or another output.
void check_outputs(std::string_view op, std::initializer_list<Named> outputs, std::initializer_list<Named> inputs);
// A list in the options, to stand among the inputs: it is the caller's memory as well.
template <class T>
TensorView list_view(std::span<const T> list) {
  return contiguous(list.data(), DType::kI8, {static_cast<std::int64_t>(list.size_bytes())});
}

}  // namespace tidegate
