// quantize: checks, partition, dispatch.
#include <utility>

#include "base/checks.h"
#include "base/element.h"
#include "base/float_environment.h"
#include "base/row_views.h"
#include "ops/quantize/kernel.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"
#include "tidegate/quant.h"

namespace tidegate {
namespace {

using namespace quantize_int8;

// The dimension that stands last once `axis` has been taken out.
TensorView without(TensorView t, int axis) {
  for (int d = axis; d + 1 < t.rank; ++d) {
    t.sizes[d] = t.sizes[d + 1];
    t.strides[d] = t.strides[d + 1];
  }
  t.rank -= 1;
  return t;
}

TensorView exchanged(TensorView t, int a, int b) {
  std::swap(t.sizes[a], t.sizes[b]);
  std::swap(t.strides[a], t.strides[b]);
  return t;
}

bool steps_by_one(const TensorView& t, int d) { return t.sizes[d] <= 1 || t.strides[d] == 1; }

// Each dimension of [first, rank) is walked by its own stride: where element number i of the others stands.
std::int64_t place(const TensorView& t, int dimensions, std::int64_t i) {
  std::int64_t at = 0;
  for (int d = dimensions - 1; d >= 0; --d) {
    at += i % t.sizes[d] * t.strides[d];
    i /= t.sizes[d];
  }
  return at;
}

const void* element(const TensorView& t, std::int64_t at) {
  return static_cast<const char*>(t.data) + at * dtype_bytes(t.dtype);
}

// The last dimension has the common scale, and its elements are neighbours.
void quantize_rows(const TensorView& x, const TensorView& q, const TensorView& scale) {
  const std::int64_t width = x.size(-1);
  const std::int64_t rows = scale.numel();
  const std::int64_t step = rows_per_task(width);
  const auto run = quantize_kernels_for(active_isa()).row[data_type_index(x.dtype)];
  parallel_for(task_count(rows, step), [&](std::int64_t task) {
    for (std::int64_t r = task * step; r < std::min(rows, (task + 1) * step); ++r) {
      scale.as<float>()[place(scale, scale.rank, r)] =
          run(element(x, place(x, x.rank - 1, r)), width, q.as<std::int8_t>() + place(q, q.rank - 1, r));
    }
  });
}

// The last but one has it; elements of the last dimension are neighbours.
void quantize_columns(const TensorView& x, const TensorView& q, const TensorView& scale) {
  constexpr std::int64_t kBlock = 64;  // columns of a task: a line of the caches in the narrowest type
  const std::int64_t n = x.size(-1);
  const std::int64_t blocks = (n + kBlock - 1) / kBlock;
  const std::int64_t matrices = n == 0 ? 0 : scale.numel() / n;
  const auto run = quantize_kernels_for(active_isa()).columns[data_type_index(x.dtype)];
  parallel_for(matrices * blocks, [&](std::int64_t task) {
    const std::int64_t m = task / blocks;
    const std::int64_t first = task % blocks * kBlock;
    const Columns c{element(x, place(x, x.rank - 2, m)),
                    q.as<std::int8_t>() + place(q, q.rank - 2, m),
                    x.stride(-2),
                    q.stride(-2),
                    x.size(-2),
                    scale.as<float>() + place(scale, scale.rank - 1, m),
                    scale.stride(-1)};
    run(c, first, std::min(n, first + kBlock));
  });
}

}  // namespace

void quantize(const TensorView& x, const TensorView& q, const TensorView& scale, int axis) {
  constexpr std::string_view op = "quantize";
  const FloatEnvironment environment;
  check_present(op, {"x", x});
  check(x.rank >= 1, op, ": x: expected at least 1 dimension, got 0");
  check_kernel_type(op, {"x", x});
  const int d = axis < 0 ? x.rank + axis : axis;
  check(d == x.rank - 1 || (d == x.rank - 2 && d >= 0), op, ": axis: expected one of the last two dimensions, got ",
        axis);
  check_same_shape(op, {"q", q}, {"x", x});
  check_dtype(op, {"q", q}, DType::kI8);
  const TensorView leading = without(x, d);
  check_same_shape(op, {"scale", scale}, {"x without axis", leading});
  check_dtype(op, {"scale", scale}, DType::kF32);
  check_outputs(op, {{"q", q}, {"scale", scale}}, {{"x", x}});
  const int other = x.rank == 1 ? 0 : 2 * x.rank - 3 - d;  // of the last two dimensions, the one without a common scale
  const bool rows = steps_by_one(x, d) && steps_by_one(q, d);
  check(rows || (steps_by_one(x, other) && steps_by_one(q, other)) || x.numel() == 0, op,
        ": q: expected stride 1 where x has it, in one of the last two dimensions, got ", q.stride(-1));
  if (scale.numel() == 0) {
    return;
  }
  if (rows) {
    quantize_rows(d == x.rank - 1 ? x : exchanged(x, d, other), d == x.rank - 1 ? q : exchanged(q, d, other), scale);
  } else {
    quantize_columns(d == x.rank - 1 ? exchanged(x, d, other) : x, d == x.rank - 1 ? exchanged(q, d, other) : q, scale);
  }
}

}  // namespace tidegate
