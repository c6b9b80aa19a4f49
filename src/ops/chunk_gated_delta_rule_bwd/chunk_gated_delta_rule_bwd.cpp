// chunk_gated_delta_rule_bwd: from checked arguments to kernels.
#include <algorithm>
#include <atomic>
#include <vector>

#include "base/element.h"
#include "base/float_environment.h"
#include "ops/chunk_gated_delta_rule_bwd/kernel.h"
#include "ops/chunk_gated_delta_rule_bwd/problem.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {
namespace delta_rule_gradient {
namespace {

using chunk_gated_delta_rule::Problem;
static_assert(kGroupTokens == kSavedStateTokens);

const Kernels& kernels() { return chunk_gated_delta_rule_bwd_kernels_for(active_isa()); }

GateGradient gate_gradient(const TensorView& t, Layout layout) {
  return {gates_of(t, layout), t.defined() ? data_type_index(t.dtype) : 0};
}

Args make_args(const Problem& p, const Tensors& t, const ChunkGatedDeltaRuleGradients& d,
               const ChunkGatedDeltaRuleOptions& options, Scratch& scratch) {
  Args a{};
  a.rule = chunk_gated_delta_rule::make_args(p, t.rule, options, scratch);
  a.rule.q = heads_of(t.rule.q, p.layout);
  a.o_gradient = heads_of(t.d_o, p.out_layout);
  a.final_gradient = chunk_gated_delta_rule::states_of(t.dfinal_state, options.state_v_first);
  a.saved = chunk_gated_delta_rule::states_of(t.states, false);
  a.dq = heads_of(d.dq, p.layout);
  a.dk = heads_of(d.dk, p.layout);
  a.dv = heads_of(d.dv, p.layout);
  a.dg = gate_gradient(d.dg, p.layout);
  a.dbeta = gate_gradient(d.dbeta, p.layout);
  a.initial_gradient = chunk_gated_delta_rule::states_of(d.dh0, options.state_v_first);
  a.head_count = p.sizes.HV;
  a.zero_row_safe = options.zero_row_safe;
  return a;
}

// One key head over one sequence each, the longest first. What the value heads of a key head share is summed inside a
// unit, so the bits do not depend on who runs it.
std::vector<Unit> plan(const SeqLens& seq, std::int64_t key_heads) {
  std::vector<Unit> units;
  std::int64_t saved = 0;
  for (std::int64_t n = 0; n < seq.count(); ++n) {
    const Sequence& s = seq[n];
    for (std::int64_t h = 0; h < key_heads; ++h) {
      units.push_back({s.row, s.begin, s.end, n, h, saved});
    }
    saved += std::max<std::int64_t>(s.length() - 1, 0) / kGroupTokens;
  }
  std::stable_sort(units.begin(), units.end(),
                   [](const Unit& a, const Unit& b) { return a.end - a.begin > b.end - b.begin; });
  return units;
}

// Over the sequences, one after the other.
void add_up(const std::vector<double>& sums, std::int64_t sequences, std::int64_t HV, int which, const TensorView& to) {
  for (std::int64_t h = 0; h < HV && to.defined(); ++h) {
    double total = 0.0;
    for (std::int64_t n = 0; n < sequences; ++n) {
      total += sums[static_cast<std::size_t>((n * HV + h) * 2 + which)];
    }
    write_element(to, h * to.strides[0], total);
  }
}

void run(const Problem& p, const Tensors& t, const ChunkGatedDeltaRuleGradients& d, const SeqLens& seq,
         const ChunkGatedDeltaRuleOptions& options) {
  Scratch scratch;
  Args args = make_args(p, t, d, options, scratch);
  std::vector<double> sums;
  if (d.dA_log.defined() || d.ddt_bias.defined()) {
    sums.assign(static_cast<std::size_t>(seq.count() * p.sizes.HV * 2), 0.0);
    args.sums = sums.data();
  }
  const std::vector<Unit> units = plan(seq, p.sizes.HK);
  const auto kernel = kernels().run[data_type_index(t.rule.k.dtype)];
  const auto count = static_cast<std::int64_t>(units.size());
  std::atomic<std::int64_t> next{0};
  parallel_for(std::min<std::int64_t>(count, parallel_threads()), [&](std::int64_t) {
    Scratch own;
    float* workspace = own.floats(kernels().workspace(args));
    for (std::int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      kernel(args, units[static_cast<std::size_t>(i)], workspace);
    }
  });
  add_up(sums, seq.count(), p.sizes.HV, 0, d.dA_log);
  add_up(sums, seq.count(), p.sizes.HV, 1, d.ddt_bias);
}

// The forward once more, for the states that it was not asked to leave.
void run_without_states(const Problem& p, Tensors t, const ChunkGatedDeltaRuleGradients& d, const SeqLens& seq,
                        const ChunkGatedDeltaRuleOptions& options) {
  const DeltaSizes& z = p.sizes;
  const std::vector<SnapshotPoint> points = saved_states(seq);
  const auto count = static_cast<std::int64_t>(points.size());
  std::vector<float> memory(static_cast<std::size_t>(count * z.HV * z.K * z.V));
  t.states = contiguous(memory.data(), DType::kF32, {count, z.HV, z.K, z.V});
  if (count > 0) {
    chunk_gated_delta_rule::Tensors forward = t.rule;
    forward.snapshots = t.states;
    if (options.state_v_first) {
      std::swap(forward.snapshots.sizes[2], forward.snapshots.sizes[3]);
      std::swap(forward.snapshots.strides[2], forward.snapshots.strides[3]);
    }
    ChunkGatedDeltaRuleOptions with_points = options;
    with_points.snapshot_at = points;
    with_points.time_segments = 1;
    chunk_gated_delta_rule::run(p, forward, seq, with_points);
  }
  run(p, t, d, seq, options);
}

}  // namespace
}  // namespace delta_rule_gradient

void chunk_gated_delta_rule_bwd(const TensorView& d_o, const TensorView& dfinal_state, const TensorView& q,
                                const TensorView& k, const TensorView& v, const TensorView& g, const TensorView& beta,
                                const TensorView& initial_state, const TensorView& states,
                                const ChunkGatedDeltaRuleGradients& gradients, const SeqLens& seq,
                                const ChunkGatedDeltaRuleOptions& options) {
  const FloatEnvironment environment;
  const delta_rule_gradient::Tensors t{d_o, dfinal_state, {q, k, v, g, beta, initial_state, {}, {}, {}}, states};
  const chunk_gated_delta_rule::Problem p = check_call(t, gradients, seq, options);
  if (k.dtype == DType::kF64) {
    delta_rule_gradient::reference_bwd<double>(p, t, gradients, seq, options);
  } else if (states.defined()) {
    delta_rule_gradient::run(p, t, gradients, seq, options);
  } else {
    delta_rule_gradient::run_without_states(p, t, gradients, seq, options);
  }
}

std::vector<SnapshotPoint> saved_states(const SeqLens& seq) {
  std::vector<SnapshotPoint> points;
  for (std::int64_t n = 0; n < seq.count(); ++n) {
    for (std::int64_t tokens = kSavedStateTokens; tokens < seq[n].length(); tokens += kSavedStateTokens) {
      points.push_back({n, tokens});
    }
  }
  return points;
}

}  // namespace tidegate
