#include "tidegate/tensor.h"

#include <charconv>

#include "tidegate/conv.h"
#include "tidegate/error.h"
#include "tidegate/norm.h"

namespace tidegate {

int dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kI8:
    case DType::kBool:
      return 1;
  }
  return 0;
}

std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    case DType::kF64:
      return "float64";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
    case DType::kI8:
      return "int8";
    case DType::kBool:
      return "bool";
  }
  return "unknown";
}

std::int64_t TensorView::numel() const {
  std::int64_t n = rank < 0 ? 0 : 1;
  for (int d = 0; d < rank; ++d) {
    n *= sizes[d];
  }
  return n;
}

TensorView contiguous(const void* data, DType dtype, std::initializer_list<std::int64_t> sizes) {
  check(sizes.size() <= kMaxRank, "tensor: rank: expected at most ", kMaxRank, ", got ", sizes.size());
  TensorView t;
  t.data = const_cast<void*>(data);
  t.dtype = dtype;
  t.rank = static_cast<int>(sizes.size());
  int d = 0;
  for (const std::int64_t n : sizes) {
    t.sizes[d++] = n;
  }
  std::int64_t stride = 1;
  for (d = t.rank - 1; d >= 0; --d) {
    t.strides[d] = stride;
    stride *= t.sizes[d];
  }
  return t;
}

Layout parse_layout(std::string_view op, std::string_view name) {
  if (name == "BSND") return Layout::kBSND;
  if (name == "TND") return Layout::kTND;
  if (name == "BNSD") return Layout::kBNSD;
  if (name == "NTD") return Layout::kNTD;
  check(false, op, ": layout: expected BSND, TND, BNSD or NTD, got ", name);
  return Layout::kBSND;
}

Activation parse_activation(std::string_view op, std::string_view name) {
  if (name.empty()) return Activation::kNone;
  if (name == "silu" || name == "swish") return Activation::kSilu;
  if (name == "sigmoid") return Activation::kSigmoid;
  check(false, op, ": activation: expected None, silu, swish or sigmoid, got ", name);
  return Activation::kNone;
}

Rounding parse_rounding(std::string_view op, std::string_view name, std::string_view argument) {
  if (name == "hf") return Rounding::kHf;
  if (name == "fp32") return Rounding::kFp32;
  check(false, op, ": ", argument, ": expected hf or fp32, got ", name);
  return Rounding::kHf;
}

namespace detail {

void append(std::string& out, std::string_view text) { out += text; }
void append(std::string& out, std::int64_t value) { out += std::to_string(value); }
void append(std::string& out, DType value) { out += dtype_name(value); }
void append(std::string& out, double value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  out.append(text, end);
}
void append(std::string& out, Shape value) {
  out += '[';
  for (int d = 0; d < value.tensor.rank; ++d) {
    out += (d > 0 ? ", " : "") + std::to_string(value.tensor.sizes[d]);
  }
  out += ']';
}

}  // namespace detail
}  // namespace tidegate
