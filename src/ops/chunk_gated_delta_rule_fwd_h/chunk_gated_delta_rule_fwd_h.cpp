// chunk_gated_delta_rule_fwd_h: checks, partition, dispatch.
#include "base/arena.h"
#include "base/float_environment.h"
#include "ops/chunk_gated_delta_rule_fwd_h/kernel.h"
#include "ops/chunk_gated_delta_rule_fwd_h/reference.h"
#include "tidegate/chunk.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {

void chunk_gated_delta_rule_fwd_h(const TensorView& k, const TensorView& w, const TensorView& u, const TensorView& gc,
                                  const TensorView& initial_state, const TensorView& h, const TensorView& v_new,
                                  const TensorView& final_state, const SeqLens& seq, const ChunkFwdHOptions& options) {
  constexpr std::string_view op = "chunk_gated_delta_rule_fwd_h";
  const FloatEnvironment environment;
  const Layout layout = options.layout;
  const bool v_first = options.state_v_first;
  const Named data{"k", k};
  DeltaSizes s = key_sizes(op, data, layout);
  check_rank(op, {"u", u}, k.rank);
  gate_heads(op, {"gc", gc}, data, layout, s);
  s.V = u.size(-1);
  check(s.V >= 1, op, ": u: expected at least 1 channel, got ", s.V);
  check_intermediate(op, {"w", w}, data, layout, s, s.K);
  check_intermediate(op, {"u", u}, data, layout, s, s.V);
  check_gc(op, {"gc", gc}, data, layout, s);
  check_chunk_size(op, {"chunk_size", {}}, options.chunk_size);
  check_boundaries(op, seq, s);
  if (initial_state.defined()) {
    check_states(op, {"initial_state", initial_state}, seq.count(), s, v_first);
    check_data_type(op, {"initial_state", initial_state});
    check_wide(op, {"initial_state", initial_state}, data);
  }
  check_chunk_states(op, {"h", h}, data, layout, s, chunks_per_row(seq, options.chunk_size));
  check_intermediate(op, {"v_new", v_new}, data, layout, s, s.V);
  if (final_state.defined()) {
    check_states(op, {"final_state", final_state}, seq.count(), s, v_first);
    check_dtype(op, {"final_state", final_state}, k.dtype == DType::kF64 ? DType::kF64 : DType::kF32);
  }
  check_outputs(op, {{"h", h}, {"v_new", v_new}, {"final_state", final_state}},
                {data, {"w", w}, {"u", u}, {"gc", gc}, {"initial_state", initial_state}});
  const ChunkProblem p = chunk_problem(s, options.chunk_size, layout, seq);
  if (k.dtype == DType::kF64) {
    h_stage::reference<double>(p, k, w, u, gc, initial_state, h, v_new, final_state, v_first);
    return;
  }
  const h_stage::Args args{typed_heads(k, layout),
                           typed_heads(w, layout),
                           typed_heads(u, layout),
                           typed_heads(gc, layout),
                           typed_heads(h, layout),
                           typed_heads(v_new, layout),
                           states_of(initial_state, v_first),
                           states_of(final_state, v_first),
                           p.C,
                           s.K,
                           s.V,
                           s.group(),
                           h.stride(-2)};
  const auto& kernels = chunk_gated_delta_rule_fwd_h_kernels_for(active_isa());
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
