// chunk_bwd_dqkwg: checks, partition, dispatch.
#include "base/arena.h"
#include "base/float_environment.h"
#include "ops/chunk_bwd_dqkwg/kernel.h"
#include "ops/chunk_bwd_dqkwg/reference.h"
#include "tidegate/chunk.h"
#include "tidegate/chunk_backward.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {

void chunk_bwd_dqkwg(const TensorView& q, const TensorView& k, const TensorView& v_new, const TensorView& gc,
                     const TensorView& h, const TensorView& d_o, const TensorView& dh, const TensorView& dv2,
                     const TensorView& dq, const TensorView& dk, const TensorView& dw, const TensorView& dg,
                     const SeqLens& seq, const ChunkBwdOptions& options) {
  constexpr std::string_view op = "chunk_bwd_dqkwg";
  const FloatEnvironment environment;
  const Layout layout = options.layout;
  const Named data{"q", q};
  DeltaSizes s = key_sizes(op, data, layout);
  check_keys(op, {"k", k}, data);
  value_sizes(op, {"do", d_o}, data, layout, s);
  check_intermediate(op, {"v_new", v_new}, data, layout, s, s.V);
  check_gc(op, {"gc", gc}, data, layout, s);
  check_chunk_size(op, {"chunk_size", {}}, options.chunk_size);
  check_boundaries(op, seq, s);
  const std::int64_t chunks = chunks_per_row(seq, options.chunk_size);
  check_chunk_states(op, {"h", h}, data, layout, s, chunks);
  check_chunk_states(op, {"dh", dh}, data, layout, s, chunks);
  check_intermediate(op, {"dv2", dv2}, data, layout, s, s.V);
  const double scale = scale_or_default(op, options.scale, s.K);
  check_key_gradient(op, {"dq", dq}, data, layout, s);
  check_key_gradient(op, {"dk", dk}, data, layout, s);
  check_intermediate(op, {"dw", dw}, data, layout, s, s.K);
  check_gc(op, {"dg", dg}, data, layout, s);
  check_outputs(op, {{"dq", dq}, {"dk", dk}, {"dw", dw}, {"dg", dg}},
                {data, {"k", k}, {"v_new", v_new}, {"gc", gc}, {"h", h}, {"do", d_o}, {"dh", dh}, {"dv2", dv2}});
  const ChunkProblem p = chunk_problem(s, options.chunk_size, layout, seq);
  if (q.dtype == DType::kF64) {
    dqkwg_stage::reference<double>(p, {q, k, v_new, gc, h, d_o, dh, dv2, dq, dk, dw, dg}, scale);
    return;
  }
  const auto typed = [&](const TensorView& t) { return typed_heads(t, layout); };
  const dqkwg_stage::Args args{typed(q),
                               typed(k),
                               typed(v_new),
                               typed(gc),
                               typed(h),
                               typed(d_o),
                               typed(dh),
                               typed(dv2),
                               typed(dq),
                               typed(dk),
                               typed(dw),
                               typed(dg),
                               p.C,
                               s.K,
                               s.V,
                               s.group(),
                               h.stride(-2),
                               dh.stride(-2),
                               static_cast<float>(scale)};
  const auto& kernels = chunk_bwd_dqkwg_kernels_for(active_isa());
  const std::int64_t floats = kernels.scratch(args);
  parallel_for(static_cast<std::int64_t>(p.chunks.size()) * s.HK, [&](std::int64_t task) {
    Scratch scratch;
    kernels.run(args, p.chunks[static_cast<std::size_t>(task / s.HK)], task % s.HK, scratch.floats(floats));
  });
}

}  // namespace tidegate
