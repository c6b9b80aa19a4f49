// rms_norm_gated_fwd and _bwd: checks, partition, dispatch.
#include <algorithm>
#include <cstring>

#include "base/arena.h"
#include "base/float_environment.h"
#include "base/row_checks.h"
#include "ops/rms_norm_gated/kernel.h"
#include "ops/rms_norm_gated/reference.h"
#include "tidegate/cpu.h"

namespace tidegate {
namespace {

using namespace rms_norm_gated;

void check_inputs(std::string_view op, const TensorView& x, const TensorView& z, const TensorView& weight,
                  const TensorView& rstd, const RmsNormGatedOptions& options) {
  check_row_input(op, {"x", x});
  check_row_tensor(op, {"z", z}, {"x", x});
  check_weight(op, weight, x.size(-1));
  check_rstd(op, rstd, {"x", x});
  check_eps(op, options.eps);
  check(options.activation != Activation::kNone, op, ": activation: expected silu, swish or sigmoid, got None");
}

float* dense_weight(const TensorView& weight, std::int64_t width, Scratch& scratch) {
  float* dense = scratch.floats(width);
  std::fill(dense, dense + width, 1.0f);
  if (weight.defined()) {
    copy_parameter(weight, dense);
  }
  return dense;
}

}  // namespace

void rms_norm_gated_fwd(const TensorView& x, const TensorView& z, const TensorView& weight, const TensorView& y,
                        const TensorView& rstd, const RmsNormGatedOptions& options) {
  constexpr std::string_view op = "rms_norm_gated_fwd";
  const FloatEnvironment environment;
  check_inputs(op, x, z, weight, rstd, options);
  check_row_tensor(op, {"y", y}, {"x", x});
  check_outputs(op, {{"y", y}, {"rstd", rstd}}, {{"x", x}, {"z", z}, {"weight", weight}});
  if (x.dtype == DType::kF64) {
    reference_fwd<double>(x, z, weight, y, rstd, options);
    return;
  }
  Scratch scratch;
  Args args{};
  args.x = rows_of(x);
  args.z = rows_of(z);
  args.y = rows_of(y);
  args.rstd = rows_of(rstd, rstd.rank);
  args.width = x.size(-1);
  float* dense = dense_weight(weight, args.width, scratch);
  args.weight = dense;
  args.eps = static_cast<float>(options.eps);
  args.sigmoid = options.activation == Activation::kSigmoid;
  args.hf = options.rounding == Rounding::kHf;
  args.round_product = rounds_product(x.dtype, weight);
  args.stream = should_stream_rows(y);
  const Kernels& kernels = rms_norm_gated_kernels_for(active_isa());
  const auto run = kernels.fwd[data_type_index(x.dtype)];
  kernels.pack[data_type_index(x.dtype)](dense, args.width);
  for_row_tasks(row_count(x), args.width,
                [&](std::int64_t first, std::int64_t last, std::int64_t) { run(args, first, last); });
}

void rms_norm_gated_bwd(const TensorView& dy, const TensorView& x, const TensorView& z, const TensorView& weight,
                        const TensorView& rstd, const TensorView& dx, const TensorView& dz, const TensorView& dweight,
                        const RmsNormGatedOptions& options) {
  constexpr std::string_view op = "rms_norm_gated_bwd";
  const FloatEnvironment environment;
  check_inputs(op, x, z, weight, rstd, options);
  check_row_tensor(op, {"dy", dy}, {"x", x});
  for (const auto& [name, t] : {Named{"dx", dx}, Named{"dz", dz}}) {
    if (t.defined()) {
      check_row_tensor(op, {name, t}, {"x", x});
    }
  }
  if (dweight.defined()) {
    check_shape(op, {"dweight", dweight}, {x.size(-1)});
    check_dtype(op, {"dweight", dweight}, x.dtype == DType::kF64 ? DType::kF64 : DType::kF32);
  }
  check_outputs(op, {{"dx", dx}, {"dz", dz}, {"dweight", dweight}},
                {{"dy", dy}, {"x", x}, {"z", z}, {"weight", weight}, {"rstd", rstd}});
  if (x.dtype == DType::kF64) {
    reference_bwd<double>(dy, x, z, weight, rstd, dx, dz, dweight, options);
    return;
  }
  Scratch scratch;
  Args args{};
  args.x = rows_of(x);
  args.z = rows_of(z);
  args.y = rows_of(dy);
  args.rstd = rows_of(rstd, rstd.rank);
  args.dx = rows_of(dx);
  args.dz = rows_of(dz);
  args.width = x.size(-1);
  args.weight = dense_weight(weight, args.width, scratch);
  args.sigmoid = options.activation == Activation::kSigmoid;
  args.want_dweight = dweight.defined();
  const std::int64_t rows = row_count(x);
  const std::int64_t tasks = task_count(rows, rows_per_task(args.width));
  float* work = scratch.floats(tasks * 2 * args.width);
  const auto bytes = static_cast<std::size_t>(tasks * args.width) * sizeof(double);
  auto* sums = static_cast<double*>(scratch.bytes(bytes));
  std::memset(sums, 0, bytes);
  const auto run = rms_norm_gated_kernels_for(active_isa()).bwd[data_type_index(x.dtype)];
  for_row_tasks(rows, args.width, [&](std::int64_t first, std::int64_t last, std::int64_t task) {
    run(args, first, last, work + task * 2 * args.width, sums + task * args.width);
  });
  if (dweight.defined()) {
    write_weight_sum(dweight, sums, tasks, args.width);
  }
}

}  // namespace tidegate
