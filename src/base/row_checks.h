// Checks and loops that the row norms share: tensors [..., D] of equal leading sizes, rstd of the leading shape.
#pragma once

#include <cmath>

#include "base/checks.h"
#include "base/element.h"
#include "base/row_views.h"
#include "tidegate/parallel.h"

namespace tidegate {

// The input that gives the shape: a data type, at least one dimension, inner stride 1.
inline void check_row_input(std::string_view op, Named x) {
  check_present(op, x);
  check(x.tensor.rank >= 1, op, ": ", x.name, ": expected at least 1 dimension, got 0");
  check_data_type(op, x);
  check_inner_stride(op, x);
}

// Another tensor of that shape and type.
inline void check_row_tensor(std::string_view op, Named t, Named x) {
  check_same_shape(op, t, x);
  check_same_dtype(op, t, x);
  check_inner_stride(op, t);
}

inline void check_rstd(std::string_view op, const TensorView& rstd, Named x) {
  check_present(op, {"rstd", rstd});
  TensorView leading = x.tensor;
  leading.rank -= 1;
  check(rstd.rank == leading.rank && std::equal(rstd.sizes, rstd.sizes + rstd.rank, leading.sizes), op,
        ": rstd: expected shape ", Shape{leading}, " (", x.name, " without its last dimension), got ", Shape{rstd});
  check_dtype(op, {"rstd", rstd}, x.tensor.dtype == DType::kF64 ? DType::kF64 : DType::kF32);
}

inline void check_weight(std::string_view op, const TensorView& weight, std::int64_t width) {
  if (weight.defined()) {
    check_shape(op, {"weight", weight}, {width});
    check_float(op, {"weight", weight});
  }
}

inline void check_eps(std::string_view op, double eps) {
  check(std::isfinite(eps) && eps >= 0.0, op, ": eps: expected a finite number >= 0, got ", eps);
}

// run(first, last, task) for the tasks of `rows` rows.
template <class F>
void for_row_tasks(std::int64_t rows, std::int64_t width, F run) {
  const std::int64_t step = rows_per_task(width);
  parallel_for(task_count(rows, step),
               [&](std::int64_t task) { run(task * step, std::min((task + 1) * step, rows), task); });
}

// Large, aligned outputs are written past the caches (see the convolution's partition.h for the reason of 16 MB).
inline bool should_stream_rows(const TensorView& y, std::int64_t more_than = std::int64_t{16} << 20) {
  const std::int64_t bytes = dtype_bytes(y.dtype);
  std::int64_t steps = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(y.data)) | (y.size(-1) * bytes);
  for (int d = 0; d + 1 < y.rank; ++d) {
    steps |= y.strides[d] * bytes;
  }
  return steps % 64 == 0 && y.numel() * bytes > more_than;
}

// dweight = the tasks' partial sums, added in their order.
inline void write_weight_sum(const TensorView& dweight, const double* partial, std::int64_t tasks, std::int64_t width) {
  for (std::int64_t c = 0; c < width; ++c) {
    double sum = 0.0;
    for (std::int64_t task = 0; task < tasks; ++task) {
      sum += partial[task * width + c];
    }
    write_element(dweight, c * dweight.strides[0], sum);
  }
}

}  // namespace tidegate
