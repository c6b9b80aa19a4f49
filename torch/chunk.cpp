// The stages of the chunked delta rule as torch operators. Contracts: include/tidegate/chunk.h and docs/operators.md.
#include "chunk.h"

namespace tidegate::adapter {
SeqLens boundaries_of(std::string_view op, std::string_view name, const TensorView& t, Layout layout, bool gate,
                      const Optional& cu_seqlens) {
  const int rank = (has_batch(layout) ? 4 : 3) - (gate ? 1 : 0);
  check(t.rank == rank, op, ": ", name, ": expected ", rank, " dimensions, got ", t.rank, " in ", Shape{t});
  return boundaries(op, cu_seqlens, has_batch(layout) ? t.size(0) : 1, t.size(token_dimension(layout)));
}

Dims chunk_state_sizes(std::string_view op, const SeqLens& seq, std::int64_t chunk_size, const TensorView& gc,
                       Layout layout, std::int64_t K, std::int64_t V, std::optional<std::int64_t> num_chunks) {
  // Before it is known to be good, a chunk size must not decide about memory.
  check(chunk_size == 16 || chunk_size == 32 || chunk_size == 64 || chunk_size == 128, op,
        ": chunk_size: expected a chunk size of 16, 32, 64 or 128, got ", chunk_size);
  const std::int64_t chunks = chunks_per_row(seq, chunk_size);
  check(num_chunks.value_or(chunks) == chunks, op, ": num_chunks: expected ", chunks, " (chunks of ", chunk_size,
        " tokens), got ", num_chunks.value_or(0));
  Dims sizes = sizes_of(gc);
  sizes[static_cast<std::size_t>(token_dimension(layout))] = chunks;
  sizes.insert(sizes.end(), {K, V});
  return sizes;
}

Dims state_sizes(const SeqLens& seq, const TensorView& gc, Layout layout, std::int64_t K, std::int64_t V,
                 bool v_first) {
  return {seq.count(), gc.size(is_head_major(layout) ? -2 : -1), v_first ? V : K, v_first ? K : V};
}

namespace {

void run_cumsum(Tensor& g, std::int64_t chunk_size, const Optional& cu_seqlens, bool reverse, double scale,
                std::optional<double> floor, const std::string& layout_name, const Tensor& out) {
  constexpr std::string_view op = "chunk_local_cumsum";
  const Layout layout = parse_layout(op, layout_name);
  const TensorView gv = view(op, "g", g);
  check_apart(op, {{"out", out}}, {{"cu_seqlens", cu_seqlens}});
  chunk_local_cumsum(gv, view(op, "out", out), chunk_size, boundaries_of(op, "g", gv, layout, true, cu_seqlens),
                     {reverse, scale, floor, layout});
}
Tensor cumsum(Tensor g, std::int64_t chunk_size, Optional cu_seqlens, bool reverse, double scale,
              std::optional<double> floor, std::optional<ScalarType> out_dtype, std::string layout) {
  const TensorView gv = view("chunk_local_cumsum", "g", g);
  Tensor out = empty(sizes_of(gv), out_dtype.value_or(wide(gv)));
  run_cumsum(g, chunk_size, cu_seqlens, reverse, scale, floor, layout, out);
  return out;
}
void cumsum_out(Tensor g, std::int64_t chunk_size, Optional cu_seqlens, bool reverse, double scale,
                std::optional<double> floor, std::string layout, Tensor out) {
  run_cumsum(g, chunk_size, cu_seqlens, reverse, scale, floor, layout, out);
}

void kkt_out(Tensor k, Optional gc, Tensor beta, Optional cu_seqlens, std::int64_t chunk_size, std::string layout_name,
             Tensor A0) {
  constexpr std::string_view op = "chunk_scaled_dot_kkt";
  const Layout layout = parse_layout(op, layout_name);
  const TensorView kv = dense(op, "k", k);
  check_apart(op, {{"A0", A0}}, {{"cu_seqlens", cu_seqlens}});
  chunk_scaled_dot_kkt(kv, view(op, "gc", gc), view(op, "beta", beta), view(op, "A0", A0),
                       boundaries_of(op, "k", kv, layout, false, cu_seqlens), {chunk_size, layout});
}
Tensor kkt(Tensor k, Optional gc, Tensor beta, Optional cu_seqlens, std::int64_t chunk_size,
           std::optional<ScalarType> inter_dtype, std::string layout) {
  constexpr std::string_view op = "chunk_scaled_dot_kkt";
  const ScalarType type = inter_dtype.value_or(wide(view(op, "k", k)));
  Tensor A0 = empty(with_width(view(op, "beta", beta), chunk_size), type);
  kkt_out(k, gc, beta, cu_seqlens, chunk_size, layout, A0);
  return A0;
}

void solve_out(Tensor A0, Optional cu_seqlens, std::string layout_name, Tensor A) {
  constexpr std::string_view op = "solve_tril";
  const Layout layout = parse_layout(op, layout_name);
  const TensorView A0v = dense(op, "A0", A0);
  check_apart(op, {{"A", A}}, {{"cu_seqlens", cu_seqlens}});
  solve_tril(A0v, view(op, "A", A), boundaries_of(op, "A0", A0v, layout, false, cu_seqlens), layout);
}
Tensor solve(Tensor A0, Optional cu_seqlens, std::optional<ScalarType> inter_dtype, std::string layout) {
  const TensorView A0v = view("solve_tril", "A0", A0);
  Tensor A = empty(sizes_of(A0v), inter_dtype.value_or(wide(A0v)));
  solve_out(A0, cu_seqlens, layout, A);
  return A;
}

void wu_out(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor gc, Optional cu_seqlens, std::string layout_name,
            Tensor w, Tensor u) {
  constexpr std::string_view op = "recompute_w_u";
  const Layout layout = parse_layout(op, layout_name);
  const TensorView kv = dense(op, "k", k);
  check_apart(op, {{"w", w}, {"u", u}}, {{"cu_seqlens", cu_seqlens}});
  recompute_w_u(kv, dense(op, "v", v), view(op, "beta", beta), dense(op, "A", A), view(op, "gc", gc), view(op, "w", w),
                view(op, "u", u), boundaries_of(op, "k", kv, layout, false, cu_seqlens), layout);
}
std::tuple<Tensor, Tensor> wu(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor gc, Optional cu_seqlens,
                              std::optional<ScalarType> inter_dtype, std::string layout) {
  constexpr std::string_view op = "recompute_w_u";
  const TensorView kv = view(op, "k", k);
  const ScalarType type = inter_dtype.value_or(wide(kv));
  Tensor w = empty(with_width(view(op, "beta", beta), last_size(kv)), type);
  Tensor u = empty(sizes_of(view(op, "v", v)), type);
  wu_out(k, v, beta, A, gc, cu_seqlens, layout, w, u);
  return {w, u};
}

void fwd_h_out(Tensor k, Tensor w, Tensor u, Tensor gc, Optional initial_state, Optional cu_seqlens,
               std::int64_t chunk_size, bool state_v_first, std::string layout_name, Tensor h, Tensor v_new,
               Optional final_state) {
  constexpr std::string_view op = "chunk_gated_delta_rule_fwd_h";
  const Layout layout = parse_layout(op, layout_name);
  const TensorView kv = dense(op, "k", k);
  check_apart(op, {{"h", h}, {"v_new", v_new}, {"final_state", final_state}}, {{"cu_seqlens", cu_seqlens}});
  chunk_gated_delta_rule_fwd_h(
      kv, dense(op, "w", w), dense(op, "u", u), view(op, "gc", gc), dense(op, "initial_state", initial_state),
      view(op, "h", h), view(op, "v_new", v_new), view(op, "final_state", final_state),
      boundaries_of(op, "k", kv, layout, false, cu_seqlens), {chunk_size, state_v_first, layout});
}
std::tuple<Tensor, Tensor, Tensor> fwd_h(Tensor k, Tensor w, Tensor u, Tensor gc, Optional initial_state,
                                         Optional cu_seqlens, std::int64_t chunk_size, bool output_final_state,
                                         bool state_v_first, std::optional<std::int64_t> num_chunks,
                                         std::optional<ScalarType> inter_dtype, std::string layout_name) {
  constexpr std::string_view op = "chunk_gated_delta_rule_fwd_h";
  const Layout layout = parse_layout(op, layout_name);
  const TensorView kv = view(op, "k", k);
  const TensorView uv = view(op, "u", u);
  const TensorView gate = view(op, "gc", gc);
  const SeqLens seq = boundaries_of(op, "k", kv, layout, false, cu_seqlens);
  check(gate.rank == kv.rank - 1, op, ": gc: expected ", kv.rank - 1, " dimensions, got ", gate.rank, " in ",
        Shape{gate});
  check(uv.rank == kv.rank, op, ": u: expected ", kv.rank, " dimensions, got ", uv.rank, " in ", Shape{uv});
  const std::int64_t K = kv.size(-1);
  const std::int64_t V = uv.size(-1);
  const ScalarType type = inter_dtype.value_or(wide(kv));
  Tensor h = empty(chunk_state_sizes(op, seq, chunk_size, gate, layout, K, V, num_chunks), type);
  Tensor v_new = empty(sizes_of(uv), type);
  Tensor final_state = nothing(wide(kv));
  if (output_final_state) {
    final_state = empty(state_sizes(seq, gate, layout, K, V, state_v_first), wide(kv));
  }
  fwd_h_out(k, w, u, gc, initial_state, cu_seqlens, chunk_size, state_v_first, layout_name, h, v_new,
            output_final_state ? Optional(final_state) : Optional());
  return {h, v_new, final_state};
}

void fwd_o_out(Tensor q, Tensor k, Tensor v_new, Tensor h, Tensor gc, Optional cu_seqlens, std::optional<double> scale,
               std::int64_t chunk_size, std::string layout_name, Tensor o) {
  constexpr std::string_view op = "chunk_fwd_o";
  const Layout layout = parse_layout(op, layout_name);
  const TensorView qv = dense(op, "q", q);
  check_apart(op, {{"o", o}}, {{"cu_seqlens", cu_seqlens}});
  chunk_fwd_o(qv, dense(op, "k", k), dense(op, "v_new", v_new), dense(op, "h", h), view(op, "gc", gc), view(op, "o", o),
              boundaries_of(op, "q", qv, layout, false, cu_seqlens), {scale, chunk_size, layout});
}
Tensor fwd_o(Tensor q, Tensor k, Tensor v_new, Tensor h, Tensor gc, Optional cu_seqlens, std::optional<double> scale,
             std::int64_t chunk_size, std::string layout) {
  constexpr std::string_view op = "chunk_fwd_o";
  Tensor o = empty(sizes_of(view(op, "v_new", v_new)), scalar_type(view(op, "q", q).dtype));
  fwd_o_out(q, k, v_new, h, gc, cu_seqlens, scale, chunk_size, layout, o);
  return o;
}

}  // namespace

// cu_seqlens stands before the star because torch registers autograd only for positional tensors; pass it by keyword.
STABLE_TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  m.def(
      "chunk_local_cumsum(Tensor g, int chunk_size, Tensor? cu_seqlens=None, *, bool reverse=False, float scale=1.0, "
      "float? floor=None, ScalarType? out_dtype=None, str layout='BSND') -> Tensor out");
  m.def(
      "chunk_local_cumsum.out(Tensor g, int chunk_size, Tensor? cu_seqlens=None, *, bool reverse=False, "
      "float scale=1.0, float? floor=None, str layout='BSND', Tensor(a!) out) -> ()");
  m.def(
      "chunk_scaled_dot_kkt(Tensor k, Tensor? gc, Tensor beta, Tensor? cu_seqlens=None, *, int chunk_size=64, "
      "ScalarType? inter_dtype=None, str layout='BSND') -> Tensor A0");
  m.def(
      "chunk_scaled_dot_kkt.out(Tensor k, Tensor? gc, Tensor beta, Tensor? cu_seqlens=None, *, int chunk_size=64, "
      "str layout='BSND', Tensor(a!) A0) -> ()");
  m.def(
      "solve_tril(Tensor A0, Tensor? cu_seqlens=None, *, ScalarType? inter_dtype=None, str layout='BSND') -> Tensor A");
  m.def("solve_tril.out(Tensor A0, Tensor? cu_seqlens=None, *, str layout='BSND', Tensor(a!) A) -> ()");
  m.def(
      "recompute_w_u(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor gc, Tensor? cu_seqlens=None, *, "
      "ScalarType? inter_dtype=None, str layout='BSND') -> (Tensor w, Tensor u)");
  m.def(
      "recompute_w_u.out(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor gc, Tensor? cu_seqlens=None, *, "
      "str layout='BSND', Tensor(a!) w, Tensor(b!) u) -> ()");
  m.def(
      "chunk_gated_delta_rule_fwd_h(Tensor k, Tensor w, Tensor u, Tensor gc, Tensor? initial_state=None, "
      "Tensor? cu_seqlens=None, *, int chunk_size=64, bool output_final_state=False, bool state_v_first=False, "
      "int? num_chunks=None, ScalarType? inter_dtype=None, str layout='BSND') "
      "-> (Tensor h, Tensor v_new, Tensor final_state)");
  m.def(
      "chunk_gated_delta_rule_fwd_h.out(Tensor k, Tensor w, Tensor u, Tensor gc, Tensor? initial_state=None, "
      "Tensor? cu_seqlens=None, *, int chunk_size=64, bool state_v_first=False, str layout='BSND', Tensor(a!) h, "
      "Tensor(b!) v_new, Tensor(c!)? final_state=None) -> ()");
  m.def(
      "chunk_fwd_o(Tensor q, Tensor k, Tensor v_new, Tensor h, Tensor gc, Tensor? cu_seqlens=None, *, "
      "float? scale=None, int chunk_size=64, str layout='BSND') -> Tensor o");
  m.def(
      "chunk_fwd_o.out(Tensor q, Tensor k, Tensor v_new, Tensor h, Tensor gc, Tensor? cu_seqlens=None, *, "
      "float? scale=None, int chunk_size=64, str layout='BSND', Tensor(a!) o) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tidegate, CPU, m) {
  m.impl("chunk_local_cumsum", TORCH_BOX(&cumsum));
  m.impl("chunk_local_cumsum.out", TORCH_BOX(&cumsum_out));
  m.impl("chunk_scaled_dot_kkt", TORCH_BOX(&kkt));
  m.impl("chunk_scaled_dot_kkt.out", TORCH_BOX(&kkt_out));
  m.impl("solve_tril", TORCH_BOX(&solve));
  m.impl("solve_tril.out", TORCH_BOX(&solve_out));
  m.impl("recompute_w_u", TORCH_BOX(&wu));
  m.impl("recompute_w_u.out", TORCH_BOX(&wu_out));
  m.impl("chunk_gated_delta_rule_fwd_h", TORCH_BOX(&fwd_h));
  m.impl("chunk_gated_delta_rule_fwd_h.out", TORCH_BOX(&fwd_h_out));
  m.impl("chunk_fwd_o", TORCH_BOX(&fwd_o));
  m.impl("chunk_fwd_o.out", TORCH_BOX(&fwd_o_out));
}

}  // namespace tidegate::adapter
