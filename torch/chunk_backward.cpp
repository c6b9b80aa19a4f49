// The backward stages of the chunked delta rule as torch operators. Contracts: include/tidegate/chunk_backward.h and
// docs/operators.md.
#include "chunk.h"

namespace tidegate::adapter {
namespace {

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Type = std::optional<ScalarType>;

void dv_local_out(Tensor q, Tensor k, Tensor d_o, Tensor gc, Optional cu_seqlens, std::optional<double> scale,
                  std::int64_t chunk_size, std::string layout_name, Tensor dv) {
  constexpr std::string_view op = "chunk_bwd_dv_local";
  const Layout layout = parse_layout(op, layout_name);
  const TensorView qv = dense(op, "q", q);
  check_apart(op, {{"dv", dv}}, {{"cu_seqlens", cu_seqlens}});
  chunk_bwd_dv_local(qv, dense(op, "k", k), dense(op, "do", d_o), view(op, "gc", gc), view(op, "dv", dv),
                     boundaries_of(op, "q", qv, layout, false, cu_seqlens), {scale, chunk_size, layout});
}
Tensor dv_local(Tensor q, Tensor k, Tensor d_o, Tensor gc, Optional cu_seqlens, std::optional<double> scale,
                std::int64_t chunk_size, Type inter_dtype, std::string layout) {
  constexpr std::string_view op = "chunk_bwd_dv_local";
  Tensor dv = empty(sizes_of(view(op, "do", d_o)), inter_dtype.value_or(wide(view(op, "q", q))));
  dv_local_out(q, k, d_o, gc, cu_seqlens, scale, chunk_size, layout, dv);
  return dv;
}

void dhu_out(Tensor q, Tensor k, Tensor w, Tensor d_o, Tensor dv, Tensor gc, Optional dfinal_state, Optional cu_seqlens,
             std::optional<double> scale, std::int64_t chunk_size, bool state_v_first, std::string layout_name,
             Tensor dh, Tensor dh0, Tensor dv2) {
  constexpr std::string_view op = "chunk_gated_delta_rule_bwd_dhu";
  const Layout layout = parse_layout(op, layout_name);
  const TensorView qv = dense(op, "q", q);
  check_apart(op, {{"dh", dh}, {"dh0", dh0}, {"dv2", dv2}}, {{"cu_seqlens", cu_seqlens}});
  chunk_gated_delta_rule_bwd_dhu(
      qv, dense(op, "k", k), dense(op, "w", w), dense(op, "do", d_o), dense(op, "dv", dv), view(op, "gc", gc),
      dense(op, "dfinal_state", dfinal_state), view(op, "dh", dh), view(op, "dh0", dh0), view(op, "dv2", dv2),
      boundaries_of(op, "q", qv, layout, false, cu_seqlens), {scale, chunk_size, state_v_first, layout});
}
Three dhu(Tensor q, Tensor k, Tensor w, Tensor d_o, Tensor dv, Tensor gc, Optional dfinal_state, Optional cu_seqlens,
          std::optional<double> scale, std::int64_t chunk_size, bool state_v_first,
          std::optional<std::int64_t> num_chunks, Type inter_dtype, std::string layout_name) {
  constexpr std::string_view op = "chunk_gated_delta_rule_bwd_dhu";
  const Layout layout = parse_layout(op, layout_name);
  const TensorView qv = view(op, "q", q);
  const TensorView ov = view(op, "do", d_o);
  const TensorView gate = view(op, "gc", gc);
  const SeqLens seq = boundaries_of(op, "q", qv, layout, false, cu_seqlens);
  check(gate.rank == qv.rank - 1, op, ": gc: expected ", qv.rank - 1, " dimensions, got ", gate.rank, " in ",
        Shape{gate});
  check(ov.rank == qv.rank, op, ": do: expected ", qv.rank, " dimensions, got ", ov.rank, " in ", Shape{ov});
  const std::int64_t K = qv.size(-1);
  const std::int64_t V = ov.size(-1);
  const ScalarType type = inter_dtype.value_or(wide(qv));
  Tensor dh = empty(chunk_state_sizes(op, seq, chunk_size, gate, layout, K, V, num_chunks), type);
  Tensor dh0 = empty(state_sizes(seq, gate, layout, K, V, state_v_first), wide(qv));
  Tensor dv2 = empty(sizes_of(ov), type);
  dhu_out(q, k, w, d_o, dv, gc, dfinal_state, cu_seqlens, scale, chunk_size, state_v_first, layout_name, dh, dh0, dv2);
  return {dh, dh0, dv2};
}

void dqkwg_out(Tensor q, Tensor k, Tensor v_new, Tensor gc, Tensor h, Tensor d_o, Tensor dh, Tensor dv2,
               Optional cu_seqlens, std::optional<double> scale, std::int64_t chunk_size, std::string layout_name,
               Tensor dq, Tensor dk, Tensor dw, Tensor dg) {
  constexpr std::string_view op = "chunk_bwd_dqkwg";
  const Layout layout = parse_layout(op, layout_name);
  const TensorView qv = dense(op, "q", q);
  check_apart(op, {{"dq", dq}, {"dk", dk}, {"dw", dw}, {"dg", dg}}, {{"cu_seqlens", cu_seqlens}});
  chunk_bwd_dqkwg(qv, dense(op, "k", k), dense(op, "v_new", v_new), view(op, "gc", gc), dense(op, "h", h),
                  dense(op, "do", d_o), dense(op, "dh", dh), dense(op, "dv2", dv2), view(op, "dq", dq),
                  view(op, "dk", dk), view(op, "dw", dw), view(op, "dg", dg),
                  boundaries_of(op, "q", qv, layout, false, cu_seqlens), {scale, chunk_size, layout});
}
Four dqkwg(Tensor q, Tensor k, Tensor v_new, Tensor gc, Tensor h, Tensor d_o, Tensor dh, Tensor dv2,
           Optional cu_seqlens, std::optional<double> scale, std::int64_t chunk_size, Type inter_dtype,
           std::string layout) {
  constexpr std::string_view op = "chunk_bwd_dqkwg";
  const TensorView qv = view(op, "q", q);
  const TensorView gate = view(op, "gc", gc);
  const ScalarType type = inter_dtype.value_or(wide(qv));
  Tensor dq = empty(sizes_of(qv), type);
  Tensor dk = empty(sizes_of(qv), type);
  Tensor dw = empty(with_width(gate, last_size(qv)), type);
  Tensor dg = empty(sizes_of(gate), wide(qv));
  dqkwg_out(q, k, v_new, gc, h, d_o, dh, dv2, cu_seqlens, scale, chunk_size, layout, dq, dk, dw, dg);
  return {dq, dk, dw, dg};
}

void wy_da_out(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor dw, Tensor du, Tensor gc, Optional cu_seqlens,
               std::string layout_name, Tensor dA) {
  constexpr std::string_view op = "prepare_wy_repr_bwd_da";
  const Layout layout = parse_layout(op, layout_name);
  const TensorView kv = dense(op, "k", k);
  check_apart(op, {{"dA", dA}}, {{"cu_seqlens", cu_seqlens}});
  prepare_wy_repr_bwd_da(kv, dense(op, "v", v), view(op, "beta", beta), dense(op, "A", A), dense(op, "dw", dw),
                         dense(op, "du", du), view(op, "gc", gc), view(op, "dA", dA),
                         boundaries_of(op, "k", kv, layout, false, cu_seqlens), layout);
}
Tensor wy_da(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor dw, Tensor du, Tensor gc, Optional cu_seqlens,
             Type inter_dtype, std::string layout) {
  constexpr std::string_view op = "prepare_wy_repr_bwd_da";
  Tensor dA = empty(sizes_of(view(op, "A", A)), inter_dtype.value_or(wide(view(op, "k", k))));
  wy_da_out(k, v, beta, A, dw, du, gc, cu_seqlens, layout, dA);
  return dA;
}

// dk, dv, dbeta, dg
Four wy_gradients(std::string_view op, const Tensor& k, const Tensor& v, const Tensor& gc, Type inter_dtype) {
  const TensorView kv = view(op, "k", k);
  const Dims gate = sizes_of(view(op, "gc", gc));
  const ScalarType type = inter_dtype.value_or(wide(kv));
  return {empty(sizes_of(kv), type), empty(sizes_of(view(op, "v", v)), type), empty(gate, wide(kv)),
          empty(gate, wide(kv))};
}

void wy_full_out(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor dA, Tensor dw, Tensor du, Tensor gc,
                 Optional cu_seqlens, std::string layout_name, Tensor dk, Tensor dv, Tensor dbeta, Tensor dg) {
  constexpr std::string_view op = "prepare_wy_repr_bwd_full";
  const Layout layout = parse_layout(op, layout_name);
  const TensorView kv = dense(op, "k", k);
  check_apart(op, {{"dk", dk}, {"dv", dv}, {"dbeta", dbeta}, {"dg", dg}}, {{"cu_seqlens", cu_seqlens}});
  prepare_wy_repr_bwd_full(kv, dense(op, "v", v), view(op, "beta", beta), dense(op, "A", A), dense(op, "dA", dA),
                           dense(op, "dw", dw), dense(op, "du", du), view(op, "gc", gc), view(op, "dk", dk),
                           view(op, "dv", dv), view(op, "dbeta", dbeta), view(op, "dg", dg),
                           boundaries_of(op, "k", kv, layout, false, cu_seqlens), layout);
}
Four wy_full(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor dA, Tensor dw, Tensor du, Tensor gc, Optional cu_seqlens,
             Type inter_dtype, std::string layout) {
  Four out = wy_gradients("prepare_wy_repr_bwd_full", k, v, gc, inter_dtype);
  const auto& [dk, dv, dbeta, dg] = out;
  wy_full_out(k, v, beta, A, dA, dw, du, gc, cu_seqlens, layout, dk, dv, dbeta, dg);
  return out;
}

void wy_out(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor dw, Tensor du, Tensor gc, Optional cu_seqlens,
            std::string layout_name, Tensor dk, Tensor dv, Tensor dbeta, Tensor dg) {
  constexpr std::string_view op = "prepare_wy_repr_bwd";
  const Layout layout = parse_layout(op, layout_name);
  const TensorView kv = dense(op, "k", k);
  check_apart(op, {{"dk", dk}, {"dv", dv}, {"dbeta", dbeta}, {"dg", dg}}, {{"cu_seqlens", cu_seqlens}});
  prepare_wy_repr_bwd(kv, dense(op, "v", v), view(op, "beta", beta), dense(op, "A", A), dense(op, "dw", dw),
                      dense(op, "du", du), view(op, "gc", gc), view(op, "dk", dk), view(op, "dv", dv),
                      view(op, "dbeta", dbeta), view(op, "dg", dg),
                      boundaries_of(op, "k", kv, layout, false, cu_seqlens), layout);
}
Four wy(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor dw, Tensor du, Tensor gc, Optional cu_seqlens,
        Type inter_dtype, std::string layout) {
  Four out = wy_gradients("prepare_wy_repr_bwd", k, v, gc, inter_dtype);
  const auto& [dk, dv, dbeta, dg] = out;
  wy_out(k, v, beta, A, dw, du, gc, cu_seqlens, layout, dk, dv, dbeta, dg);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  m.def(
      "chunk_bwd_dv_local(Tensor q, Tensor k, Tensor do, Tensor gc, Tensor? cu_seqlens=None, *, float? scale=None, "
      "int chunk_size=64, ScalarType? inter_dtype=None, str layout='BSND') -> Tensor dv");
  m.def(
      "chunk_bwd_dv_local.out(Tensor q, Tensor k, Tensor do, Tensor gc, Tensor? cu_seqlens=None, *, "
      "float? scale=None, int chunk_size=64, str layout='BSND', Tensor(a!) dv) -> ()");
  m.def(
      "chunk_gated_delta_rule_bwd_dhu(Tensor q, Tensor k, Tensor w, Tensor do, Tensor dv, Tensor gc, "
      "Tensor? dfinal_state=None, Tensor? cu_seqlens=None, *, float? scale=None, int chunk_size=64, "
      "bool state_v_first=False, int? num_chunks=None, ScalarType? inter_dtype=None, str layout='BSND') "
      "-> (Tensor dh, Tensor dh0, Tensor dv2)");
  m.def(
      "chunk_gated_delta_rule_bwd_dhu.out(Tensor q, Tensor k, Tensor w, Tensor do, Tensor dv, Tensor gc, "
      "Tensor? dfinal_state=None, Tensor? cu_seqlens=None, *, float? scale=None, int chunk_size=64, "
      "bool state_v_first=False, str layout='BSND', Tensor(a!) dh, Tensor(b!) dh0, Tensor(c!) dv2) -> ()");
  m.def(
      "chunk_bwd_dqkwg(Tensor q, Tensor k, Tensor v_new, Tensor gc, Tensor h, Tensor do, Tensor dh, Tensor dv2, "
      "Tensor? cu_seqlens=None, *, float? scale=None, int chunk_size=64, ScalarType? inter_dtype=None, "
      "str layout='BSND') -> (Tensor dq, Tensor dk, Tensor dw, Tensor dg)");
  m.def(
      "chunk_bwd_dqkwg.out(Tensor q, Tensor k, Tensor v_new, Tensor gc, Tensor h, Tensor do, Tensor dh, Tensor dv2, "
      "Tensor? cu_seqlens=None, *, float? scale=None, int chunk_size=64, str layout='BSND', Tensor(a!) dq, "
      "Tensor(b!) dk, Tensor(c!) dw, Tensor(d!) dg) -> ()");
  m.def(
      "prepare_wy_repr_bwd_da(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor dw, Tensor du, Tensor gc, "
      "Tensor? cu_seqlens=None, *, ScalarType? inter_dtype=None, str layout='BSND') -> Tensor dA");
  m.def(
      "prepare_wy_repr_bwd_da.out(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor dw, Tensor du, Tensor gc, "
      "Tensor? cu_seqlens=None, *, str layout='BSND', Tensor(a!) dA) -> ()");
  m.def(
      "prepare_wy_repr_bwd_full(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor dA, Tensor dw, Tensor du, Tensor gc, "
      "Tensor? cu_seqlens=None, *, ScalarType? inter_dtype=None, str layout='BSND') "
      "-> (Tensor dk, Tensor dv, Tensor dbeta, Tensor dg)");
  m.def(
      "prepare_wy_repr_bwd_full.out(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor dA, Tensor dw, Tensor du, "
      "Tensor gc, Tensor? cu_seqlens=None, *, str layout='BSND', Tensor(a!) dk, Tensor(b!) dv, Tensor(c!) dbeta, "
      "Tensor(d!) dg) -> ()");
  m.def(
      "prepare_wy_repr_bwd(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor dw, Tensor du, Tensor gc, "
      "Tensor? cu_seqlens=None, *, ScalarType? inter_dtype=None, str layout='BSND') "
      "-> (Tensor dk, Tensor dv, Tensor dbeta, Tensor dg)");
  m.def(
      "prepare_wy_repr_bwd.out(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor dw, Tensor du, Tensor gc, "
      "Tensor? cu_seqlens=None, *, str layout='BSND', Tensor(a!) dk, Tensor(b!) dv, Tensor(c!) dbeta, Tensor(d!) dg) "
      "-> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tidegate, CPU, m) {
  m.impl("chunk_bwd_dv_local", TORCH_BOX(&dv_local));
  m.impl("chunk_bwd_dv_local.out", TORCH_BOX(&dv_local_out));
  m.impl("chunk_gated_delta_rule_bwd_dhu", TORCH_BOX(&dhu));
  m.impl("chunk_gated_delta_rule_bwd_dhu.out", TORCH_BOX(&dhu_out));
  m.impl("chunk_bwd_dqkwg", TORCH_BOX(&dqkwg));
  m.impl("chunk_bwd_dqkwg.out", TORCH_BOX(&dqkwg_out));
  m.impl("prepare_wy_repr_bwd_da", TORCH_BOX(&wy_da));
  m.impl("prepare_wy_repr_bwd_da.out", TORCH_BOX(&wy_da_out));
  m.impl("prepare_wy_repr_bwd_full", TORCH_BOX(&wy_full));
  m.impl("prepare_wy_repr_bwd_full.out", TORCH_BOX(&wy_full_out));
  m.impl("prepare_wy_repr_bwd", TORCH_BOX(&wy));
  m.impl("prepare_wy_repr_bwd.out", TORCH_BOX(&wy_out));
}

}  // namespace tidegate::adapter
