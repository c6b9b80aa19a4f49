// partial_rope_fwd, _bwd and mrope_cos_sin: checks, partition, dispatch.
#include <algorithm>
#include <cmath>

#include "base/float_environment.h"
#include "base/row_checks.h"
#include "ops/partial_rope/kernel.h"
#include "ops/partial_rope/reference.h"
#include "tidegate/cpu.h"
#include "tidegate/rope.h"

namespace tidegate {
namespace {

using namespace partial_rope;

bool same_memory(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.rank == b.rank && std::equal(a.strides, a.strides + a.rank, b.strides);
}

void rope(std::string_view op, std::string_view in, std::string_view out, const TensorView& x, const TensorView& cos,
          const TensorView& sin, const TensorView& y, const PartialRopeOptions& options, bool transpose) {
  const FloatEnvironment environment;
  const bool batch = has_batch(options.layout);
  check_rank(op, {in, x}, batch ? 4 : 3);
  check_data_type(op, {in, x});
  check_inner_stride(op, {in, x});
  check_row_tensor(op, {out, y}, {in, x});
  const std::int64_t rows = batch ? x.size(0) : 1;
  const std::int64_t tokens = x.size(is_head_major(options.layout) ? -2 : -3);
  const std::int64_t heads = x.size(is_head_major(options.layout) ? -3 : -2);
  check_present(op, {"cos", cos});
  check(cos.rank == 2 || (batch && cos.rank == 3), op, ": cos: expected [T, R]", batch ? " or [B, T, R]" : "", ", got ",
        Shape{cos});
  const std::int64_t R = cos.size(-1);
  check(R >= 2 && R % 2 == 0 && R <= x.size(-1), op, ": cos: expected an even R from 2 to ", x.size(-1), ", got ", R);
  if (cos.rank == 3) {
    check_shape(op, {"cos", cos}, {rows, tokens, R});
  } else {
    check_shape(op, {"cos", cos}, {tokens, R});
  }
  check_same_shape(op, {"sin", sin}, {"cos", cos});
  check_data_type(op, {"cos", cos});
  check_same_dtype(op, {"sin", sin}, {"cos", cos});
  check_inner_stride(op, {"cos", cos});
  check_inner_stride(op, {"sin", sin});
  if (options.rounding == Rounding::kHf || x.dtype == DType::kF64) {
    check_same_dtype(op, {"cos", cos}, {in, x});
  } else {
    check(cos.dtype == x.dtype || cos.dtype == DType::kF32, op, ": cos: expected dtype ", x.dtype, " (as ", in,
          ") or float32, got dtype ", cos.dtype);
  }
  if (same_memory(x, y)) {
    check_outputs(op, {{out, y}}, {{"cos", cos}, {"sin", sin}});
  } else {
    check_outputs(op, {{out, y}}, {{in, x}, {"cos", cos}, {"sin", sin}});
  }
  if (x.dtype == DType::kF64) {
    reference<double>(x, cos, sin, y, options.layout, transpose);
    return;
  }
  Args args{};
  args.x = rows_of(x);
  args.y = rows_of(y);
  args.cos = cos.data;
  args.sin = sin.data;
  args.cos_row = cos.rank == 3 ? cos.stride(0) : 0;
  args.sin_row = sin.rank == 3 ? sin.stride(0) : 0;
  args.cos_token = cos.stride(-2);
  args.sin_token = sin.stride(-2);
  args.per_token = is_head_major(options.layout) ? 1 : std::max<std::int64_t>(heads, 1);
  args.tokens = std::max<std::int64_t>(tokens, 1);
  args.per_row = std::max<std::int64_t>(heads * tokens, 1);
  args.width = x.size(-1);
  args.rotary = R;
  args.transpose = transpose;
  args.hf = options.rounding == Rounding::kHf;
  args.copy = !same_memory(x, y);
  const auto run = partial_rope_kernels_for(active_isa()).run[data_type_index(x.dtype)][data_type_index(cos.dtype)];
  for_row_tasks(row_count(x), args.width,
                [&](std::int64_t first, std::int64_t last, std::int64_t) { run(args, first, last); });
}

}  // namespace

void partial_rope_fwd(const TensorView& x, const TensorView& cos, const TensorView& sin, const TensorView& y,
                      const PartialRopeOptions& options) {
  rope("partial_rope_fwd", "x", "y", x, cos, sin, y, options, false);
}

void partial_rope_bwd(const TensorView& dy, const TensorView& cos, const TensorView& sin, const TensorView& dx,
                      const PartialRopeOptions& options) {
  rope("partial_rope_bwd", "dy", "dx", dy, cos, sin, dx, options, true);
}

void mrope_cos_sin(const TensorView& position_ids, const TensorView& inv_freq, const std::int64_t section[3],
                   double scaling, const TensorView& cos, const TensorView& sin) {
  constexpr std::string_view op = "mrope_cos_sin";
  const FloatEnvironment environment;
  check_present(op, {"position_ids", position_ids});
  const bool axes = position_ids.rank == 3;
  check(position_ids.rank == 2 || (axes && position_ids.size(0) == 3), op,
        ": position_ids: expected [B, T] or [3, B, T], got ", Shape{position_ids});
  check(position_ids.dtype == DType::kI64 || position_ids.dtype == DType::kI32, op,
        ": position_ids: expected dtype int64 or int32, got dtype ", position_ids.dtype);
  check_rank(op, {"inv_freq", inv_freq}, 1);
  check_dtype(op, {"inv_freq", inv_freq}, DType::kF32);
  for (int i = 0; i < 3; ++i) {
    check(section[i] >= 0, op, ": section[", i, "]: expected >= 0, got ", section[i]);
  }
  const std::int64_t half = inv_freq.size(0);
  const std::int64_t B = position_ids.size(-2);
  const std::int64_t T = position_ids.size(-1);
  check_shape(op, {"cos", cos}, {B, T, 2 * half});
  check_shape(op, {"sin", sin}, {B, T, 2 * half});
  check_data_type(op, {"cos", cos});
  check_same_dtype(op, {"sin", sin}, {"cos", cos});
  check_outputs(op, {{"cos", cos}, {"sin", sin}}, {{"position_ids", position_ids}, {"inv_freq", inv_freq}});
  parallel_for(B * T, [&](std::int64_t token) {
    const std::int64_t b = token / T;
    const std::int64_t t = token % T;
    for (std::int64_t i = 0; i < half; ++i) {
      std::int64_t axis = i % 3;
      if (axis != 0 && i / 3 >= section[axis]) {
        axis = 0;
      }
      const std::int64_t at =
          (axes ? axis * position_ids.stride(0) : 0) + b * position_ids.stride(-2) + t * position_ids.stride(-1);
      // The angle is an fp32 product, as the models compute it: an fp64 angle differs by 7e-5 at position 3000.
      const float angle = static_cast<float>(read_element(position_ids, at)) *
                          static_cast<float>(read_element(inv_freq, i * inv_freq.strides[0]));
      const float c = std::cos(angle) * static_cast<float>(scaling);
      const float s = std::sin(angle) * static_cast<float>(scaling);
      for (const std::int64_t k : {i, half + i}) {
        write_element(cos, offset_of(cos, b, t, k), c);
        write_element(sin, offset_of(sin, b, t, k), s);
      }
    }
  });
}

}  // namespace tidegate
