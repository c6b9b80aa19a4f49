// chunk_gated_delta_rule_fwd: from checked arguments to kernels.
#include <atomic>
#include <cmath>
#include <cstring>

#include "base/arena.h"
#include "base/element.h"
#include "base/float_environment.h"
#include "ops/chunk_gated_delta_rule/kernel.h"
#include "ops/chunk_gated_delta_rule/plan.h"
#include "ops/chunk_gated_delta_rule/problem.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {
namespace chunk_gated_delta_rule {
namespace {

// States of one piece stay in the second cache.
constexpr std::int64_t kStateBytes = 256 * 1024;

// The snapshots of every sequence, ascending by token. Those of sequence n start at first[n].
struct SnapshotLists {
  std::vector<Snapshot> all;
  std::vector<std::size_t> first;
};
SnapshotLists snapshot_lists(const SeqLens& seq, std::span<const SnapshotPoint> points) {
  std::vector<std::size_t> order(points.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    order[i] = i;
  }
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::pair(points[a].sequence, points[a].tokens) < std::pair(points[b].sequence, points[b].tokens);
  });
  SnapshotLists lists;
  lists.first.assign(static_cast<std::size_t>(seq.count()) + 1, 0);
  for (const std::size_t i : order) {
    lists.all.push_back({points[i].tokens, static_cast<std::int64_t>(i)});
    ++lists.first[static_cast<std::size_t>(points[i].sequence) + 1];
  }
  for (std::size_t n = 1; n < lists.first.size(); ++n) {
    lists.first[n] += lists.first[n - 1];
  }
  return lists;
}

// The output of a sequence that is skipped.
void clear_output(const Args& a, const Problem& p, const Sequence& s, int bytes) {
  for (std::int64_t t = s.begin; t < s.end; ++t) {
    for (std::int64_t h = 0; h < p.sizes.HV; ++h) {
      const std::int64_t offset = s.row * a.o.row + t * a.o.token + h * a.o.head;
      std::memset(static_cast<char*>(a.o.data) + offset * bytes, 0, static_cast<std::size_t>(p.sizes.V * bytes));
    }
  }
}

}  // namespace

States states_of(const TensorView& t, bool v_first) {
  if (!t.defined()) {
    return {};
  }
  return {t.data,       data_type_index(t.dtype),   t.strides[0],
          t.strides[1], t.strides[v_first ? 3 : 2], t.strides[v_first ? 2 : 3]};
}

Args make_args(const Problem& p, const Tensors& t, const ChunkGatedDeltaRuleOptions& options, Scratch& scratch) {
  Args a{};
  a.q = t.o.defined() ? heads_of(t.q, p.layout) : Heads{};
  a.k = heads_of(t.k, p.layout);
  a.v = heads_of(t.v, p.layout);
  a.o = heads_of(t.o, p.out_layout);
  a.g = gates_of(t.g, p.layout);
  a.beta = gates_of(t.beta, p.layout);
  a.g_type = data_type_index(t.g.dtype);
  a.beta_type = data_type_index(t.beta.dtype);
  a.initial = states_of(t.initial_state, options.state_v_first);
  a.final_state = states_of(t.final_state, options.state_v_first);
  a.snapshots = states_of(t.snapshots, options.state_v_first);
  a.group = p.sizes.group();
  a.K = p.sizes.K;
  a.V = p.sizes.V;
  a.scale = static_cast<float>(p.scale);
  a.beta_scale = static_cast<float>(options.beta_scale);
  a.use_qk_l2norm = options.use_qk_l2norm;
  a.beta_sigmoid = options.beta_sigmoid;
  if (options.A_log.defined()) {
    float* rate = scratch.floats(p.sizes.HV);
    float* bias = scratch.floats(p.sizes.HV);
    std::memset(bias, 0, static_cast<std::size_t>(p.sizes.HV) * sizeof(float));
    for (std::int64_t h = 0; h < p.sizes.HV; ++h) {
      rate[h] = static_cast<float>(std::exp(read_element(options.A_log, h * options.A_log.strides[0])));
    }
    if (options.dt_bias.defined()) {
      copy_parameter(options.dt_bias, bias);
    }
    a.rate = rate;
    a.dt_bias = bias;
  }
  return a;
}

void run(const Problem& p, const Tensors& t, const SeqLens& seq, const ChunkGatedDeltaRuleOptions& options) {
  if (t.k.dtype == DType::kF64) {
    reference_fwd<double>(p, t, seq, options);
    return;
  }
  Scratch scratch;
  const Args args = make_args(p, t, options, scratch);
  const Kernels& kernels = chunk_gated_delta_rule_kernels_for(active_isa());
  const std::int64_t columns = p.sizes.group() * ((p.sizes.V + kernels.panel - 1) / kernels.panel);
  const std::int64_t column_bytes = p.sizes.K * kernels.panel * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t most = std::max<std::int64_t>(kStateBytes / column_bytes, 1);
  const std::vector<Piece> pieces = plan(seq, p.sizes.HK, columns, most, parallel_threads());
  const SnapshotLists lists = snapshot_lists(seq, options.snapshot_at);
  std::int64_t widest = 0;
  for (const Piece& piece : pieces) {
    widest = std::max(widest, piece.last - piece.first);
  }
  const int type = data_type_index(t.k.dtype);
  const bool narrow = options.precision == Precision::kBf16 && kernels.bf16.run[type] != nullptr;
  const Path& path = narrow ? kernels.bf16 : kernels.fp32;
  const auto work = [&](const Piece& piece, float* workspace) {
    const auto n = static_cast<std::size_t>(piece.sequence);
    const Sequence& s = seq[piece.sequence];
    const std::int64_t slot = p.slots[n];
    if (slot < 0) {
      return;
    }
    const bool fresh =
        !t.initial_state.defined() || (!options.has_initial_state.empty() && options.has_initial_state[n] == 0);
    const Unit unit{s.row,
                    s.begin,
                    s.end,
                    fresh ? -1 : slot,
                    t.final_state.defined() ? slot : -1,
                    piece.key_head,
                    piece.first,
                    piece.last,
                    lists.all.data() + lists.first[n],
                    static_cast<std::int64_t>(lists.first[n + 1] - lists.first[n])};
    path.run[type](args, unit, workspace);
  };
  for (std::int64_t n = 0; n < seq.count(); ++n) {
    if (p.slots[static_cast<std::size_t>(n)] == -1 && t.o.defined()) {
      clear_output(args, p, seq[n], dtype_bytes(t.o.dtype));
    }
  }
  // Whoever is free takes the next piece.
  const auto count = static_cast<std::int64_t>(pieces.size());
  std::atomic<std::int64_t> next{0};
  parallel_for(std::min<std::int64_t>(count, parallel_threads()), [&](std::int64_t) {
    Scratch own;
    float* workspace = own.floats(path.workspace(args, widest));
    for (std::int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      work(pieces[static_cast<std::size_t>(i)], workspace);
    }
  });
}

}  // namespace chunk_gated_delta_rule

void chunk_gated_delta_rule_fwd(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& g,
                                const TensorView& beta, const TensorView& initial_state, const TensorView& o,
                                const TensorView& final_state, const TensorView& snapshots, const SeqLens& seq,
                                const ChunkGatedDeltaRuleOptions& options) {
  const FloatEnvironment environment;
  const chunk_gated_delta_rule::Tensors t{q, k, v, g, beta, initial_state, o, final_state, snapshots};
  const chunk_gated_delta_rule::Problem p = check_call("chunk_gated_delta_rule_fwd", t, seq, options);
  if (options.time_segments > 1 && k.dtype != DType::kF64) {
    run_split(p, t, seq, options);
  } else {
    run(p, t, seq, options);
  }
}

std::int64_t chunk_size() { return chunk_gated_delta_rule_kernels_for(active_isa()).chunk; }

}  // namespace tidegate
