// l2norm_fwd and _bwd: checks, partition, dispatch.
#include "base/float_environment.h"
#include "base/row_checks.h"
#include "ops/l2norm/kernel.h"
#include "ops/l2norm/reference.h"
#include "tidegate/cpu.h"
#include "tidegate/norm.h"

namespace tidegate {

void l2norm_fwd(const TensorView& x, const TensorView& y, const TensorView& rstd, double eps) {
  constexpr std::string_view op = "l2norm_fwd";
  const FloatEnvironment environment;
  check_row_input(op, {"x", x});
  check_same_shape(op, {"y", y}, {"x", x});
  check_data_type(op, {"y", y});
  if (x.dtype == DType::kF64 || y.dtype == DType::kF64) {
    check_same_dtype(op, {"y", y}, {"x", x});
  }
  check_inner_stride(op, {"y", y});
  check_rstd(op, rstd, {"x", x});
  check_eps(op, eps);
  check_outputs(op, {{"y", y}, {"rstd", rstd}}, {{"x", x}});
  if (x.dtype == DType::kF64) {
    l2norm::reference_fwd<double>(x, y, rstd, eps);
    return;
  }
  const l2norm::Args args{rows_of(x), rows_of(y),           rows_of(rstd, rstd.rank),
                          Rows{},     x.size(-1),           static_cast<float>(eps),
                          false,      should_stream_rows(y)};
  const auto run = l2norm_kernels_for(active_isa()).fwd[data_type_index(x.dtype)][data_type_index(y.dtype)];
  for_row_tasks(row_count(x), args.width,
                [&](std::int64_t first, std::int64_t last, std::int64_t) { run(args, first, last); });
}

void l2norm_bwd(const TensorView& dy, const TensorView& x, const TensorView& rstd, const TensorView& dx,
                bool zero_row_safe) {
  constexpr std::string_view op = "l2norm_bwd";
  const FloatEnvironment environment;
  check_row_input(op, {"x", x});
  check_same_shape(op, {"dy", dy}, {"x", x});
  check_data_type(op, {"dy", dy});
  if (x.dtype == DType::kF64 || dy.dtype == DType::kF64) {
    check_same_dtype(op, {"dy", dy}, {"x", x});
  }
  check_inner_stride(op, {"dy", dy});
  check_rstd(op, rstd, {"x", x});
  check_row_tensor(op, {"dx", dx}, {"x", x});
  check_outputs(op, {{"dx", dx}}, {{"dy", dy}, {"x", x}, {"rstd", rstd}});
  if (x.dtype == DType::kF64) {
    l2norm::reference_bwd<double>(dy, x, rstd, dx, zero_row_safe);
    return;
  }
  const l2norm::Args args{rows_of(x),    rows_of(dy), rows_of(rstd, rstd.rank), rows_of(dx), x.size(-1), 0.0f,
                          zero_row_safe, false};
  const auto run = l2norm_kernels_for(active_isa()).bwd[data_type_index(x.dtype)][data_type_index(dy.dtype)];
  for_row_tasks(row_count(x), args.width,
                [&](std::int64_t first, std::int64_t last, std::int64_t) { run(args, first, last); });
}

}  // namespace tidegate
