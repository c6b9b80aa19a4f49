// int8 experts as torch operators. Contracts: include/tidegate/quant.h.
#include "adapter.h"

namespace tidegate::adapter {
namespace {

std::tuple<Tensor, Tensor> quantize_op(Tensor x, std::int64_t axis) {
  constexpr std::string_view op = "quantize";
  const TensorView xv = view(op, "x", x);
  check(xv.rank >= 1, op, ": x: expected at least 1 dimension, got 0");
  const std::int64_t d = axis < 0 ? xv.rank + axis : axis;
  check(d == xv.rank - 1 || (d == xv.rank - 2 && d >= 0), op, ": axis: expected one of the last two dimensions, got ",
        axis);
  // The result lies in memory as x does: a transposed view stays one. Any other stride is copied away.
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

void quantize_out(Tensor x, std::int64_t axis, Tensor q, Tensor scale) {
  constexpr std::string_view op = "quantize";
  quantize(view(op, "x", x), view(op, "q", q), view(op, "scale", scale), static_cast<int>(axis));
}

GroupedQuantInputs inputs_of(std::string_view op, Tensor& x, const Tensor& weight, const Tensor& groups,
                             const Tensor& weight_scale, const Tensor& x_scale) {
  check_index_type(op, "groups", groups);
  return {dense(op, "x", x), view(op, "x_scale", x_scale), view(op, "weight", weight),
          view(op, "weight_scale", weight_scale), index_view(op, "groups", groups)};
}
GroupedQuantOptions options_of(std::string_view op, const std::string& weight_axes, const std::string& group_list) {
  return {parse_weight_axes(op, weight_axes), parse_group_list(op, group_list)};
}

std::int64_t rows_of(const TensorView& x) { return x.rank == 2 ? x.sizes[0] : 0; }
std::int64_t columns_of(const TensorView& weight, WeightAxes axes) {
  return weight.rank == 3 ? weight.sizes[axes == WeightAxes::kNK ? 1 : 2] : 0;
}

void swiglu_out(Tensor x, Tensor weight, Tensor groups, Tensor weight_scale, Tensor x_scale, Optional smooth_scale,
                std::string weight_axes, std::string group_list, Tensor q, Tensor q_scale) {
  constexpr std::string_view op = "grouped_matmul_swiglu_quant";
  grouped_matmul_swiglu_quant(inputs_of(op, x, weight, groups, weight_scale, x_scale),
                              view(op, "smooth_scale", smooth_scale), view(op, "q", q), view(op, "q_scale", q_scale),
                              options_of(op, weight_axes, group_list));
}

std::tuple<Tensor, Tensor> swiglu(Tensor x, Tensor weight, Tensor groups, Tensor weight_scale, Tensor x_scale,
                                  Optional smooth_scale, std::string weight_axes, std::string group_list) {
  constexpr std::string_view op = "grouped_matmul_swiglu_quant";
  const std::int64_t N = columns_of(view(op, "weight", weight), parse_weight_axes(op, weight_axes));
  const std::int64_t M = rows_of(view(op, "x", x));
  Tensor q = zeros({M, N / 2}, ScalarType::Char);
  Tensor q_scale = zeros({M}, ScalarType::Float);
  swiglu_out(x, weight, groups, weight_scale, x_scale, smooth_scale, weight_axes, group_list, q, q_scale);
  return {q, q_scale};
}

void product_out(Tensor x, Tensor weight, Tensor groups, Tensor weight_scale, Tensor x_scale, std::string weight_axes,
                 std::string group_list, Tensor y) {
  constexpr std::string_view op = "grouped_matmul_quant";
  grouped_matmul_quant(inputs_of(op, x, weight, groups, weight_scale, x_scale), view(op, "y", y),
                       options_of(op, weight_axes, group_list));
}

Tensor product(Tensor x, Tensor weight, Tensor groups, Tensor weight_scale, Tensor x_scale, std::string weight_axes,
               std::string group_list, ScalarType out_dtype) {
  constexpr std::string_view op = "grouped_matmul_quant";
  const std::int64_t N = columns_of(view(op, "weight", weight), parse_weight_axes(op, weight_axes));
  Tensor y = zeros({rows_of(view(op, "x", x)), N}, out_dtype);
  product_out(x, weight, groups, weight_scale, x_scale, weight_axes, group_list, y);
  return y;
}

void experts_out(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor gate_up_scale, Tensor down,
                 Tensor down_scale, std::string weight_axes, std::string ids_convention, Tensor out) {
  constexpr std::string_view op = "moe_experts_quant";
  check_index_type(op, "ids", ids);
  moe_experts_quant(
      {dense(op, "x", x), index_view(op, "ids", ids), view(op, "weights", weights), view(op, "gate_up", gate_up),
       view(op, "gate_up_scale", gate_up_scale), view(op, "down", down), view(op, "down_scale", down_scale)},
      view(op, "out", out), {parse_weight_axes(op, weight_axes), parse_expert_ids(op, ids_convention)});
}

Tensor experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor gate_up_scale, Tensor down,
               Tensor down_scale, std::string weight_axes, std::string ids_convention) {
  Tensor out = empty_like(view("moe_experts_quant", "x", x));
  experts_out(x, ids, weights, gate_up, gate_up_scale, down, down_scale, weight_axes, ids_convention, out);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  m.def("quantize(Tensor x, *, int axis=-1) -> (Tensor q, Tensor scale)");
  m.def("quantize.out(Tensor x, *, int axis=-1, Tensor(a!) q, Tensor(b!) scale) -> ()");
  m.def(
      "grouped_matmul_swiglu_quant(Tensor x, Tensor weight, Tensor groups, Tensor weight_scale, Tensor x_scale, "
      "Tensor? smooth_scale=None, *, str weight_axes='nk', str group_list='counts') -> (Tensor q, Tensor q_scale)");
  m.def(
      "grouped_matmul_swiglu_quant.out(Tensor x, Tensor weight, Tensor groups, Tensor weight_scale, Tensor x_scale, "
      "Tensor? smooth_scale=None, *, str weight_axes='nk', str group_list='counts', Tensor(a!) q, Tensor(b!) q_scale) "
      "-> ()");
  m.def(
      "grouped_matmul_quant(Tensor x, Tensor weight, Tensor groups, Tensor weight_scale, Tensor x_scale, *, "
      "str weight_axes='nk', str group_list='counts', ScalarType out_dtype=float32) -> Tensor y");
  m.def(
      "grouped_matmul_quant.out(Tensor x, Tensor weight, Tensor groups, Tensor weight_scale, Tensor x_scale, *, "
      "str weight_axes='nk', str group_list='counts', Tensor(a!) y) -> ()");
  m.def(
      "moe_experts_quant(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor gate_up_scale, Tensor down, "
      "Tensor down_scale, *, str weight_axes='nk', str ids_convention='plain') -> Tensor out");
  m.def(
      "moe_experts_quant.out(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor gate_up_scale, Tensor down, "
      "Tensor down_scale, *, str weight_axes='nk', str ids_convention='plain', Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tidegate, CPU, m) {
  m.impl("quantize", TORCH_BOX(&quantize_op));
  m.impl("quantize.out", TORCH_BOX(&quantize_out));
  m.impl("grouped_matmul_swiglu_quant", TORCH_BOX(&swiglu));
  m.impl("grouped_matmul_swiglu_quant.out", TORCH_BOX(&swiglu_out));
  m.impl("grouped_matmul_quant", TORCH_BOX(&product));
  m.impl("grouped_matmul_quant.out", TORCH_BOX(&product_out));
  m.impl("moe_experts_quant", TORCH_BOX(&experts));
  m.impl("moe_experts_quant.out", TORCH_BOX(&experts_out));
}

}  // namespace tidegate::adapter
