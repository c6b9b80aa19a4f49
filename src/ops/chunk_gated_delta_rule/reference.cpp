// The token recurrence in plain loops: the definition, and the fp64 path of the operator.
#include "ops/chunk_gated_delta_rule/reference.h"

namespace tidegate::chunk_gated_delta_rule {

template <class Acc>
void reference_fwd(const Problem& p, const Tensors& t, const SeqLens& seq, const ChunkGatedDeltaRuleOptions& options) {
  const DeltaSizes& z = p.sizes;
  const Heads q = heads_of(t.q, p.layout);
  const Heads k = heads_of(t.k, p.layout);
  const Heads v = heads_of(t.v, p.layout);
  const Heads o = heads_of(t.o, p.out_layout);
  const Heads g = gates_of(t.g, p.layout);
  const Heads beta = gates_of(t.beta, p.layout);
  for (std::int64_t n = 0; n < seq.count(); ++n) {
    const auto at_n = static_cast<std::size_t>(n);
    const std::int64_t slot = p.slots[at_n];
    const bool fresh = !options.has_initial_state.empty() && options.has_initial_state[at_n] == 0;
    for (std::int64_t h = 0; h < z.HV; ++h) {
      std::vector<Acc> S(static_cast<std::size_t>(z.K * z.V), Acc(0));
      if (t.initial_state.defined() && !fresh && slot >= 0) {
        move_state(t.initial_state, slot, h, z, options.state_v_first, false, S);
      }
      const auto snapshot = [&](std::int64_t tokens) {
        for (std::size_t m = 0; m < options.snapshot_at.size() && slot >= 0; ++m) {
          if (options.snapshot_at[m].sequence == n && options.snapshot_at[m].tokens == tokens) {
            move_state(t.snapshots, static_cast<std::int64_t>(m), h, z, options.state_v_first, true, S);
          }
        }
      };
      snapshot(0);
      for (std::int64_t i = seq[n].begin; i < seq[n].end; ++i) {
        const std::int64_t row = seq[n].row;
        std::vector<Acc> out(static_cast<std::size_t>(z.V), Acc(0));
        if (slot >= 0) {
          const Acc decay = read_gate<Acc>(t, g, options, row, i, h).log_decay;
          const Acc write = read_strength<Acc>(t, beta, options, row, i, h);
          const std::vector<Acc> key = read_row<Acc>(t.k, k, row, i, h / z.group(), z.K, options.use_qk_l2norm);
          const std::vector<Acc> value = t.v.defined() ? read_row<Acc>(t.v, v, row, i, h, z.V, false)
                                                       : std::vector<Acc>(static_cast<std::size_t>(z.V), Acc(0));
          std::vector<Acc> query;
          if (t.o.defined()) {
            query = read_row<Acc>(t.q, q, row, i, h / z.group(), z.K, options.use_qk_l2norm);
          }
          const Acc keep = std::exp(decay);
          for (std::size_t j = 0; j < value.size(); ++j) {
            Acc seen = 0;
            for (std::size_t c = 0; c < key.size(); ++c) {
              Acc& s = S[c * value.size() + j];
              s = keep == 0 ? Acc(0) : keep * s;  // a reset forgets NaN too
              seen += s * key[c];
            }
            const Acc d = write * (value[j] - seen);
            Acc read = 0;
            for (std::size_t c = 0; c < key.size(); ++c) {
              Acc& s = S[c * value.size() + j];
              s += key[c] * d;
              read += query.empty() ? Acc(0) : s * query[c];
            }
            out[j] = static_cast<Acc>(p.scale) * read;
          }
        }
        for (std::int64_t j = 0; j < z.V && t.o.defined(); ++j) {
          write_element(t.o, offset(o, row, i, h) + j, static_cast<double>(out[static_cast<std::size_t>(j)]));
        }
        snapshot(i + 1 - seq[n].begin);
      }
      if (t.final_state.defined() && slot >= 0) {
        move_state(t.final_state, slot, h, z, options.state_v_first, true, S);
      }
    }
  }
}

template void reference_fwd<double>(const Problem&, const Tensors&, const SeqLens&, const ChunkGatedDeltaRuleOptions&);

}  // namespace tidegate::chunk_gated_delta_rule
