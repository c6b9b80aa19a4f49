// chunk_scaled_dot_kkt: checks, partition, dispatch.
#include "base/arena.h"
#include "base/float_environment.h"
#include "ops/chunk_scaled_dot_kkt/kernel.h"
#include "ops/chunk_scaled_dot_kkt/reference.h"
#include "tidegate/chunk.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {

void chunk_scaled_dot_kkt(const TensorView& k, const TensorView& gc, const TensorView& beta, const TensorView& A0,
                          const SeqLens& seq, const ChunkOptions& options) {
  constexpr std::string_view op = "chunk_scaled_dot_kkt";
  const FloatEnvironment environment;
  const Layout layout = options.layout;
  const Named data{"k", k};
  DeltaSizes s = key_sizes(op, data, layout);
  gate_heads(op, {"beta", beta}, data, layout, s);
  check_beta(op, {"beta", beta}, data, layout, s);
  if (gc.defined()) {
    check_gc(op, {"gc", gc}, data, layout, s);
  }
  check_chunk_size(op, {"chunk_size", {}}, options.chunk_size);
  check_intermediate(op, {"A0", A0}, data, layout, s, options.chunk_size);
  check_boundaries(op, seq, s);
  check_outputs(op, {{"A0", A0}}, {data, {"gc", gc}, {"beta", beta}});
  const ChunkProblem p = chunk_problem(s, options.chunk_size, layout, seq);
  if (k.dtype == DType::kF64) {
    kkt_stage::reference<double>(p, k, gc, beta, A0);
    return;
  }
  const kkt_stage::Args args{typed_heads(k, layout),
                             typed_heads(gc, layout),
                             typed_heads(beta, layout),
                             typed_heads(A0, layout),
                             p.C,
                             s.K,
                             s.group()};
  const auto& kernels = chunk_scaled_dot_kkt_kernels_for(active_isa());
  const std::int64_t floats = kernels.scratch(args);
  parallel_for(static_cast<std::int64_t>(p.chunks.size()) * s.HK, [&](std::int64_t task) {
    Scratch scratch;
    kernels.run(args, p.chunks[static_cast<std::size_t>(task / s.HK)], task % s.HK, scratch.floats(floats));
  });
}

}  // namespace tidegate
