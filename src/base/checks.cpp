#include "base/checks.h"

#include <algorithm>
#include <cstdlib>
#include <string>

namespace tidegate {
namespace {

struct Range {
  std::int64_t begin;
  std::int64_t end;
};

// Bytes from the lowest to past the highest element.
Range byte_range(const TensorView& t) {
  const std::int64_t bytes = dtype_bytes(t.dtype);
  std::int64_t low = 0;
  std::int64_t high = 0;
  for (int d = 0; d < t.rank; ++d) {
    const std::int64_t reach = (t.sizes[d] - 1) * t.strides[d];
    (reach < 0 ? low : high) += reach;
  }
  const auto base = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(t.data));
  return {base + low * bytes, base + (high + 1) * bytes};
}

// Seen as rows `pitch` bytes apart, a view lies in the first so many bytes of each row, counted from its lowest byte.
std::int64_t width_in(const TensorView& t, std::int64_t pitch) {
  const std::int64_t bytes = dtype_bytes(t.dtype);
  std::int64_t width = bytes;
  for (int d = 0; d < t.rank; ++d) {
    if (t.sizes[d] == 1) {
      continue;
    }
    const std::int64_t step = std::abs(t.strides[d]) * bytes;
    if (step % pitch != 0) {
      width += (t.sizes[d] - 1) * step;
    }
  }
  return width;
}

// True if some stride of a is a pitch at which the columns of a and b do not meet.
bool columns_apart(const TensorView& a, const TensorView& b) {
  const std::int64_t bytes = dtype_bytes(a.dtype);
  for (int d = 0; d < a.rank; ++d) {
    const std::int64_t pitch = std::abs(a.strides[d]) * bytes;
    if (a.sizes[d] <= 1 || pitch <= bytes) {
      continue;
    }
    const std::int64_t distance = byte_range(b).begin - byte_range(a).begin;
    const std::int64_t shift = ((distance % pitch) + pitch) % pitch;  // where b's columns start after a's
    if (shift >= width_in(a, pitch) && shift + width_in(b, pitch) <= pitch) {
      return true;
    }
  }
  return false;
}

// The dimension whose step is no longer than what the dimensions with smaller strides cover; -1 if there is none.
int repeating_dimension(const TensorView& t) {
  for (int d = 0; d < t.rank; ++d) {
    const std::int64_t step = std::abs(t.strides[d]);
    std::int64_t reach = 0;
    for (int e = 0; e < t.rank; ++e) {
      const std::int64_t inner = std::abs(t.strides[e]);
      if (inner < step || (inner == step && e < d)) {
        reach += (t.sizes[e] - 1) * inner;
      }
    }
    if (t.sizes[d] > 1 && step <= reach) {
      return d;
    }
  }
  return -1;
}

}  // namespace

void check_data_type(std::string_view op, Named t) {
  check(is_float(t.tensor.dtype), op, ": ", t.name,
        ": expected dtype float32, bfloat16, float16 or float64, got dtype ", t.tensor.dtype);
}

void check_kernel_type(std::string_view op, Named t) {
  check(is_float(t.tensor.dtype) && t.tensor.dtype != DType::kF64, op, ": ", t.name,
        ": expected dtype float32, bfloat16 or float16, got dtype ", t.tensor.dtype);
}

void check_float(std::string_view op, Named t) { check_data_type(op, t); }

void check_dtype(std::string_view op, Named t, DType expected) {
  check(t.tensor.dtype == expected, op, ": ", t.name, ": expected dtype ", expected, ", got dtype ", t.tensor.dtype);
}

void check_same_dtype(std::string_view op, Named t, Named like) {
  check(t.tensor.dtype == like.tensor.dtype, op, ": ", t.name, ": expected dtype ", like.tensor.dtype, " (as ",
        like.name, "), got dtype ", t.tensor.dtype);
}

void check_present(std::string_view op, Named t) {
  check(t.tensor.defined(), op, ": ", t.name, ": expected a tensor, got none");
}

void check_rank(std::string_view op, Named t, int expected) {
  check_present(op, t);
  check(t.tensor.rank == expected, op, ": ", t.name, ": expected ", expected, " dimensions, got ", t.tensor.rank,
        " in ", Shape{t.tensor});
}

void check_shape(std::string_view op, Named t, std::initializer_list<std::int64_t> expected) {
  check_present(op, t);
  const bool same = t.tensor.rank == static_cast<int>(expected.size()) &&
                    std::equal(expected.begin(), expected.end(), t.tensor.sizes);
  if (!same) [[unlikely]] {
    const TensorView wanted = contiguous(nullptr, t.tensor.dtype, expected);
    check(false, op, ": ", t.name, ": expected shape ", Shape{wanted}, ", got ", Shape{t.tensor});
  }
}

void check_same_shape(std::string_view op, Named t, Named like) {
  check_present(op, t);
  const TensorView& a = t.tensor;
  const TensorView& b = like.tensor;
  check(a.rank == b.rank && std::equal(a.sizes, a.sizes + a.rank, b.sizes), op, ": ", t.name, ": expected shape ",
        Shape{b}, " (as ", like.name, "), got ", Shape{a});
}

void check_inner_stride(std::string_view op, Named t) {
  const TensorView& v = t.tensor;
  if (v.rank >= 1 && v.numel() != 0 && v.size(-1) > 1) {
    check(v.stride(-1) == 1, op, ": ", t.name, ": expected inner stride 1, got ", v.stride(-1));
  }
}

bool may_overlap(const TensorView& a, const TensorView& b) {
  if (!a.defined() || !b.defined() || a.numel() == 0 || b.numel() == 0) {
    return false;
  }
  const Range ra = byte_range(a);
  const Range rb = byte_range(b);
  return ra.begin < rb.end && rb.begin < ra.end && !columns_apart(a, b) && !columns_apart(b, a);
}

void check_outputs(std::string_view op, std::initializer_list<Named> outputs, std::initializer_list<Named> inputs) {
  for (auto out = outputs.begin(); out != outputs.end(); ++out) {
    const TensorView& t = out->tensor;
    if (const int d = repeating_dimension(t); d >= 0 && t.numel() != 0) {
      check(false, op, ": ", out->name, ": expected an output without repeated elements, got stride ", t.strides[d],
            " in dimension ", d);
    }
    for (const Named& in : inputs) {
      check(!may_overlap(t, in.tensor), op, ": ", out->name, ": expected memory of its own, got an overlap with ",
            in.name);
    }
    for (auto other = outputs.begin(); other != out; ++other) {
      check(!may_overlap(t, other->tensor), op, ": ", out->name, ": expected memory of its own, got an overlap with ",
            other->name);
    }
  }
}

}  // namespace tidegate
