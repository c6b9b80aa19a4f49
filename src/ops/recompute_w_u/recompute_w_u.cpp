// recompute_w_u: checks, partition, dispatch.
#include "base/arena.h"
#include "base/float_environment.h"
#include "ops/recompute_w_u/kernel.h"
#include "ops/recompute_w_u/reference.h"
#include "tidegate/chunk.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {

void recompute_w_u(const TensorView& k, const TensorView& v, const TensorView& beta, const TensorView& A,
                   const TensorView& gc, const TensorView& w, const TensorView& u, const SeqLens& seq, Layout layout) {
  constexpr std::string_view op = "recompute_w_u";
  const FloatEnvironment environment;
  const Named data{"k", k};
  DeltaSizes s = key_sizes(op, data, layout);
  value_sizes(op, {"v", v}, data, layout, s);
  check_beta(op, {"beta", beta}, data, layout, s);
  check_rank(op, {"A", A}, k.rank);
  const std::int64_t C = A.size(-1);
  check_chunk_size(op, {"A", A}, C);
  check_intermediate(op, {"A", A}, data, layout, s, C);
  check_gc(op, {"gc", gc}, data, layout, s);
  check_intermediate(op, {"w", w}, data, layout, s, s.K);
  check_intermediate(op, {"u", u}, data, layout, s, s.V);
  check_boundaries(op, seq, s);
  check_outputs(op, {{"w", w}, {"u", u}}, {data, {"v", v}, {"beta", beta}, {"A", A}, {"gc", gc}});
  const ChunkProblem p = chunk_problem(s, C, layout, seq);
  if (k.dtype == DType::kF64) {
    wu_stage::reference<double>(p, k, v, beta, A, gc, w, u);
    return;
  }
  const wu_stage::Args args{typed_heads(k, layout),
                            typed_heads(v, layout),
                            typed_heads(beta, layout),
                            typed_heads(A, layout),
                            typed_heads(gc, layout),
                            typed_heads(w, layout),
                            typed_heads(u, layout),
                            C,
                            s.K,
                            s.V,
                            s.group()};
  const auto& kernels = recompute_w_u_kernels_for(active_isa());
  const std::int64_t floats = kernels.scratch(args);
  parallel_for(static_cast<std::int64_t>(p.chunks.size()) * s.HV, [&](std::int64_t task) {
    Scratch scratch;
    kernels.run(args, p.chunks[static_cast<std::size_t>(task / s.HV)], task % s.HV, scratch.floats(floats));
  });
}

}  // namespace tidegate
