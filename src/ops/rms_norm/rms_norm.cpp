// rms_norm_fwd and _bwd (zero-centred): checks, partition, dispatch.
#include <cstring>

#include "base/arena.h"
#include "base/float_environment.h"
#include "base/row_checks.h"
#include "ops/rms_norm/kernel.h"
#include "ops/rms_norm/reference.h"
#include "tidegate/cpu.h"

namespace tidegate {
namespace {

using namespace rms_norm;

float* one_plus(const TensorView& weight, std::int64_t width, Scratch& scratch) {
  float* scale = scratch.floats(width);
  copy_parameter(weight, scale);
  for (std::int64_t c = 0; c < width; ++c) {
    scale[c] = 1.0f + scale[c];
  }
  return scale;
}

}  // namespace

void rms_norm_fwd(const TensorView& x, const TensorView& weight, const TensorView& y, const TensorView& rstd,
                  double eps) {
  constexpr std::string_view op = "rms_norm_fwd";
  const FloatEnvironment environment;
  check_row_input(op, {"x", x});
  check_present(op, {"weight", weight});
  check_weight(op, weight, x.size(-1));
  check_row_tensor(op, {"y", y}, {"x", x});
  check_rstd(op, rstd, {"x", x});
  check_eps(op, eps);
  check_outputs(op, {{"y", y}, {"rstd", rstd}}, {{"x", x}, {"weight", weight}});
  if (x.dtype == DType::kF64) {
    reference_fwd<double>(x, weight, y, rstd, eps);
    return;
  }
  Scratch scratch;
  Args args{};
  args.x = rows_of(x);
  args.y = rows_of(y);
  args.rstd = rows_of(rstd, rstd.rank);
  args.width = x.size(-1);
  float* scale = one_plus(weight, args.width, scratch);
  args.scale = scale;
  args.eps = static_cast<float>(eps);
  args.stream = should_stream_rows(y);
  const Kernels& kernels = rms_norm_kernels_for(active_isa());
  const auto run = kernels.fwd[data_type_index(x.dtype)];
  kernels.pack[data_type_index(x.dtype)](scale, args.width);
  for_row_tasks(row_count(x), args.width,
                [&](std::int64_t first, std::int64_t last, std::int64_t) { run(args, first, last); });
}

void rms_norm_bwd(const TensorView& dy, const TensorView& x, const TensorView& weight, const TensorView& rstd,
                  const TensorView& dx, const TensorView& dweight) {
  constexpr std::string_view op = "rms_norm_bwd";
  const FloatEnvironment environment;
  check_row_input(op, {"x", x});
  check_present(op, {"weight", weight});
  check_weight(op, weight, x.size(-1));
  check_row_tensor(op, {"dy", dy}, {"x", x});
  check_rstd(op, rstd, {"x", x});
  if (dx.defined()) {
    check_row_tensor(op, {"dx", dx}, {"x", x});
  }
  if (dweight.defined()) {
    check_shape(op, {"dweight", dweight}, {x.size(-1)});
    check_dtype(op, {"dweight", dweight}, x.dtype == DType::kF64 ? DType::kF64 : DType::kF32);
  }
  check_outputs(op, {{"dx", dx}, {"dweight", dweight}}, {{"dy", dy}, {"x", x}, {"weight", weight}, {"rstd", rstd}});
  if (x.dtype == DType::kF64) {
    reference_bwd<double>(dy, x, weight, rstd, dx, dweight);
    return;
  }
  Scratch scratch;
  Args args{};
  args.x = rows_of(x);
  args.y = rows_of(dy);
  args.rstd = rows_of(rstd, rstd.rank);
  args.dx = rows_of(dx);
  args.width = x.size(-1);
  args.scale = one_plus(weight, args.width, scratch);
  const std::int64_t rows = row_count(x);
  const std::int64_t tasks = task_count(rows, rows_per_task(args.width));
  float* work = nullptr;
  double* sums = nullptr;
  if (dweight.defined()) {
    const auto bytes = static_cast<std::size_t>(tasks * args.width) * sizeof(double);
    work = scratch.floats(tasks * args.width);
    sums = static_cast<double*>(scratch.bytes(bytes));
    std::memset(sums, 0, bytes);
  }
  const auto run = rms_norm_kernels_for(active_isa()).bwd[data_type_index(x.dtype)];
  for_row_tasks(rows, args.width, [&](std::int64_t first, std::int64_t last, std::int64_t task) {
    const std::int64_t at = task * args.width;
    run(args, first, last, work != nullptr ? work + at : nullptr, sums != nullptr ? sums + at : nullptr);
  });
  if (dweight.defined()) {
    write_weight_sum(dweight, sums, tasks, args.width);
  }
}

}  // namespace tidegate
