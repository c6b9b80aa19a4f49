// Between dtypes and types: table indices, and one element at a time as double where speed does not matter.
#pragma once

#include <cstdint>

#include "simd/types.h"
#include "tidegate/tensor.h"

namespace tidegate {

// Index of a data type in a kernel table, see dispatch.h.
inline int data_type_index(DType dtype) { return static_cast<int>(dtype); }
static_assert(static_cast<int>(DType::kF32) == 0 && static_cast<int>(DType::kBF16) == 1 &&
              static_cast<int>(DType::kF16) == 2);

inline double read_element(const TensorView& t, std::int64_t offset) {
  switch (t.dtype) {
    case DType::kF32:
      return t.as<const float>()[offset];
    case DType::kBF16:
      return widen(t.as<const bf16>()[offset]);
    case DType::kF16:
      return widen(t.as<const f16>()[offset]);
    case DType::kF64:
      return t.as<const double>()[offset];
    case DType::kI32:
      return t.as<const std::int32_t>()[offset];
    case DType::kI64:
      return static_cast<double>(t.as<const std::int64_t>()[offset]);
    case DType::kI8:
    case DType::kBool:
      return t.as<const std::int8_t>()[offset];
  }
  return 0.0;
}

inline void write_element(const TensorView& t, std::int64_t offset, double value) {
  switch (t.dtype) {
    case DType::kF32:
      t.as<float>()[offset] = static_cast<float>(value);
      return;
    case DType::kBF16:
      t.as<bf16>()[offset] = narrow_bf16(static_cast<float>(value));
      return;
    case DType::kF16:
      t.as<f16>()[offset] = narrow_f16(static_cast<float>(value));
      return;
    case DType::kF64:
      t.as<double>()[offset] = value;
      return;
    case DType::kI32:
      t.as<std::int32_t>()[offset] = static_cast<std::int32_t>(value);
      return;
    case DType::kI64:
      t.as<std::int64_t>()[offset] = static_cast<std::int64_t>(value);
      return;
    case DType::kI8:
    case DType::kBool:
      t.as<std::int8_t>()[offset] = static_cast<std::int8_t>(value);
      return;
  }
}

// Offset of an index list in a view.
template <class... Index>
std::int64_t offset_of(const TensorView& t, Index... index) {
  std::int64_t offset = 0;
  int d = 0;
  ((offset += static_cast<std::int64_t>(index) * t.strides[d++]), ...);
  return offset;
}

// A small parameter tensor (rank 1, any float type) as dense fp32.
inline void copy_parameter(const TensorView& t, float* out) {
  for (std::int64_t i = 0; i < t.sizes[0]; ++i) {
    out[i] = static_cast<float>(read_element(t, i * t.strides[0]));
  }
}

}  // namespace tidegate
