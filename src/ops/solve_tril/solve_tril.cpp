// solve_tril: checks, partition, dispatch.
#include "base/arena.h"
#include "base/float_environment.h"
#include "ops/solve_tril/kernel.h"
#include "ops/solve_tril/reference.h"
#include "tidegate/chunk.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {

void solve_tril(const TensorView& A0, const TensorView& A, const SeqLens& seq, Layout layout) {
  constexpr std::string_view op = "solve_tril";
  const FloatEnvironment environment;
  DeltaSizes s = key_sizes(op, {"A0", A0}, layout);  // its heads are value heads, its last size is C
  s.HV = s.HK;
  const std::int64_t C = s.K;
  check_chunk_size(op, {"A0", A0}, C);
  check_tokens_heads(op, {"A", A}, layout, s, s.HV, C);
  check_data_type(op, {"A", A});
  check_wide(op, {"A", A}, {"A0", A0});
  check_boundaries(op, seq, s);
  check_outputs(op, {{"A", A}}, {{"A0", A0}});
  const ChunkProblem p = chunk_problem(s, C, layout, seq);
  if (A0.dtype == DType::kF64) {
    solve_stage::reference<double>(p, A0, A);
    return;
  }
  const solve_stage::Args args{typed_heads(A0, layout), typed_heads(A, layout), C};
  const auto& kernels = solve_tril_kernels_for(active_isa());
  const std::int64_t floats = kernels.scratch(args);
  parallel_for(static_cast<std::int64_t>(p.chunks.size()) * s.HV, [&](std::int64_t task) {
    Scratch scratch;
    kernels.run(args, p.chunks[static_cast<std::size_t>(task / s.HV)], task % s.HV, scratch.floats(floats));
  });
}

}  // namespace tidegate
