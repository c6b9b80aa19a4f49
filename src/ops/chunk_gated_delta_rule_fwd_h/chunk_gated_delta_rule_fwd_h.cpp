// chunk_gated_delta_rule_fwd_h: checks, partition, dispatch.
#include "base/arena.h"
#include "base/float_environment.h"
#include "ops/chunk_gated_delta_rule_fwd_h/kernel.h"
#include "ops/chunk_gated_delta_rule_fwd_h/reference.h"
#include "tidegate/chunk.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {
namespace {

using namespace h_stage;

void check_states(std::string_view op, Named t, std::int64_t sequences, const DeltaSizes& s, bool v_first) {
  check_rank(op, t, 4);
  check(t.tensor.size(0) == sequences, op, ": ", t.name, ": expected ", sequences, " states (one per sequence), got ",
        t.tensor.size(0));
  check_shape(op, t, {sequences, s.HV, v_first ? s.V : s.K, v_first ? s.K : s.V});
  check_inner_stride(op, t);
}

States states_of(const TensorView& t, bool v_first) {
  if (!t.defined()) {
    return {};
  }
  return {t.data,       data_type_index(t.dtype),   t.strides[0],
          t.strides[1], t.strides[v_first ? 3 : 2], t.strides[v_first ? 2 : 3]};
}

// Where the chunks of every sequence begin in the list, and its end.
std::vector<std::size_t> first_chunks(const ChunkProblem& p) {
  std::vector<std::size_t> first(static_cast<std::size_t>(p.sequences) + 1, 0);
  for (const ChunkSpan& c : p.chunks) {
    ++first[static_cast<std::size_t>(c.sequence) + 1];
  }
  for (std::size_t n = 1; n < first.size(); ++n) {
    first[n] += first[n - 1];
  }
  return first;
}

}  // namespace

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
    reference<double>(p, k, w, u, gc, initial_state, h, v_new, final_state, v_first);
    return;
  }
  const Args args{typed_heads(k, layout),
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
  const std::int64_t blocks = (s.V + kColumns - 1) / kColumns;
  const std::vector<std::size_t> first = first_chunks(p);
  parallel_for(p.sequences * s.HV * blocks, [&](std::int64_t task) {
    const auto n = static_cast<std::size_t>(task / (s.HV * blocks));
    Scratch scratch;
    kernels.run(args, static_cast<std::int64_t>(n), p.chunks.data() + first[n],
                static_cast<std::int64_t>(first[n + 1] - first[n]), task / blocks % s.HV, task % blocks * kColumns,
                scratch.floats(floats));
  });
}

}  // namespace tidegate
