// The router, the order of pairs and grouped products as torch operators. Contracts: include/tidegate/moe.h.
#include "adapter.h"

namespace tidegate::adapter {
namespace {

ScalarType wide(const TensorView& x) { return x.dtype == DType::kF64 ? ScalarType::Double : ScalarType::Float; }
std::int64_t size_of(const TensorView& t, int d) { return d < t.rank ? t.sizes[d] : 0; }

MoeRouteOptions route_options(std::string_view op, bool renormalise, std::optional<ScalarType> rounding) {
  MoeRouteOptions o{renormalise, {}};
  if (rounding.has_value()) {
    o.logits_rounding = dtype_of(op, "logits_rounding", *rounding);
  }
  return o;
}

std::tuple<Tensor, Tensor, Tensor> route_fwd(Tensor logits, Optional replay_ids, std::int64_t top_k, bool renormalise,
                                             std::optional<ScalarType> logits_rounding,
                                             std::optional<ScalarType> weights_dtype, bool output_probs) {
  constexpr std::string_view op = "moe_route_fwd";
  const TensorView z = dense(op, "logits", logits);
  const std::int64_t T = size_of(z, 0), E = size_of(z, 1);
  // Before anything of this size is allocated; a wrong rank is reported by the operator.
  check(z.rank != 2 || (top_k >= 1 && top_k <= E), op, ": top_k: expected 1 to ", E, " (experts), got ", top_k);
  Tensor ids = empty({T, top_k}, ScalarType::Int);
  Tensor weights = empty({T, top_k}, weights_dtype.value_or(scalar_type(z.dtype)));
  Tensor probs = output_probs ? empty({T, E}, wide(z)) : nothing(wide(z));
  moe_route_fwd(z, index_view(op, "replay_ids", replay_ids), index_view(op, "ids", ids), view(op, "weights", weights),
                output_probs ? view(op, "probs", probs) : TensorView{},
                route_options(op, renormalise, logits_rounding));
  return {weights, ids, probs};
}

void route_fwd_out(Tensor logits, Optional replay_ids, bool renormalise, std::optional<ScalarType> logits_rounding,
                   Tensor ids, Tensor weights, Optional probs) {
  constexpr std::string_view op = "moe_route_fwd";
  moe_route_fwd(dense(op, "logits", logits), index_view(op, "replay_ids", replay_ids), index_view(op, "ids", ids),
                view(op, "weights", weights), view(op, "probs", probs),
                route_options(op, renormalise, logits_rounding));
}

void run_route_bwd(Optional& dweights, Optional& dprobs, const TensorView& z, const Tensor& ids, const Tensor& dlogits,
                   const MoeRouteOptions& options) {
  constexpr std::string_view op = "moe_route_bwd";
  moe_route_bwd(dense(op, "dweights", dweights), dense(op, "dprobs", dprobs), z, index_view(op, "ids", ids),
                view(op, "dlogits", dlogits), options);
}

Tensor route_bwd(Optional dweights, Optional dprobs, Tensor logits, Tensor ids, bool renormalise,
                 std::optional<ScalarType> logits_rounding) {
  constexpr std::string_view op = "moe_route_bwd";
  const TensorView z = dense(op, "logits", logits);
  Tensor dlogits = empty_like(z);
  run_route_bwd(dweights, dprobs, z, ids, dlogits, route_options(op, renormalise, logits_rounding));
  return dlogits;
}

void route_bwd_out(Optional dweights, Optional dprobs, Tensor logits, Tensor ids, bool renormalise,
                   std::optional<ScalarType> logits_rounding, Tensor dlogits) {
  constexpr std::string_view op = "moe_route_bwd";
  run_route_bwd(dweights, dprobs, dense(op, "logits", logits), ids, dlogits,
                route_options(op, renormalise, logits_rounding));
}

std::tuple<Tensor, Tensor, Tensor> init_routing(Tensor ids, std::int64_t num_experts, std::string ids_convention) {
  constexpr std::string_view op = "moe_init_routing";
  const TensorView i = index_view(op, "ids", ids);
  check(num_experts >= 0, op, ": num_experts: expected at least 0, got ", num_experts);
  Tensor counts = empty({num_experts}, ScalarType::Long);
  Tensor src = empty({i.numel()}, ScalarType::Int);
  Tensor pos = empty({size_of(i, 0), size_of(i, 1)}, ScalarType::Int);
  moe_init_routing(i, index_view(op, "counts", counts), index_view(op, "src", src), index_view(op, "pos", pos),
                   parse_expert_ids(op, ids_convention));
  return {counts, src, pos};
}

void init_routing_out(Tensor ids, std::string ids_convention, Tensor counts, Tensor src, Tensor pos) {
  constexpr std::string_view op = "moe_init_routing";
  moe_init_routing(index_view(op, "ids", ids), index_view(op, "counts", counts), index_view(op, "src", src),
                   index_view(op, "pos", pos), parse_expert_ids(op, ids_convention));
}

// pos is for the gradient; it says how many slots a token has.
void run_permute(Tensor& x, const Tensor& src, const Tensor& pos, const Tensor& y) {
  constexpr std::string_view op = "moe_permute";
  const TensorView p = index_view(op, "pos", pos);
  check(p.rank == 2, op, ": pos: expected 2 dimensions, got ", p.rank);
  const TensorView xv = dense(op, "x", x);
  check(xv.rank != 2 || p.sizes[0] == xv.sizes[0], op, ": pos: expected ", size_of(xv, 0), " tokens (as x), got ",
        p.sizes[0]);
  moe_permute(xv, index_view(op, "src", src), view(op, "y", y), p.sizes[1]);
}
Tensor permute(Tensor x, Tensor src, Tensor pos) {
  constexpr std::string_view op = "moe_permute";
  const TensorView xv = dense(op, "x", x);
  Tensor y = empty({size_of(index_view(op, "src", src), 0), size_of(xv, 1)}, scalar_type(xv.dtype));
  run_permute(x, src, pos, y);
  return y;
}
void permute_out(Tensor x, Tensor src, Tensor pos, Tensor y) {
  index_view("moe_permute", "pos", pos);  // first of all: is there one
  view("moe_permute", "y", y);
  check_apart("moe_permute", {{"y", y}}, {{"pos", pos}});
  run_permute(x, src, pos, y);
}

Tensor unpermute_fwd(Tensor y, Tensor pos, Optional weights) {
  constexpr std::string_view op = "moe_unpermute_fwd";
  const TensorView yv = dense(op, "y", y);
  Tensor out = empty({size_of(index_view(op, "pos", pos), 0), size_of(yv, 1)}, scalar_type(yv.dtype));
  moe_unpermute_fwd(yv, index_view(op, "pos", pos), view(op, "weights", weights), view(op, "out", out));
  return out;
}
void unpermute_fwd_out(Tensor y, Tensor pos, Optional weights, Tensor out) {
  constexpr std::string_view op = "moe_unpermute_fwd";
  moe_unpermute_fwd(dense(op, "y", y), index_view(op, "pos", pos), view(op, "weights", weights), view(op, "out", out));
}

std::tuple<Tensor, Tensor> unpermute_bwd(Tensor dout, Tensor y, Tensor pos, Optional weights) {
  constexpr std::string_view op = "moe_unpermute_bwd";
  const TensorView yv = dense(op, "y", y);
  const TensorView w = view(op, "weights", weights);
  Tensor dy = empty_like(yv);
  Tensor dweights = w.defined() ? empty_like(w) : nothing(wide(yv));
  moe_unpermute_bwd(dense(op, "dout", dout), yv, index_view(op, "pos", pos), w, view(op, "dy", dy),
                    w.defined() ? view(op, "dweights", dweights) : TensorView{});
  return {dy, dweights};
}
void unpermute_bwd_out(Tensor dout, Tensor y, Tensor pos, Optional weights, Optional dy, Optional dweights) {
  constexpr std::string_view op = "moe_unpermute_bwd";
  moe_unpermute_bwd(dense(op, "dout", dout), dense(op, "y", y), index_view(op, "pos", pos),
                    view(op, "weights", weights), view(op, "dy", dy), view(op, "dweights", dweights));
}

GroupedMatmulOptions matmul_options(std::string_view op, const std::string& axes, const std::string& list,
                                    bool accumulate = false) {
  return {parse_weight_axes(op, axes), parse_group_list(op, list), accumulate};
}

Tensor matmul_fwd(Tensor x, Tensor weight, Tensor groups, Optional bias, std::string weight_axes,
                  std::string group_list, std::optional<ScalarType> out_dtype) {
  constexpr std::string_view op = "grouped_matmul_fwd";
  const GroupedMatmulOptions o = matmul_options(op, weight_axes, group_list);
  const TensorView xv = dense(op, "x", x);
  const TensorView w = view(op, "weight", weight);
  // Zeros: rows outside all groups.
  Tensor y = zeros({size_of(xv, 0), size_of(w, o.weight_axes == WeightAxes::kNK ? 1 : 2)},
                   out_dtype.value_or(scalar_type(xv.dtype)));
  grouped_matmul_fwd(xv, w, index_view(op, "groups", groups), view(op, "bias", bias), view(op, "y", y), o);
  return y;
}
void matmul_fwd_out(Tensor x, Tensor weight, Tensor groups, Optional bias, std::string weight_axes,
                    std::string group_list, Tensor y) {
  constexpr std::string_view op = "grouped_matmul_fwd";
  grouped_matmul_fwd(dense(op, "x", x), view(op, "weight", weight), index_view(op, "groups", groups),
                     view(op, "bias", bias), view(op, "y", y), matmul_options(op, weight_axes, group_list));
}

std::tuple<Tensor, Tensor, Tensor> matmul_bwd(Tensor dy, Tensor x, Tensor weight, Tensor groups,
                                              std::string weight_axes, std::string group_list, std::int64_t needs) {
  constexpr std::string_view op = "grouped_matmul_bwd";
  check(needs >= 0 && needs < 8, op, ": needs: expected 0 to 7 (a bit for every result), got ", needs);
  const TensorView dyv = dense(op, "dy", dy);
  const TensorView xv = dense(op, "x", x);
  const TensorView w = view(op, "weight", weight);
  const TensorView g = index_view(op, "groups", groups);
  const ScalarType type = scalar_type(w.dtype);
  const auto wanted = [&](int bit) { return (needs >> bit & 1) != 0; };
  Tensor dx = wanted(0) ? zeros({size_of(xv, 0), size_of(xv, 1)}, scalar_type(xv.dtype)) : nothing(type);
  Tensor dweight = wanted(1) ? empty_weight_like(w) : nothing(type);
  Tensor dbias = wanted(2) ? empty({size_of(g, 0), size_of(dyv, 1)}, type) : nothing(type);
  grouped_matmul_bwd(dyv, xv, w, g, wanted(0) ? view(op, "dx", dx) : TensorView{},
                     wanted(1) ? view(op, "dweight", dweight) : TensorView{},
                     wanted(2) ? view(op, "dbias", dbias) : TensorView{}, matmul_options(op, weight_axes, group_list));
  return {dx, dweight, dbias};
}
void matmul_bwd_out(Tensor dy, Tensor x, Tensor weight, Tensor groups, std::string weight_axes, std::string group_list,
                    bool accumulate, Optional dx, Optional dweight, Optional dbias) {
  constexpr std::string_view op = "grouped_matmul_bwd";
  grouped_matmul_bwd(dense(op, "dy", dy), dense(op, "x", x), view(op, "weight", weight),
                     index_view(op, "groups", groups), view(op, "dx", dx), view(op, "dweight", dweight),
                     view(op, "dbias", dbias), matmul_options(op, weight_axes, group_list, accumulate));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  m.def(
      "moe_route_fwd(Tensor logits, Tensor? replay_ids=None, *, int top_k, bool renormalise=True, "
      "ScalarType? logits_rounding=None, ScalarType? weights_dtype=None, bool output_probs=False) "
      "-> (Tensor weights, Tensor ids, Tensor probs)");
  m.def(
      "moe_route_fwd.out(Tensor logits, Tensor? replay_ids=None, *, bool renormalise=True, "
      "ScalarType? logits_rounding=None, Tensor(a!) ids, Tensor(b!) weights, Tensor(c!)? probs=None) -> ()");
  m.def(
      "moe_route_bwd(Tensor? dweights, Tensor? dprobs, Tensor logits, Tensor ids, *, bool renormalise=True, "
      "ScalarType? logits_rounding=None) -> Tensor dlogits");
  m.def(
      "moe_route_bwd.out(Tensor? dweights, Tensor? dprobs, Tensor logits, Tensor ids, *, bool renormalise=True, "
      "ScalarType? logits_rounding=None, Tensor(a!) dlogits) -> ()");
  m.def(
      "moe_init_routing(Tensor ids, *, int num_experts, str ids_convention='plain') "
      "-> (Tensor counts, Tensor src, Tensor pos)");
  m.def(
      "moe_init_routing.out(Tensor ids, *, str ids_convention='plain', Tensor(a!) counts, Tensor(b!) src, "
      "Tensor(c!) pos) -> ()");
  m.def("moe_permute(Tensor x, Tensor src, Tensor pos) -> Tensor y");
  m.def("moe_permute.out(Tensor x, Tensor src, Tensor pos, *, Tensor(a!) y) -> ()");
  m.def("moe_unpermute_fwd(Tensor y, Tensor pos, Tensor? weights=None) -> Tensor out");
  m.def("moe_unpermute_fwd.out(Tensor y, Tensor pos, Tensor? weights=None, *, Tensor(a!) out) -> ()");
  m.def("moe_unpermute_bwd(Tensor dout, Tensor y, Tensor pos, Tensor? weights=None) -> (Tensor dy, Tensor dweights)");
  m.def(
      "moe_unpermute_bwd.out(Tensor dout, Tensor y, Tensor pos, Tensor? weights=None, *, Tensor(a!)? dy=None, "
      "Tensor(b!)? dweights=None) -> ()");
  m.def(
      "grouped_matmul_fwd(Tensor x, Tensor weight, Tensor groups, Tensor? bias=None, *, str weight_axes='nk', "
      "str group_list='counts', ScalarType? out_dtype=None) -> Tensor y");
  m.def(
      "grouped_matmul_fwd.out(Tensor x, Tensor weight, Tensor groups, Tensor? bias=None, *, str weight_axes='nk', "
      "str group_list='counts', Tensor(a!) y) -> ()");
  m.def(
      "grouped_matmul_bwd(Tensor dy, Tensor x, Tensor weight, Tensor groups, *, str weight_axes='nk', "
      "str group_list='counts', int needs=7) -> (Tensor dx, Tensor dweight, Tensor dbias)");
  m.def(
      "grouped_matmul_bwd.out(Tensor dy, Tensor x, Tensor weight, Tensor groups, *, str weight_axes='nk', "
      "str group_list='counts', bool accumulate=False, Tensor(a!)? dx=None, Tensor(b!)? dweight=None, "
      "Tensor(c!)? dbias=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tidegate, CPU, m) {
  m.impl("moe_route_fwd", TORCH_BOX(&route_fwd));
  m.impl("moe_route_fwd.out", TORCH_BOX(&route_fwd_out));
  m.impl("moe_route_bwd", TORCH_BOX(&route_bwd));
  m.impl("moe_route_bwd.out", TORCH_BOX(&route_bwd_out));
  m.impl("moe_init_routing", TORCH_BOX(&init_routing));
  m.impl("moe_init_routing.out", TORCH_BOX(&init_routing_out));
  m.impl("moe_permute", TORCH_BOX(&permute));
  m.impl("moe_permute.out", TORCH_BOX(&permute_out));
  m.impl("moe_unpermute_fwd", TORCH_BOX(&unpermute_fwd));
  m.impl("moe_unpermute_fwd.out", TORCH_BOX(&unpermute_fwd_out));
  m.impl("moe_unpermute_bwd", TORCH_BOX(&unpermute_bwd));
  m.impl("moe_unpermute_bwd.out", TORCH_BOX(&unpermute_bwd_out));
  m.impl("grouped_matmul_fwd", TORCH_BOX(&matmul_fwd));
  m.impl("grouped_matmul_fwd.out", TORCH_BOX(&matmul_fwd_out));
  m.impl("grouped_matmul_bwd", TORCH_BOX(&matmul_bwd));
  m.impl("grouped_matmul_bwd.out", TORCH_BOX(&matmul_bwd_out));
}

}  // namespace tidegate::adapter
