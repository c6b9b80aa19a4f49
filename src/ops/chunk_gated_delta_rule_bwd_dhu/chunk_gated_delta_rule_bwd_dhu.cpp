// chunk_gated_delta_rule_bwd_dhu: checks, partition, dispatch.
#include "base/arena.h"
#include "base/float_environment.h"
#include "ops/chunk_gated_delta_rule_bwd_dhu/kernel.h"
#include "ops/chunk_gated_delta_rule_bwd_dhu/reference.h"
#include "tidegate/chunk.h"
#include "tidegate/chunk_backward.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {

void chunk_gated_delta_rule_bwd_dhu(const TensorView& q, const TensorView& k, const TensorView& w,
                                    const TensorView& d_o, const TensorView& dv, const TensorView& gc,
                                    const TensorView& dfinal_state, const TensorView& dh, const TensorView& dh0,
                                    const TensorView& dv2, const SeqLens& seq, const ChunkBwdDhuOptions& options) {
  constexpr std::string_view op = "chunk_gated_delta_rule_bwd_dhu";
  const FloatEnvironment environment;
  const Layout layout = options.layout;
  const bool v_first = options.state_v_first;
  const Named data{"q", q};
  DeltaSizes s = key_sizes(op, data, layout);
  check_keys(op, {"k", k}, data);
  value_sizes(op, {"do", d_o}, data, layout, s);
  check_intermediate(op, {"w", w}, data, layout, s, s.K);
  check_intermediate(op, {"dv", dv}, data, layout, s, s.V);
  check_gc(op, {"gc", gc}, data, layout, s);
  check_chunk_size(op, {"chunk_size", {}}, options.chunk_size);
  check_boundaries(op, seq, s);
  if (dfinal_state.defined()) {
    check_states(op, {"dfinal_state", dfinal_state}, seq.count(), s, v_first);
    check_data_type(op, {"dfinal_state", dfinal_state});
    check_wide(op, {"dfinal_state", dfinal_state}, data);
  }
  const double scale = scale_or_default(op, options.scale, s.K);
  check_chunk_states(op, {"dh", dh}, data, layout, s, chunks_per_row(seq, options.chunk_size));
  check_states(op, {"dh0", dh0}, seq.count(), s, v_first);
  check_dtype(op, {"dh0", dh0}, q.dtype == DType::kF64 ? DType::kF64 : DType::kF32);
  check_intermediate(op, {"dv2", dv2}, data, layout, s, s.V);
  check_outputs(op, {{"dh", dh}, {"dh0", dh0}, {"dv2", dv2}},
                {data, {"k", k}, {"w", w}, {"do", d_o}, {"dv", dv}, {"gc", gc}, {"dfinal_state", dfinal_state}});
  const ChunkProblem p = chunk_problem(s, options.chunk_size, layout, seq);
  if (q.dtype == DType::kF64) {
    dhu_stage::reference<double>(p, q, k, w, d_o, dv, gc, dfinal_state, dh, dh0, dv2, scale, v_first);
    return;
  }
  const dhu_stage::Args args{typed_heads(q, layout),
                             typed_heads(k, layout),
                             typed_heads(w, layout),
                             typed_heads(d_o, layout),
                             typed_heads(dv, layout),
                             typed_heads(gc, layout),
                             typed_heads(dh, layout),
                             typed_heads(dv2, layout),
                             states_of(dfinal_state, v_first),
                             states_of(dh0, v_first),
                             p.C,
                             s.K,
                             s.V,
                             s.group(),
                             dh.stride(-2),
                             static_cast<float>(scale)};
  const auto& kernels = chunk_gated_delta_rule_bwd_dhu_kernels_for(active_isa());
  const std::int64_t floats = kernels.scratch(args);
  const std::int64_t blocks = (s.V + kStateColumns - 1) / kStateColumns;
  const std::vector<std::size_t> first = first_chunks(p);
  parallel_for(p.sequences * s.HV * blocks, [&](std::int64_t task) {
    const auto n = static_cast<std::size_t>(task / (s.HV * blocks));
    Scratch scratch;
    kernels.run(args, static_cast<std::int64_t>(n), p.chunks.data() + first[n],
                static_cast<std::int64_t>(first[n + 1] - first[n]), task / blocks % s.HV, task % blocks * kStateColumns,
                scratch.floats(floats));
  });
}

}  // namespace tidegate
