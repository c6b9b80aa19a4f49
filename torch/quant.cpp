// int8 experts as torch operators. Contracts: include/tidegate/quant.h.
#include "adapter.h"

namespace tidegate::adapter {
namespace {

GroupList group_list_of(std::string_view op, std::int64_t type) {
  check(type == 0 || type == 1, op, ": group_list_type: expected 0 (cumsum) or 1 (counts), got ", type);
  return type == 0 ? GroupList::kCumsum : GroupList::kCounts;
}

std::tuple<Tensor, Tensor> quantize_op(Tensor x, std::int64_t axis) {
  constexpr std::string_view op = "quantize";
  const TensorView xv = view(op, "x", x);
  check(xv.rank >= 1, op, ": x: expected at least 1 dimension, got 0");
  const std::int64_t d = axis < 0 ? xv.rank + axis : axis;
  check(d == xv.rank - 1 || (d == xv.rank - 2 && d >= 0), op, ": axis: expected one of the last two dimensions, got ",
        axis);
  // The result lies in memory as x does: a transposed view stays one.
  const bool turned = xv.rank >= 2 && xv.size(-1) > 1 && xv.stride(-1) != 1 && xv.stride(-2) == 1;
  std::vector<std::int64_t> sizes(xv.sizes, xv.sizes + xv.rank);
  std::vector<std::int64_t> leading = sizes;
  leading.erase(leading.begin() + d);
  Tensor scale = empty(leading, ScalarType::Float);
  if (turned) {
    std::swap(sizes[sizes.size() - 2], sizes[sizes.size() - 1]);
    Tensor q = torch::stable::transpose(empty(sizes, ScalarType::Char), -2, -1);
    quantize(xv, view(op, "q", q), view(op, "scale", scale), static_cast<int>(axis));
    return {q, scale};
  }
  Tensor q = empty(sizes, ScalarType::Char);
  quantize(dense(op, "x", x), view(op, "q", q), view(op, "scale", scale), static_cast<int>(axis));
  return {q, scale};
}

GroupedQuantInputs inputs_of(std::string_view op, Tensor& x, const Tensor& weight, const Tensor& group_list,
                             const Tensor& weight_scale, const Tensor& x_scale) {
  return {dense(op, "x", x), view(op, "x_scale", x_scale), view(op, "weight", weight),
          view(op, "weight_scale", weight_scale), view(op, "groups", group_list)};
}

std::int64_t columns_of(const TensorView& weight, WeightAxes axes) {
  return weight.rank == 3 ? weight.sizes[axes == WeightAxes::kNK ? 1 : 2] : 0;
}

std::tuple<Tensor, Tensor> swiglu(Tensor x, Tensor weight, Tensor group_list, Tensor weight_scale, Tensor x_scale,
                                  Optional smooth_scale, std::int64_t group_list_type, std::string weight_axes) {
  constexpr std::string_view op = "grouped_matmul_swiglu_quant";
  const GroupedQuantOptions options{parse_weight_axes(op, weight_axes), group_list_of(op, group_list_type)};
  const GroupedQuantInputs in = inputs_of(op, x, weight, group_list, weight_scale, x_scale);
  const std::int64_t rows = in.x.rank == 2 ? in.x.sizes[0] : 0;
  Tensor q = zeros({rows, columns_of(in.weight, options.weight_axes) / 2}, ScalarType::Char);
  Tensor scale = zeros({rows}, ScalarType::Float);
  grouped_matmul_swiglu_quant(in, view(op, "smooth_scale", smooth_scale), view(op, "q", q), view(op, "q_scale", scale),
                              options);
  return {q, scale};
}

Tensor product(Tensor x, Tensor weight, Tensor group_list, Tensor weight_scale, Tensor x_scale,
               std::int64_t group_list_type, std::string weight_axes, ScalarType out_dtype) {
  constexpr std::string_view op = "grouped_matmul_quant";
  const GroupedQuantOptions options{parse_weight_axes(op, weight_axes), group_list_of(op, group_list_type)};
  const GroupedQuantInputs in = inputs_of(op, x, weight, group_list, weight_scale, x_scale);
  Tensor y = zeros({in.x.rank == 2 ? in.x.sizes[0] : 0, columns_of(in.weight, options.weight_axes)}, out_dtype);
  grouped_matmul_quant(in, view(op, "y", y), options);
  return y;
}

Tensor experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor gate_up_scale, Tensor down,
               Tensor down_scale, std::string weight_axes, std::string ids_convention) {
  constexpr std::string_view op = "moe_experts_quant";
  const MoeExpertsQuantOptions options{parse_weight_axes(op, weight_axes), parse_expert_ids(op, ids_convention)};
  const TensorView xv = dense(op, "x", x);
  Tensor out = empty_like(xv);
  moe_experts_quant(
      {xv, view(op, "ids", ids), view(op, "weights", weights), view(op, "gate_up", gate_up),
       view(op, "gate_up_scale", gate_up_scale), view(op, "down", down), view(op, "down_scale", down_scale)},
      view(op, "out", out), options);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  m.def("quantize(Tensor x, *, int axis=-1) -> (Tensor q, Tensor scale)");
  m.def(
      "grouped_matmul_swiglu_quant(Tensor x, Tensor weight, Tensor group_list, Tensor weight_scale, Tensor x_scale, "
      "Tensor? smooth_scale=None, *, int group_list_type=0, str weight_axes='nk') -> (Tensor q, Tensor q_scale)");
  m.def(
      "grouped_matmul_quant(Tensor x, Tensor weight, Tensor group_list, Tensor weight_scale, Tensor x_scale, *, "
      "int group_list_type=0, str weight_axes='nk', ScalarType out_dtype=float32) -> Tensor y");
  m.def(
      "moe_experts_quant(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor gate_up_scale, Tensor down, "
      "Tensor down_scale, *, str weight_axes='nk', str ids_convention='plain') -> Tensor out");
}

STABLE_TORCH_LIBRARY_IMPL(tidegate, CPU, m) {
  m.impl("quantize", TORCH_BOX(&quantize_op));
  m.impl("grouped_matmul_swiglu_quant", TORCH_BOX(&swiglu));
  m.impl("grouped_matmul_quant", TORCH_BOX(&product));
  m.impl("moe_experts_quant", TORCH_BOX(&experts));
}

}  // namespace tidegate::adapter
