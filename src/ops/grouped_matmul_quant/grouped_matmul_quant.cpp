// grouped_matmul_quant and grouped_matmul_swiglu_quant: checks, partition, dispatch.
#include "base/float_environment.h"
#include "ops/grouped_matmul/tasks.h"
#include "ops/grouped_matmul_quant/blocks.h"
#include "ops/quantize/kernel.h"
#include "tidegate/cpu.h"

namespace tidegate {
namespace quant_products {

Weights weights_of(const TensorView& weight, const TensorView& scale, WeightAxes axes) {
  const int n = axes == WeightAxes::kNK ? 1 : 2;
  const std::int64_t K = weight.sizes[3 - n];
  // A stride that is never taken counts as 1.
  return {weight.as<const std::int8_t>(),
          weight.sizes[n],
          K,
          weight.strides[0],
          weight.strides[n],
          K <= 1 ? 1 : weight.strides[3 - n],
          scale.as<const float>(),
          scale.strides[0]};
}

void check_weights(std::string_view op, Named weight, Named scale, std::int64_t G, std::int64_t N, std::int64_t K,
                   WeightAxes axes) {
  check_dtype(op, weight, DType::kI8);
  grouped_matmul::check_weight_shape(op, weight, G, N, K, axes);
  check_shape(op, scale, {G, N});
  check_dtype(op, scale, DType::kF32);
  check_inner_stride(op, scale);
  check(K <= kMaxWidth, op, ": ", weight.name, ": expected at most ", kMaxWidth, " products in a sum, got ", K);
}

Block block_of(const Weights& w, std::int64_t group, std::int64_t first, std::int64_t columns) {
  Block b{};
  b.width = w.K;
  b.weight = w.data + group * w.group + first * w.column;
  b.column = w.column;
  b.inner = w.inner;
  b.weight_scales = w.scales + group * w.scale_group + first;
  b.columns = columns;
  return b;
}

}  // namespace quant_products

namespace {

using namespace quant_products;

// The sizes of a call whose inputs have been checked.
struct Sizes {
  std::int64_t M, K, N, G;
};
Sizes check_inputs(std::string_view op, const GroupedQuantInputs& in, WeightAxes axes) {
  check_rank(op, {"x", in.x}, 2);
  check_dtype(op, {"x", in.x}, DType::kI8);
  check_inner_stride(op, {"x", in.x});
  check_rank(op, {"weight", in.weight}, 3);
  const Sizes s{in.x.sizes[0], in.x.sizes[1], in.weight.sizes[axes == WeightAxes::kNK ? 1 : 2], in.weight.sizes[0]};
  check_shape(op, {"x_scale", in.x_scale}, {s.M});
  check_dtype(op, {"x_scale", in.x_scale}, DType::kF32);
  check_inner_stride(op, {"x_scale", in.x_scale});
  check_weights(op, {"weight", in.weight}, {"weight_scale", in.weight_scale}, s.G, s.N, s.K, axes);
  check_shape(op, {"groups", in.groups}, {s.G});
  return s;
}

void set_rows(Block& b, const GroupedQuantInputs& in, const RowBlocks::Rows& rows, const Kernels& kernels,
              Scratch& scratch) {
  b.rows = reinterpret_cast<const std::int8_t* const*>(grouped_matmul::row_pointers(
      rows.count, scratch, [&](std::int64_t r) { return grouped_matmul::row_at(in.x, rows.first + r); }));
  b.row_scales = in.x_scale.as<const float>() + rows.first;
  b.row_count = rows.count;
  b.room = static_cast<char*>(scratch.bytes(static_cast<std::size_t>(kernels.room_bytes(rows.count, b.width))));
}

// Columns of a task: enough of them that packing the rows is a small share.
constexpr std::int64_t kTaskColumns = 256;

}  // namespace

void grouped_matmul_quant(const GroupedQuantInputs& in, const TensorView& y, const GroupedQuantOptions& options) {
  constexpr std::string_view op = "grouped_matmul_quant";
  const FloatEnvironment environment;
  const Sizes s = check_inputs(op, in, options.weight_axes);
  check_shape(op, {"y", y}, {s.M, s.N});
  check_kernel_type(op, {"y", y});
  check_inner_stride(op, {"y", y});
  check_outputs(op, {{"y", y}},
                {{"x", in.x},
                 {"x_scale", in.x_scale},
                 {"weight", in.weight},
                 {"weight_scale", in.weight_scale},
                 {"groups", in.groups}});
  Scratch scratch;
  const RowBlocks blocks(grouped_matmul::group_offsets(op, in.groups, s.M, options.group_list, scratch), s.G, scratch);
  const Weights w = weights_of(in.weight, in.weight_scale, options.weight_axes);
  const Kernels& kernels = grouped_matmul_quant_kernels_for(active_isa());
  const auto store = grouped_matmul_kernels_for(active_isa()).store;
  const std::int64_t parts = (s.N + kTaskColumns - 1) / kTaskColumns;
  parallel_for(blocks.count() * parts, [&](std::int64_t task) {
    const RowBlocks::Rows rows = blocks[task / parts];
    const std::int64_t first = task % parts * kTaskColumns;
    Scratch own;
    Block b = block_of(w, rows.group, first, std::min(kTaskColumns, s.N - first));
    set_rows(b, in, rows, kernels, own);
    b.pitch = kTaskColumns;
    b.out = own.floats(rows.count * b.pitch);
    kernels.product(b);
    store(b.out, b.pitch, rows.count, b.columns, nullptr,
          static_cast<char*>(y.data) + (rows.first * y.strides[0] + first) * dtype_bytes(y.dtype), y.strides[0],
          data_type_index(y.dtype));
  });
}

void grouped_matmul_swiglu_quant(const GroupedQuantInputs& in, const TensorView& smooth_scale, const TensorView& q,
                                 const TensorView& q_scale, const GroupedQuantOptions& options) {
  constexpr std::string_view op = "grouped_matmul_swiglu_quant";
  const FloatEnvironment environment;
  const Sizes s = check_inputs(op, in, options.weight_axes);
  check(s.N % 2 == 0, op, ": weight: expected an even number of rows (gate and up), got ", s.N);
  const std::int64_t I = s.N / 2;
  if (smooth_scale.defined()) {
    check_shape(op, {"smooth_scale", smooth_scale}, {s.G, I});
    check_dtype(op, {"smooth_scale", smooth_scale}, DType::kF32);
    check_inner_stride(op, {"smooth_scale", smooth_scale});
  }
  check_shape(op, {"q", q}, {s.M, I});
  check_dtype(op, {"q", q}, DType::kI8);
  check_inner_stride(op, {"q", q});
  check_shape(op, {"q_scale", q_scale}, {s.M});
  check_dtype(op, {"q_scale", q_scale}, DType::kF32);
  check_outputs(op, {{"q", q}, {"q_scale", q_scale}},
                {{"x", in.x},
                 {"x_scale", in.x_scale},
                 {"weight", in.weight},
                 {"weight_scale", in.weight_scale},
                 {"groups", in.groups},
                 {"smooth_scale", smooth_scale}});
  Scratch scratch;
  const RowBlocks blocks(grouped_matmul::group_offsets(op, in.groups, s.M, options.group_list, scratch), s.G, scratch);
  const Weights w = weights_of(in.weight, in.weight_scale, options.weight_axes);
  const Kernels& kernels = grouped_matmul_quant_kernels_for(active_isa());
  const auto quantize_row = quantize_kernels_for(active_isa()).row[data_type_index(DType::kF32)];
  parallel_for(blocks.count(), [&](std::int64_t task) {
    const RowBlocks::Rows rows = blocks[task];
    Scratch own;
    SwigluBlock b{block_of(w, rows.group, 0, I), I, nullptr};
    if (smooth_scale.defined()) {
      b.smooth = smooth_scale.as<const float>() + rows.group * smooth_scale.strides[0];
    }
    set_rows(b.gate, in, rows, kernels, own);
    b.gate.pitch = I;
    b.gate.out = own.floats(rows.count * I);
    kernels.swiglu(b);
    for (std::int64_t r = 0; r < rows.count; ++r) {
      const std::int64_t j = rows.first + r;
      q_scale.as<float>()[j * q_scale.strides[0]] =
          quantize_row(b.gate.out + r * I, I, q.as<std::int8_t>() + j * q.strides[0]);
    }
  });
}

}  // namespace tidegate
