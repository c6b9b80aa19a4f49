// chunk_fwd_o: checks, partition, dispatch.
#include "base/arena.h"
#include "base/float_environment.h"
#include "ops/chunk_fwd_o/kernel.h"
#include "ops/chunk_fwd_o/reference.h"
#include "tidegate/chunk.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {

void chunk_fwd_o(const TensorView& q, const TensorView& k, const TensorView& v_new, const TensorView& h,
                 const TensorView& gc, const TensorView& o, const SeqLens& seq, const ChunkFwdOOptions& options) {
  constexpr std::string_view op = "chunk_fwd_o";
  const FloatEnvironment environment;
  const Layout layout = options.layout;
  const Named data{"q", q};
  DeltaSizes s = key_sizes(op, data, layout);
  check_keys(op, {"k", k}, data);
  check_rank(op, {"v_new", v_new}, q.rank);
  gate_heads(op, {"gc", gc}, data, layout, s);
  s.V = v_new.size(-1);
  check(s.V >= 1, op, ": v_new: expected at least 1 channel, got ", s.V);
  check_intermediate(op, {"v_new", v_new}, data, layout, s, s.V);
  check_gc(op, {"gc", gc}, data, layout, s);
  check_chunk_size(op, {"chunk_size", {}}, options.chunk_size);
  check_boundaries(op, seq, s);
  check_chunk_states(op, {"h", h}, data, layout, s, chunks_per_row(seq, options.chunk_size));
  const double scale = scale_or_default(op, options.scale, s.K);
  check_tokens_heads(op, {"o", o}, layout, s, s.HV, s.V);
  check_same_dtype(op, {"o", o}, data);
  check_outputs(op, {{"o", o}}, {data, {"k", k}, {"v_new", v_new}, {"h", h}, {"gc", gc}});
  const ChunkProblem p = chunk_problem(s, options.chunk_size, layout, seq);
  if (q.dtype == DType::kF64) {
    o_stage::reference<double>(p, q, k, v_new, h, gc, o, scale);
    return;
  }
  const o_stage::Args args{typed_heads(q, layout),
                           typed_heads(k, layout),
                           typed_heads(v_new, layout),
                           typed_heads(h, layout),
                           typed_heads(gc, layout),
                           typed_heads(o, layout),
                           p.C,
                           s.K,
                           s.V,
                           s.group(),
                           h.stride(-2),
                           static_cast<float>(scale)};
  const auto& kernels = chunk_fwd_o_kernels_for(active_isa());
  const std::int64_t floats = kernels.scratch(args);
  parallel_for(static_cast<std::int64_t>(p.chunks.size()) * s.HK, [&](std::int64_t task) {
    Scratch scratch;
    kernels.run(args, p.chunks[static_cast<std::size_t>(task / s.HK)], task % s.HK, scratch.floats(floats));
  });
}

}  // namespace tidegate
