// grouped_matmul_fwd and _bwd: checks, partition, dispatch.
#include <cstring>

#include "base/float_environment.h"
#include "ops/grouped_matmul/reference.h"
#include "ops/grouped_matmul/tasks.h"
#include "tidegate/cpu.h"

namespace tidegate {

WeightAxes parse_weight_axes(std::string_view op, std::string_view name) {
  if (name == "nk") return WeightAxes::kNK;
  if (name == "kn") return WeightAxes::kKN;
  check(false, op, ": weight_axes: expected nk or kn, got ", name);
  return WeightAxes::kNK;
}

GroupList parse_group_list(std::string_view op, std::string_view name) {
  if (name == "counts") return GroupList::kCounts;
  if (name == "cumsum") return GroupList::kCumsum;
  check(false, op, ": group_list: expected counts or cumsum, got ", name);
  return GroupList::kCounts;
}

namespace grouped_matmul {

std::int64_t* group_offsets(std::string_view op, const TensorView& groups, std::int64_t rows, GroupList kind,
                            Scratch& scratch) {
  check_rank(op, {"groups", groups}, 1);
  check(groups.dtype == DType::kI32 || groups.dtype == DType::kI64, op,
        ": groups: expected dtype int32 or int64, got dtype ", groups.dtype);
  const std::int64_t G = groups.sizes[0];
  auto* offsets = static_cast<std::int64_t*>(scratch.bytes(static_cast<std::size_t>(G + 1) * sizeof(std::int64_t)));
  offsets[0] = 0;
  for (std::int64_t g = 0; g < G; ++g) {
    const std::int64_t at = g * groups.strides[0];
    const std::int64_t value =
        groups.dtype == DType::kI32 ? groups.as<const std::int32_t>()[at] : groups.as<const std::int64_t>()[at];
    const std::int64_t least = kind == GroupList::kCounts ? 0 : offsets[g];
    const std::int64_t most = kind == GroupList::kCounts ? rows - offsets[g] : rows;
    check(value >= least, op, ": groups[", g, "]: expected >= ", least, ", got ", value);
    check(value <= most, op, ": groups[", g, "]: expected <= ", most, " (of ", rows, " rows), got ", value);
    offsets[g + 1] = kind == GroupList::kCounts ? offsets[g] + value : value;
  }
  return offsets;
}

// Whether matrices of rows `row` apart are larger than the caches and their rows whole cache lines.
bool should_stream(const Weights& w, std::int64_t width, std::int64_t row, std::int64_t groups) {
  const std::int64_t steps = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(w.data)) | width * w.bytes |
                             row * w.bytes | w.group * w.bytes;
  return steps % 64 == 0 && groups * w.N * w.K * w.bytes > (std::int64_t{16} << 20);
}

void outer_products(const OuterProducts& p, const Weights& out) {
  // The kernel writes along its right factor: that is the one whose stride is 1.
  const bool swapped = out.column != 1 && out.K != 1 && (out.row == 1 || out.N == 1);
  const std::int64_t lefts = swapped ? out.K : out.N;
  const std::int64_t rights = swapped ? out.N : out.K;
  const std::int64_t left_blocks = (lefts + kOuterLeft - 1) / kOuterLeft;
  const std::int64_t right_blocks = (rights + kOuterRight - 1) / kOuterRight;
  const bool stream = !p.accumulate && should_stream(out, rights, swapped ? out.column : out.row, p.groups);
  const Kernels& kernels = grouped_matmul_kernels_for(active_isa());
  parallel_for(p.groups * left_blocks * right_blocks, [&](std::int64_t task) {
    const std::int64_t g = task / (left_blocks * right_blocks);
    const std::int64_t m = lefts * (task / right_blocks % left_blocks) / left_blocks;
    const std::int64_t m_end = lefts * (task / right_blocks % left_blocks + 1) / left_blocks;
    const std::int64_t n = task % right_blocks * kOuterRight;
    const std::int64_t first = p.offsets[g];
    const std::int64_t rows = p.offsets[g + 1] - first;
    if (rows == 0 && p.accumulate) {
      return;
    }
    Scratch own;
    OuterBlock b{};
    b.left = (swapped ? p.right : p.left) + first;
    b.right = (swapped ? p.left : p.right) + first;
    b.left_type = swapped ? p.right_type : p.left_type;
    b.right_type = swapped ? p.left_type : p.right_type;
    b.factors = p.factors != nullptr ? p.factors + first : nullptr;
    b.rows = rows;
    b.left_first = m;
    b.left_count = m_end - m;
    b.right_first = n;
    b.right_count = std::min(kOuterRight, rights - n);
    b.out = swapped ? out.at(g, n, m) : out.at(g, m, n);
    b.out_row = swapped ? out.column : out.row;
    b.out_type = out.type;
    b.accumulate = p.accumulate;
    b.stream = stream;
    b.room = own.floats(kernels.outer_room_floats);
    kernels.outer(b);
  });
}

}  // namespace grouped_matmul

namespace {

using namespace grouped_matmul;

void check_matrix(std::string_view op, Named t) {
  check_rank(op, t, 2);
  check_data_type(op, t);
  check_inner_stride(op, t);
}

void check_fp64(std::string_view op, Named t, const TensorView& x) {
  check((t.tensor.dtype == DType::kF64) == (x.dtype == DType::kF64) || !t.tensor.defined(), op, ": ", t.name,
        ": expected dtype ", x.dtype == DType::kF64 ? "float64" : "float32, bfloat16 or float16", ", got dtype ",
        t.tensor.dtype);
}

// out[j] = rows[j] times a weight of its group: all blocks of all groups.
struct Products {
  const void* const* rows;
  int row_type;
  std::int64_t inner, columns;
  std::int64_t column, step;  // strides of the weight: from column to column, along the inner index
};
void run_products(const Products& p, const Weights& w, const std::int64_t* offsets, std::int64_t groups,
                  const TensorView& bias, const TensorView& out, Scratch& scratch) {
  const BlockTasks tasks(offsets, groups, p.columns, scratch, true);
  const Kernels& kernels = grouped_matmul_kernels_for(active_isa());
  parallel_for(tasks.count(), [&](std::int64_t i) {
    const BlockTasks::Task t = tasks[i];
    Scratch own;
    Block b{};
    b.rows = p.rows + t.row;
    b.row_type = p.row_type;
    b.row_count = t.rows;
    b.inner = p.inner;
    b.out = own.floats(t.rows * kBlockColumns);
    b.pitch = kBlockColumns;
    b.room = own.floats(kernels.room_floats);
    float* added = bias.defined() ? own.floats(kBlockColumns) : nullptr;
    for (std::int64_t first = t.column; first < t.column + t.columns; first += kBlockColumns) {
      const std::int64_t rest = t.column + t.columns - first;
      b.columns = std::min(kBlockColumns, rest);
      const char* weight = w.data + (t.group * w.group + first * p.column) * w.bytes;
      set_weight(b, weight, p.column, p.step, w.type);
      b.later = rest > kBlockColumns ? weight + kBlockColumns * p.column * w.bytes : nullptr;
      b.same_rows = first > t.column;
      kernels.product(b);
      for (std::int64_t c = 0; c < b.columns && added != nullptr; ++c) {
        added[c] = static_cast<float>(read_element(bias, offset_of(bias, t.group, first + c)));
      }
      kernels.store(b.out, b.pitch, t.rows, b.columns, added,
                    const_cast<char*>(row_at(out, t.row)) + first * dtype_bytes(out.dtype), out.strides[0],
                    data_type_index(out.dtype));
    }
  });
}

const void** pointers_to(const TensorView& t, Scratch& scratch) {
  return row_pointers(t.sizes[0], scratch, [&](std::int64_t r) { return row_at(t, r); });
}

void bias_gradient(const TensorView& dy, const std::int64_t* offsets, const TensorView& dbias, bool accumulate) {
  parallel_for(dbias.sizes[0], [&](std::int64_t g) {
    for (std::int64_t n = 0; n < dbias.sizes[1]; ++n) {
      double total = accumulate ? read_element(dbias, offset_of(dbias, g, n)) : 0.0;
      for (std::int64_t j = offsets[g]; j < offsets[g + 1]; ++j) {
        total += read_element(dy, offset_of(dy, j, n));
      }
      write_element(dbias, offset_of(dbias, g, n), total);
    }
  });
}

}  // namespace

void grouped_matmul_fwd(const TensorView& x, const TensorView& weight, const TensorView& groups, const TensorView& bias,
                        const TensorView& y, const GroupedMatmulOptions& options) {
  constexpr std::string_view op = "grouped_matmul_fwd";
  const FloatEnvironment environment;
  check_matrix(op, {"x", x});
  check(options.x_rows == nullptr || x.dtype != DType::kF64, op, ": x_rows: expected none with float64, got a list");
  check_rank(op, {"weight", weight}, 3);
  const std::int64_t G = weight.sizes[0];
  const std::int64_t N = weight.sizes[options.weight_axes == WeightAxes::kNK ? 1 : 2];
  check_weight_view(op, {"weight", weight}, G, N, x.sizes[1], options.weight_axes);
  check_fp64(op, {"weight", weight}, x);
  check_shape(op, {"groups", groups}, {G});
  check_shape(op, {"y", y}, {x.sizes[0], N});
  check_inner_stride(op, {"y", y});
  if (y.dtype != DType::kF32 || x.dtype == DType::kF64) {
    check_same_dtype(op, {"y", y}, {"x", x});
  }
  if (bias.defined()) {
    check_shape(op, {"bias", bias}, {G, N});
    check_float(op, {"bias", bias});
  }
  check_outputs(op, {{"y", y}}, {{"x", x}, {"weight", weight}, {"groups", groups}, {"bias", bias}});
  Scratch scratch;
  const std::int64_t* offsets = group_offsets(op, groups, x.sizes[0], options.group_list, scratch);
  if (x.dtype == DType::kF64) {
    reference_fwd<double>(x, weight, offsets, bias, y, options.weight_axes);
    return;
  }
  const Weights w = weights_of(weight, options.weight_axes);
  const Products p{options.x_rows != nullptr ? options.x_rows : pointers_to(x, scratch),
                   data_type_index(x.dtype),
                   w.K,
                   w.N,
                   w.row,
                   w.column};
  run_products(p, w, offsets, G, bias, y, scratch);
}

void grouped_matmul_bwd(const TensorView& dy, const TensorView& x, const TensorView& weight, const TensorView& groups,
                        const TensorView& dx, const TensorView& dweight, const TensorView& dbias,
                        const GroupedMatmulOptions& options) {
  constexpr std::string_view op = "grouped_matmul_bwd";
  const FloatEnvironment environment;
  check_matrix(op, {"dy", dy});
  check_rank(op, {"groups", groups}, 1);
  const std::int64_t M = dy.sizes[0];
  const std::int64_t N = dy.sizes[1];
  const std::int64_t G = groups.sizes[0];
  if (dx.defined()) {
    check_matrix(op, {"dx", dx});
    check_shape(op, {"dx", dx}, {M, dx.sizes[1]});
    check_fp64(op, {"dx", dx}, dy);
    check_rank(op, {"weight", weight}, 3);
    check_weight_view(op, {"weight", weight}, G, N, dx.sizes[1], options.weight_axes);
    check_fp64(op, {"weight", weight}, dy);
  }
  if (dweight.defined()) {
    check_matrix(op, {"x", x});
    check_shape(op, {"x", x}, {M, x.sizes[1]});
    check_same_dtype(op, {"x", x}, {"dy", dy});
    check_rank(op, {"dweight", dweight}, 3);
    check_weight_view(op, {"dweight", dweight}, G, N, x.sizes[1], options.weight_axes);
    check_fp64(op, {"dweight", dweight}, dy);
  }
  if (dbias.defined()) {
    check_shape(op, {"dbias", dbias}, {G, N});
    check_float(op, {"dbias", dbias});
  }
  check_outputs(op, {{"dx", dx}, {"dweight", dweight}, {"dbias", dbias}},
                {{"dy", dy}, {"x", x}, {"weight", weight}, {"groups", groups}});
  Scratch scratch;
  const std::int64_t* offsets = group_offsets(op, groups, M, options.group_list, scratch);
  if (dy.dtype == DType::kF64) {
    reference_bwd<double>(dy, x, weight, offsets, G, dx, dweight, dbias, options);
    return;
  }
  const void** dy_rows = pointers_to(dy, scratch);
  const int type = data_type_index(dy.dtype);
  if (dx.defined()) {
    const Weights w = weights_of(weight, options.weight_axes);
    run_products({dy_rows, type, w.N, w.K, w.column, w.row}, w, offsets, G, {}, dx, scratch);
  }
  if (dweight.defined()) {
    const void** x_rows = pointers_to(x, scratch);
    outer_products({dy_rows, x_rows, nullptr, type, type, offsets, G, options.accumulate},
                   weights_of(dweight, options.weight_axes));
  }
  if (dbias.defined()) {
    bias_gradient(dy, offsets, dbias, options.accumulate);
  }
}

}  // namespace tidegate
