// chunk_bwd_dv_local: checks, partition, dispatch.
#include "base/arena.h"
#include "base/float_environment.h"
#include "ops/chunk_bwd_dv_local/kernel.h"
#include "ops/chunk_bwd_dv_local/reference.h"
#include "tidegate/chunk_backward.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {

void chunk_bwd_dv_local(const TensorView& q, const TensorView& k, const TensorView& d_o, const TensorView& gc,
                        const TensorView& dv, const SeqLens& seq, const ChunkBwdOptions& options) {
  constexpr std::string_view op = "chunk_bwd_dv_local";
  const FloatEnvironment environment;
  const Layout layout = options.layout;
  const Named data{"q", q};
  DeltaSizes s = key_sizes(op, data, layout);
  check_keys(op, {"k", k}, data);
  value_sizes(op, {"do", d_o}, data, layout, s);
  check_gc(op, {"gc", gc}, data, layout, s);
  check_chunk_size(op, {"chunk_size", {}}, options.chunk_size);
  check_boundaries(op, seq, s);
  const double scale = scale_or_default(op, options.scale, s.K);
  check_intermediate(op, {"dv", dv}, data, layout, s, s.V);
  check_outputs(op, {{"dv", dv}}, {data, {"k", k}, {"do", d_o}, {"gc", gc}});
  const ChunkProblem p = chunk_problem(s, options.chunk_size, layout, seq);
  if (q.dtype == DType::kF64) {
    dv_local_stage::reference<double>(p, q, k, d_o, gc, dv, scale);
    return;
  }
  const dv_local_stage::Args args{typed_heads(q, layout),
                                  typed_heads(k, layout),
                                  typed_heads(d_o, layout),
                                  typed_heads(gc, layout),
                                  typed_heads(dv, layout),
                                  p.C,
                                  s.K,
                                  s.V,
                                  s.group(),
                                  static_cast<float>(scale)};
  const auto& kernels = chunk_bwd_dv_local_kernels_for(active_isa());
  const std::int64_t floats = kernels.scratch(args);
  parallel_for(static_cast<std::int64_t>(p.chunks.size()) * s.HK, [&](std::int64_t task) {
    Scratch scratch;
    kernels.run(args, p.chunks[static_cast<std::size_t>(task / s.HK)], task % s.HK, scratch.floats(floats));
  });
}

}  // namespace tidegate
