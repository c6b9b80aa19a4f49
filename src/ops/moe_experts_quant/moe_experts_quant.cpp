// moe_experts_quant: checks, partition, dispatch.
#include "base/arena.h"
#include "base/element.h"
#include "base/expert_ids.h"
#include "base/float_environment.h"
#include "base/row_views.h"
#include "ops/grouped_matmul_quant/blocks.h"
#include "ops/moe_experts/kernel.h"
#include "ops/quantize/kernel.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {
namespace {

using quant_products::Block;
using quant_products::RowBlocks;
using quant_products::SwigluBlock;
using quant_products::Weights;
using quant_products::weights_of;

// Columns of a task of the second product. It holds their sums for all tokens.
constexpr std::int64_t kColumns = 128;

struct Sizes {
  std::int64_t T, H, I, E, k;
};

Sizes check_call(std::string_view op, const MoeExpertsQuantInputs& in, const TensorView& out, WeightAxes axes) {
  check_rank(op, {"x", in.x}, 2);
  check_kernel_type(op, {"x", in.x});
  check_inner_stride(op, {"x", in.x});
  check_rank(op, {"ids", in.ids}, 2);
  check_rank(op, {"down", in.down}, 3);
  const Sizes s{in.x.sizes[0], in.x.sizes[1], in.down.sizes[axes == WeightAxes::kNK ? 2 : 1], in.down.sizes[0],
                in.ids.sizes[1]};
  check_shape(op, {"ids", in.ids}, {s.T, s.k});
  check_shape(op, {"weights", in.weights}, {s.T, s.k});
  check_float(op, {"weights", in.weights});
  quant_products::check_weights(op, {"gate_up", in.gate_up}, {"gate_up_scale", in.gate_up_scale}, s.E, 2 * s.I, s.H,
                                axes);
  quant_products::check_weights(op, {"down", in.down}, {"down_scale", in.down_scale}, s.E, s.H, s.I, axes);
  check_shape(op, {"out", out}, {s.T, s.H});
  check_same_dtype(op, {"out", out}, {"x", in.x});
  check_inner_stride(op, {"out", out});
  check_outputs(op, {{"out", out}},
                {{"x", in.x},
                 {"ids", in.ids},
                 {"weights", in.weights},
                 {"gate_up", in.gate_up},
                 {"gate_up_scale", in.gate_up_scale},
                 {"down", in.down},
                 {"down_scale", in.down_scale}});
  return s;
}

// Rows of int8 with their scales.
struct Quantised {
  std::int8_t* data;
  float* scales;
  std::int64_t width;
  std::int8_t* row(std::int64_t r) const { return data + r * width; }
};
Quantised room_for(std::int64_t rows, std::int64_t width, Scratch& scratch) {
  const auto bytes = static_cast<std::size_t>(rows * width);
  return {static_cast<std::int8_t*>(scratch.bytes(bytes + 1)), scratch.floats(rows + 1), width};
}

// row(j): where row number j of the block's rows comes from.
template <class F>
void set_rows(Block& b, const Quantised& from, std::int64_t count, const quant_products::Kernels& kernels,
              Scratch& scratch, F row) {
  auto** rows = static_cast<const std::int8_t**>(scratch.bytes(static_cast<std::size_t>(count) * sizeof(void*)));
  float* scales = scratch.floats(count);
  for (std::int64_t j = 0; j < count; ++j) {
    rows[j] = from.row(row(j));
    scales[j] = from.scales[row(j)];
  }
  b.rows = rows;
  b.row_scales = scales;
  b.row_count = count;
  b.room = static_cast<char*>(scratch.bytes(static_cast<std::size_t>(kernels.room_bytes(count, b.width))));
}

}  // namespace

void moe_experts_quant(const MoeExpertsQuantInputs& in, const TensorView& out, const MoeExpertsQuantOptions& options) {
  constexpr std::string_view op = "moe_experts_quant";
  const FloatEnvironment environment;
  const Sizes s = check_call(op, in, out, options.weight_axes);
  Scratch scratch;
  const std::int32_t* ids = read_expert_ids(op, {"ids", in.ids}, s.E, options.ids_convention, scratch);
  const Routing routing = sort_pairs(ids, in.ids.numel(), s.E, scratch);
  float* place_weights = scratch.floats(routing.pairs + 1);
  for (std::int64_t j = 0; j < routing.routed(); ++j) {
    const std::int64_t pair = routing.src[j];
    place_weights[j] = static_cast<float>(read_element(in.weights, offset_of(in.weights, pair / s.k, pair % s.k)));
  }
  const RowBlocks blocks(routing.offsets, s.E, scratch);
  const Quantised tokens = room_for(s.T, s.H, scratch);
  const Quantised inner = room_for(routing.routed(), s.I, scratch);
  const auto& kernels = grouped_matmul_quant_kernels_for(active_isa());
  const auto& quantize_row = quantize_kernels_for(active_isa()).row;

  const std::int64_t step = rows_per_task(s.H);
  parallel_for(task_count(s.T, step), [&](std::int64_t task) {
    for (std::int64_t t = task * step; t < std::min(s.T, (task + 1) * step); ++t) {
      const char* row = static_cast<const char*>(in.x.data) + t * in.x.strides[0] * dtype_bytes(in.x.dtype);
      tokens.scales[t] = quantize_row[data_type_index(in.x.dtype)](row, s.H, tokens.row(t));
    }
  });

  // The hidden rows of a block meet every block of down's columns: they are packed once, where that is of use.
  const Weights down = weights_of(in.down, in.down_scale, options.weight_axes);
  auto* packed_begin =
      static_cast<std::int64_t*>(scratch.bytes(static_cast<std::size_t>(blocks.count() + 1) * sizeof(std::int64_t)));
  packed_begin[0] = 0;
  for (std::int64_t i = 0; i < blocks.count(); ++i) {
    packed_begin[i + 1] = packed_begin[i] + (down.inner == 1 ? kernels.packed_bytes(blocks[i].count, s.I) : 0);
  }
  auto* packed = static_cast<std::uint8_t*>(scratch.bytes(static_cast<std::size_t>(packed_begin[blocks.count()] + 1)));
  const auto packed_block = [&](std::int64_t i) -> std::uint8_t* {
    return packed_begin[i + 1] > packed_begin[i] ? packed + packed_begin[i] : nullptr;
  };

  const Weights gate_up = weights_of(in.gate_up, in.gate_up_scale, options.weight_axes);
  parallel_for(blocks.count(), [&](std::int64_t task) {
    const RowBlocks::Rows rows = blocks[task];
    Scratch own;
    SwigluBlock b{block_of(gate_up, rows.group, 0, s.I), s.I, nullptr};
    set_rows(b.gate, tokens, rows.count, kernels, own,
             [&](std::int64_t j) { return routing.src[rows.first + j] / s.k; });
    b.gate.pitch = s.I;
    b.gate.out = own.floats(rows.count * s.I);
    kernels.swiglu(b);
    for (std::int64_t j = 0; j < rows.count; ++j) {
      inner.scales[rows.first + j] =
          quantize_row[data_type_index(DType::kF32)](b.gate.out + j * s.I, s.I, inner.row(rows.first + j));
    }
    if (std::uint8_t* to = packed_block(task); to != nullptr) {
      const std::int8_t* list[quant_products::kBlockRows];
      for (std::int64_t j = 0; j < rows.count; ++j) {
        list[j] = inner.row(rows.first + j);
      }
      kernels.pack(list, rows.count, s.I, to);
    }
  });

  const int type = data_type_index(out.dtype);
  const auto& sums_kernels = moe_experts_kernels_for(active_isa());
  parallel_for((s.H + kColumns - 1) / kColumns, [&](std::int64_t task) {
    const std::int64_t first = task * kColumns;
    const std::int64_t columns = std::min(kColumns, s.H - first);
    Scratch task_room;
    float* sums = task_room.floats(s.T * kColumns + 1);
    std::fill_n(sums, s.T * kColumns, 0.0f);
    for (std::int64_t i = 0; i < blocks.count(); ++i) {
      const RowBlocks::Rows rows = blocks[i];
      Scratch own;
      Block b = block_of(down, rows.group, first, columns);
      set_rows(b, inner, rows.count, kernels, own, [&](std::int64_t j) { return rows.first + j; });
      b.packed = packed_block(i);
      b.pitch = kColumns;
      b.out = own.floats(rows.count * kColumns);
      kernels.product(b);
      sums_kernels.add[type]({b.out, kColumns, columns, rows.count, routing.src + rows.first, s.k, 0,
                              place_weights + rows.first, false, sums, kColumns});
    }
    sums_kernels.finish[type]({sums, kColumns, columns, s.T, nullptr, nullptr,
                               static_cast<char*>(out.data) + first * dtype_bytes(out.dtype), out.strides[0]});
  });
}

}  // namespace tidegate
