// prepare_wy_repr_bwd, its first half _da and its second half _full: checks, partition, dispatch.
#include "base/arena.h"
#include "base/float_environment.h"
#include "ops/prepare_wy_repr_bwd/kernel.h"
#include "ops/prepare_wy_repr_bwd/reference.h"
#include "tidegate/chunk_backward.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {
namespace {

using wy_stage::Tensors;

// The inputs that all three have.
ChunkProblem check_inputs(std::string_view op, const Tensors& t, const SeqLens& seq, Layout layout) {
  const Named data{"k", t.k};
  DeltaSizes s = key_sizes(op, data, layout);
  value_sizes(op, {"v", t.v}, data, layout, s);
  check_beta(op, {"beta", t.beta}, data, layout, s);
  check_rank(op, {"A", t.A}, t.k.rank);
  const std::int64_t C = t.A.size(-1);
  check_chunk_size(op, {"A", t.A}, C);
  check_intermediate(op, {"A", t.A}, data, layout, s, C);
  check_intermediate(op, {"dw", t.dw}, data, layout, s, s.K);
  check_intermediate(op, {"du", t.du}, data, layout, s, s.V);
  check_gc(op, {"gc", t.gc}, data, layout, s);
  check_boundaries(op, seq, s);
  return chunk_problem(s, C, layout, seq);
}

void check_gradients(std::string_view op, const ChunkProblem& p, const Tensors& t) {
  const Named data{"k", t.k};
  check_key_gradient(op, {"dk", t.dk}, data, p.layout, p.size);
  check_intermediate(op, {"dv", t.dv}, data, p.layout, p.size, p.size.V);
  check_gc(op, {"dbeta", t.dbeta}, data, p.layout, p.size);
  check_gc(op, {"dg", t.dg}, data, p.layout, p.size);
  check_outputs(
      op, {{"dk", t.dk}, {"dv", t.dv}, {"dbeta", t.dbeta}, {"dg", t.dg}},
      {data, {"v", t.v}, {"beta", t.beta}, {"A", t.A}, {"dA", t.dA}, {"dw", t.dw}, {"du", t.du}, {"gc", t.gc}});
}

void launch(const ChunkProblem& p, const Tensors& t,
            void (*wy_stage::Kernels::*which)(const wy_stage::Args&, const ChunkSpan&, std::int64_t, float*) noexcept) {
  const auto typed = [&](const TensorView& x) { return typed_heads(x, p.layout); };
  const wy_stage::Args args{typed(t.k),  typed(t.v),  typed(t.beta), typed(t.A),    typed(t.dw),    typed(t.du),
                            typed(t.gc), typed(t.dA), typed(t.dk),   typed(t.dv),   typed(t.dbeta), typed(t.dg),
                            p.C,         p.size.K,    p.size.V,      p.size.group()};
  const auto& kernels = prepare_wy_repr_bwd_kernels_for(active_isa());
  const auto run = kernels.*which;
  const std::int64_t floats = kernels.scratch(args);
  const std::int64_t heads = p.size.HK;
  parallel_for(static_cast<std::int64_t>(p.chunks.size()) * heads, [&](std::int64_t task) {
    Scratch scratch;
    run(args, p.chunks[static_cast<std::size_t>(task / heads)], task % heads, scratch.floats(floats));
  });
}

}  // namespace

void prepare_wy_repr_bwd_da(const TensorView& k, const TensorView& v, const TensorView& beta, const TensorView& A,
                            const TensorView& dw, const TensorView& du, const TensorView& gc, const TensorView& dA,
                            const SeqLens& seq, Layout layout) {
  constexpr std::string_view op = "prepare_wy_repr_bwd_da";
  const FloatEnvironment environment;
  const Tensors t{k, v, beta, A, dw, du, gc, dA, {}, {}, {}, {}};
  const ChunkProblem p = check_inputs(op, t, seq, layout);
  check_intermediate(op, {"dA", dA}, {"k", k}, layout, p.size, p.C);
  check_outputs(op, {{"dA", dA}}, {{"k", k}, {"v", v}, {"beta", beta}, {"A", A}, {"dw", dw}, {"du", du}, {"gc", gc}});
  if (k.dtype == DType::kF64) {
    wy_stage::reference_da<double>(p, t);
    return;
  }
  launch(p, t, &wy_stage::Kernels::da);
}

void prepare_wy_repr_bwd_full(const TensorView& k, const TensorView& v, const TensorView& beta, const TensorView& A,
                              const TensorView& dA, const TensorView& dw, const TensorView& du, const TensorView& gc,
                              const TensorView& dk, const TensorView& dv, const TensorView& dbeta, const TensorView& dg,
                              const SeqLens& seq, Layout layout) {
  constexpr std::string_view op = "prepare_wy_repr_bwd_full";
  const FloatEnvironment environment;
  const Tensors t{k, v, beta, A, dw, du, gc, dA, dk, dv, dbeta, dg};
  const ChunkProblem p = check_inputs(op, t, seq, layout);
  check_intermediate(op, {"dA", dA}, {"k", k}, layout, p.size, p.C);
  check_gradients(op, p, t);
  if (k.dtype == DType::kF64) {
    wy_stage::reference_full<double>(p, t);
    return;
  }
  launch(p, t, &wy_stage::Kernels::full);
}

void prepare_wy_repr_bwd(const TensorView& k, const TensorView& v, const TensorView& beta, const TensorView& A,
                         const TensorView& dw, const TensorView& du, const TensorView& gc, const TensorView& dk,
                         const TensorView& dv, const TensorView& dbeta, const TensorView& dg, const SeqLens& seq,
                         Layout layout) {
  constexpr std::string_view op = "prepare_wy_repr_bwd";
  const FloatEnvironment environment;
  const Tensors t{k, v, beta, A, dw, du, gc, {}, dk, dv, dbeta, dg};
  const ChunkProblem p = check_inputs(op, t, seq, layout);
  check_gradients(op, p, t);
  if (k.dtype == DType::kF64) {
    wy_stage::reference_both<double>(p, t);
    return;
  }
  launch(p, t, &wy_stage::Kernels::both);
}

}  // namespace tidegate
