// gdn_gating_fwd and _bwd: checks, partition, dispatch.
#include <cmath>
#include <cstring>

#include "base/arena.h"
#include "base/checks.h"
#include "base/element.h"
#include "base/float_environment.h"
#include "base/row_checks.h"
#include "ops/gdn_gating/kernel.h"
#include "ops/gdn_gating/problem.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {
namespace {

using namespace gdn_gating;

Problem check_inputs(std::string_view op, const TensorView& a, const TensorView& b, const TensorView& A_log,
                     const TensorView& dt_bias, const GdnGatingOptions& options) {
  check_rank(op, {"a", a}, has_batch(options.layout) ? 3 : 2);
  check_data_type(op, {"a", a});
  check_inner_stride(op, {"a", a});
  check_same_shape(op, {"b", b}, {"a", a});
  check_same_dtype(op, {"b", b}, {"a", a});
  check_inner_stride(op, {"b", b});
  Problem p{};
  p.head_major = is_head_major(options.layout);
  p.rows = has_batch(options.layout) ? a.size(0) : 1;
  p.tokens = a.size(p.head_major ? -1 : -2);
  p.heads = a.size(p.head_major ? -2 : -1);
  check_shape(op, {"A_log", A_log}, {p.heads});
  check_float(op, {"A_log", A_log});
  if (dt_bias.defined()) {
    check_shape(op, {"dt_bias", dt_bias}, {p.heads});
    check_float(op, {"dt_bias", dt_bias});
  }
  check(std::isfinite(options.beta_scale), op, ": beta_scale: expected a finite number, got ", options.beta_scale);
  return p;
}

// A tensor in gate layout. fp64 goes with fp64 inputs and only with them.
void check_gate(std::string_view op, std::string_view name, const TensorView& t, const TensorView& a, bool fp32_only) {
  check_same_shape(op, {name, t}, {"a", a});
  check_data_type(op, {name, t});
  const bool wide = a.dtype == DType::kF64;
  if (fp32_only || wide || t.dtype == DType::kF64) {
    check_dtype(op, {name, t}, wide ? DType::kF64 : DType::kF32);
  }
  check_inner_stride(op, {name, t});
}

void check_sum(std::string_view op, std::string_view name, const TensorView& t, const TensorView& a,
               std::int64_t heads) {
  if (t.defined()) {
    check_shape(op, {name, t}, {heads});
    check_dtype(op, {name, t}, a.dtype == DType::kF64 ? DType::kF64 : DType::kF32);
  }
}

Args make_args(const Problem& p, const TensorView& a, const TensorView& b, const TensorView& A_log,
               const TensorView& dt_bias, const GdnGatingOptions& options, Scratch& scratch) {
  Args args{};
  args.a = rows_of(a);
  args.b = rows_of(b);
  args.heads = p.heads;
  args.width = a.size(-1);
  args.head_major = p.head_major;
  args.beta_scale = static_cast<float>(options.beta_scale);
  args.finite_rates = true;
  float* rate = scratch.floats(p.heads);
  float* bias = scratch.floats(p.heads);
  std::memset(bias, 0, static_cast<std::size_t>(p.heads) * sizeof(float));
  for (std::int64_t h = 0; h < p.heads; ++h) {  // in double: one rounding, and exp(89) is still inf in fp32
    rate[h] = static_cast<float>(std::exp(read_element(A_log, h * A_log.strides[0])));
    args.finite_rates &= !std::isinf(rate[h]);
  }
  if (dt_bias.defined()) {
    copy_parameter(dt_bias, bias);
  }
  args.rate = rate;
  args.dt_bias = bias;
  return args;
}

}  // namespace

void gdn_gating_fwd(const TensorView& a, const TensorView& b, const TensorView& A_log, const TensorView& dt_bias,
                    const TensorView& g, const TensorView& beta, const GdnGatingOptions& options) {
  constexpr std::string_view op = "gdn_gating_fwd";
  const FloatEnvironment environment;
  const Problem p = check_inputs(op, a, b, A_log, dt_bias, options);
  check_gate(op, "g", g, a, true);
  check_gate(op, "beta", beta, a, false);
  check_outputs(op, {{"g", g}, {"beta", beta}}, {{"a", a}, {"b", b}, {"A_log", A_log}, {"dt_bias", dt_bias}});
  if (a.dtype == DType::kF64) {
    reference_fwd<double>(p, a, b, A_log, dt_bias, g, beta, options.beta_scale);
    return;
  }
  Scratch scratch;
  Args args = make_args(p, a, b, A_log, dt_bias, options, scratch);
  args.g = rows_of(g);
  args.beta = rows_of(beta);
  args.stream = should_stream_rows(g) && should_stream_rows(beta, 0);
  const auto run = gdn_gating_kernels_for(active_isa()).fwd[data_type_index(a.dtype)][data_type_index(beta.dtype)];
  const std::int64_t rows = row_count(a);
  const std::int64_t step = rows_per_task(args.width);
  parallel_for(task_count(rows, step),
               [&](std::int64_t task) { run(args, task * step, std::min((task + 1) * step, rows)); });
}

void gdn_gating_bwd(const TensorView& dg, const TensorView& dbeta, const TensorView& a, const TensorView& b,
                    const TensorView& A_log, const TensorView& dt_bias, const TensorView& da, const TensorView& db,
                    const TensorView& dA_log, const TensorView& ddt_bias, const GdnGatingOptions& options) {
  constexpr std::string_view op = "gdn_gating_bwd";
  const FloatEnvironment environment;
  const Problem p = check_inputs(op, a, b, A_log, dt_bias, options);
  check_gate(op, "dg", dg, a, true);
  check_gate(op, "dbeta", dbeta, a, false);
  for (const auto& [name, t] : {Named{"da", da}, Named{"db", db}}) {
    if (t.defined()) {
      check_same_shape(op, {name, t}, {"a", a});
      check_same_dtype(op, {name, t}, {"a", a});
      check_inner_stride(op, {name, t});
    }
  }
  check_sum(op, "dA_log", dA_log, a, p.heads);
  check_sum(op, "ddt_bias", ddt_bias, a, p.heads);
  check_outputs(op, {{"da", da}, {"db", db}, {"dA_log", dA_log}, {"ddt_bias", ddt_bias}},
                {{"dg", dg}, {"dbeta", dbeta}, {"a", a}, {"b", b}, {"A_log", A_log}, {"dt_bias", dt_bias}});

  // Every task adds up its rows; the tasks are added in their order, so the sum does not depend on threads.
  Scratch scratch;
  const std::int64_t rows = row_count(a);
  const std::int64_t step = p.head_major ? 1 : std::max(rows_per_task(p.heads), kSumBlock);
  const bool reference = a.dtype == DType::kF64;
  const std::int64_t tasks = reference ? 1 : task_count(rows, step);
  const std::int64_t columns = p.head_major && !reference ? 1 : p.heads;
  const std::int64_t width = 2 * columns;
  auto* partial = static_cast<double*>(scratch.bytes(static_cast<std::size_t>(tasks * width) * sizeof(double)));
  std::memset(partial, 0, static_cast<std::size_t>(tasks * width) * sizeof(double));
  if (reference) {
    reference_bwd<double>(p, dg, dbeta, a, b, A_log, dt_bias, da, db, partial, options.beta_scale);
  } else {
    Args args = make_args(p, a, b, A_log, dt_bias, options, scratch);
    args.g = rows_of(dg);
    args.beta = rows_of(dbeta);
    args.da = rows_of(da);
    args.db = rows_of(db);
    const auto run = gdn_gating_kernels_for(active_isa()).bwd[data_type_index(a.dtype)][data_type_index(dbeta.dtype)];
    parallel_for(tasks, [&](std::int64_t task) {
      run(args, task * step, std::min((task + 1) * step, rows), partial + task * width);
    });
  }
  for (std::int64_t h = 0; h < p.heads; ++h) {
    double rate_sum = 0.0;
    double bias_sum = 0.0;
    // Head-major tasks are (batch row, head): those of one head lie `heads` apart.
    for (std::int64_t task = columns == 1 ? h : 0; task < tasks; task += columns == 1 ? p.heads : 1) {
      rate_sum += partial[task * width + h % columns];
      bias_sum += partial[task * width + columns + h % columns];
    }
    if (dA_log.defined()) {
      write_element(dA_log, h * dA_log.strides[0], rate_sum);
    }
    if (ddt_bias.defined()) {
      write_element(ddt_bias, h * ddt_bias.strides[0], bias_sum);
    }
  }
}

}  // namespace tidegate
