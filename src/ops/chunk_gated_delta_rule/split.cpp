// A sequence cut in time: the maps of all segments at once, then the state from segment to segment, then all segments
// at once from their true states. It costs about 2.3 times the operations and changes the last bits, and pays only
// where there are many more cores than columns of the state; hence an option.
#include <cstring>
#include <vector>

#include "base/element.h"
#include "ops/chunk_gated_delta_rule/problem.h"

namespace tidegate::chunk_gated_delta_rule {
namespace {

// Offsets of the segments, whole chunks each, and the first segment of every sequence.
struct Segments {
  std::vector<std::int64_t> cu = {0};
  std::vector<std::int64_t> first;
};
Segments segments_of(const SeqLens& seq, std::int64_t parts) {
  Segments out;
  for (const Sequence& s : seq.sequences()) {
    out.first.push_back(static_cast<std::int64_t>(out.cu.size()) - 1);
    const std::int64_t chunks = (s.length() + chunk_size() - 1) / chunk_size();
    const std::int64_t step = std::max<std::int64_t>((chunks + parts - 1) / parts * chunk_size(), 1);
    for (std::int64_t t = s.begin + step; t < s.end; t += step) {
      out.cu.push_back(t);
    }
    out.cu.push_back(s.end);
  }
  out.first.push_back(static_cast<std::int64_t>(out.cu.size()) - 1);
  return out;
}

}  // namespace

void run_split(const Problem& p, const Tensors& t, const SeqLens& seq, const ChunkGatedDeltaRuleOptions& options) {
  const Segments segments = segments_of(seq, options.time_segments);
  const SeqLens cut = SeqLens::from_cu(segments.cu, seq.tokens(), true);
  const DeltaSizes& z = p.sizes;
  const std::int64_t M = cut.count();
  std::vector<float> phi(static_cast<std::size_t>(M * z.HV * z.K * z.K));
  std::vector<float> s(static_cast<std::size_t>(M * z.HV * z.K * z.V));
  std::vector<float> states(s.size());
  ChunkGatedDeltaRuleOptions inner = options;
  inner.time_segments = 1;
  inner.scale = {};
  inner.out_layout = {};
  inner.state_v_first = false;
  inner.has_initial_state = {};
  gdn_segment_map(t.k, t.v, t.g, t.beta, contiguous(phi.data(), DType::kF32, {M, z.HV, z.K, z.K}),
                  contiguous(s.data(), DType::kF32, {M, z.HV, z.K, z.V}), cut, inner);

  // The caller's states, K-first or V-first and of any type, to and from one of ours.
  const auto move = [&](const TensorView& theirs, std::int64_t n, std::int64_t ours, bool write) {
    for (std::int64_t i = 0; i < z.HV * z.K * z.V; ++i) {
      const std::int64_t h = i / (z.K * z.V), k = i / z.V % z.K, v = i % z.V;
      const bool flip = options.state_v_first;
      const std::int64_t at = offset_of(theirs, n, h, flip ? v : k, flip ? k : v);
      float& x = states[static_cast<std::size_t>(ours * z.HV * z.K * z.V + i)];
      if (write) {
        write_element(theirs, at, static_cast<double>(x));
      } else {
        x = static_cast<float>(read_element(theirs, at));
      }
    }
  };
  const auto matrices = [&](std::vector<float>& of, std::int64_t segment, std::int64_t width) {
    return contiguous(of.data() + segment * z.HV * z.K * width, DType::kF32, {z.HV, z.K, width});
  };
  for (std::int64_t n = 0; n < seq.count(); ++n) {
    const std::int64_t first = segments.first[static_cast<std::size_t>(n)];
    const std::int64_t end = segments.first[static_cast<std::size_t>(n) + 1];
    const bool fresh =
        !options.has_initial_state.empty() && options.has_initial_state[static_cast<std::size_t>(n)] == 0;
    if (t.initial_state.defined() && !fresh) {
      move(t.initial_state, n, first, false);
    }
    for (std::int64_t m = first; m + 1 < end; ++m) {
      gdn_segment_combine({}, matrices(states, m, z.V), matrices(phi, m, z.K), matrices(s, m, z.V), {},
                          matrices(states, m + 1, z.V));
    }
  }

  // Every segment from its own state, which is replaced by the one after it.
  inner.scale = options.scale;
  inner.out_layout = options.out_layout;
  const TensorView pool = contiguous(states.data(), DType::kF32, {M, z.HV, z.K, z.V});
  Tensors all = t;
  all.initial_state = pool;
  all.final_state = pool;
  run(check_call("chunk_gated_delta_rule_fwd", all, cut, inner), all, cut, inner);
  for (std::int64_t n = 0; n < seq.count() && t.final_state.defined(); ++n) {
    move(t.final_state, n, segments.first[static_cast<std::size_t>(n) + 1] - 1, true);
  }
}

}  // namespace tidegate::chunk_gated_delta_rule
