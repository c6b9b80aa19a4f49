// The token recurrence in plain loops: the definition, and the fp64 path of the operator.
#include "base/delta_reference.h"
#include "ops/recurrent_gated_delta_rule/problem.h"

namespace tidegate::recurrence {
namespace {

// The value of a gate; one that is absent is `none`.
template <class Acc>
Acc gate_at(const TensorView& t, const Heads& h, std::int64_t row, std::int64_t token, std::int64_t head,
            std::int64_t channel, Acc none) {
  return t.defined() ? static_cast<Acc>(read_element(t, offset(h, row, token, head) + channel)) : none;
}

template <class Acc>
Acc log_decay(const TensorView& A_log, const TensorView& dt_bias, std::int64_t head, Acc g) {
  if (!A_log.defined()) {
    return g;
  }
  const Acc rate = std::exp(static_cast<Acc>(read_element(A_log, head * A_log.strides[0])));
  const Acc bias = dt_bias.defined() ? static_cast<Acc>(read_element(dt_bias, head * dt_bias.strides[0])) : Acc(0);
  const Acc open = softplus(g + bias);
  return open == 0 ? Acc(0) : -rate * open;
}

}  // namespace

template <class Acc>
void reference(const Problem& p, const Tensors& t, const SeqLens& seq, const Options& options) {
  const DeltaSizes& z = p.sizes;
  const Heads q = heads_of(t.q, p.layout), k = heads_of(t.k, p.layout), v = heads_of(t.v, p.layout);
  const Heads o = heads_of(t.o, p.layout), g = gates_of(t.g, p.layout), beta = gates_of(t.beta, p.layout);
  const Heads gk = heads_of(t.gk, p.layout);
  for (std::int64_t n = 0; n < seq.count(); ++n) {
    const std::int64_t row = seq[n].row;
    const bool skipped = p.start[n] == kSkipped;
    for (std::int64_t h = 0; h < z.HV; ++h) {
      std::vector<Acc> S(static_cast<std::size_t>(z.K * z.V), Acc(0));
      if (p.start[n] >= 0) {
        move_state(t.from, p.start[n], h, z, options.state_v_first, false, S);
      }
      for (std::int64_t i = seq[n].begin; i < seq[n].end; ++i) {
        if (skipped) {
          for (std::int64_t j = 0; j < z.V; ++j) {
            write_element(t.o, offset(o, row, i, h) + j, 0.0);
          }
          continue;
        }
        const Acc head_decay = log_decay(options.A_log, options.dt_bias, h, gate_at(t.g, g, row, i, h, 0, Acc(0)));
        const std::vector<Acc> key = read_row<Acc>(t.k, k, row, i, h / z.group(), z.K, options.use_qk_l2norm);
        const std::vector<Acc> query = read_row<Acc>(t.q, q, row, i, h / z.group(), z.K, options.use_qk_l2norm);
        const std::vector<Acc> value = read_row<Acc>(t.v, v, row, i, h, z.V, false);
        for (std::size_t j = 0; j < value.size(); ++j) {
          Acc seen = 0;
          for (std::size_t c = 0; c < key.size(); ++c) {
            const Acc keep =
                std::exp(head_decay) * std::exp(gate_at(t.gk, gk, row, i, h, static_cast<std::int64_t>(c), Acc(0)));
            Acc& s = S[c * value.size() + j];
            s = keep == 0 ? Acc(0) : keep * s;  // a reset forgets NaN too
            seen += s * key[c];
          }
          Acc write = gate_at(t.beta, beta, row, i, h, p.beta_per_channel ? static_cast<std::int64_t>(j) : 0, Acc(1));
          if (options.beta_sigmoid) {
            write = static_cast<Acc>(options.beta_scale) * sigmoid(write);
          }
          const Acc d = write * (value[j] - seen);
          Acc read = 0;
          for (std::size_t c = 0; c < key.size(); ++c) {
            Acc& s = S[c * value.size() + j];
            s += key[c] * d;
            read += s * query[c];
          }
          write_element(t.o, offset(o, row, i, h) + static_cast<std::int64_t>(j),
                        static_cast<double>(static_cast<Acc>(p.scale) * read));
        }
        if (const std::int64_t slot = p.per_token ? p.slots_of(n)[i - seq[n].begin] : kDropped; slot != kDropped) {
          move_state(t.to, slot, h, z, options.state_v_first, true, S);
        }
      }
      if (!p.per_token && !skipped && p.slots_of(n)[0] != kDropped) {
        move_state(t.to, p.slots_of(n)[0], h, z, options.state_v_first, true, S);
      }
    }
  }
}

template void reference<double>(const Problem&, const Tensors&, const SeqLens&, const Options&);
template void reference<float>(const Problem&, const Tensors&, const SeqLens&, const Options&);

}  // namespace tidegate::recurrence
