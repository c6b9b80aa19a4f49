// The token recurrence backwards, in plain loops: the definition of the gradients, and the fp64 path of the operator.
#include "ops/chunk_gated_delta_rule/reference.h"

#include "ops/chunk_gated_delta_rule_bwd/problem.h"

namespace tidegate::delta_rule_gradient {
namespace {

using chunk_gated_delta_rule::Gate;
using chunk_gated_delta_rule::Problem;
using chunk_gated_delta_rule::read_gate;
using chunk_gated_delta_rule::read_strength;

template <class Acc>
using Row = std::vector<Acc>;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// Adds to a row of a gradient; the value heads of a key head share theirs.
template <class Acc>
void add_row(const TensorView& t, std::int64_t begin, const Row<Acc>& x) {
  for (std::size_t c = 0; c < x.size() && t.defined(); ++c) {
    const std::int64_t at = begin + static_cast<std::int64_t>(c);
    write_element(t, at, read_element(t, at) + static_cast<double>(x[c]));
  }
}

void clear_rows(const TensorView& t, const Heads& h, const Sequence& s, std::int64_t heads, std::int64_t width) {
  for (std::int64_t i = s.begin; i < s.end && t.defined(); ++i) {
    for (std::int64_t c = 0; c < heads * width; ++c) {
      write_element(t, offset(h, s.row, i, c / width) + c % width, 0.0);
    }
  }
}

// Through y = x / sqrt(|x|^2 + 1e-6); x is the raw row.
template <class Acc>
Row<Acc> unnormalised(const Row<Acc>& x, const Row<Acc>& dy, bool zero_row_safe) {
  Acc squares = 0;
  Acc dot = 0;
  for (std::size_t c = 0; c < x.size(); ++c) {
    squares += x[c] * x[c];
    dot += x[c] * dy[c];
  }
  const Acc inverse = 1 / std::sqrt(squares + static_cast<Acc>(1e-6));
  Row<Acc> dx(x.size());
  for (std::size_t c = 0; c < x.size(); ++c) {
    dx[c] = zero_row_safe && squares == 0 ? Acc(0) : inverse * (dy[c] - inverse * inverse * dot * x[c]);
  }
  return dx;
}

// One value head of one sequence.
template <class Acc>
struct HeadBackward {
  const Problem& p;
  const Tensors& t;
  const ChunkGatedDeltaRuleGradients& d;
  const ChunkGatedDeltaRuleOptions& options;
  std::int64_t n, h;
  Sequence s;
  Heads q = heads_of(t.rule.q, p.layout), k = heads_of(t.rule.k, p.layout), v = heads_of(t.rule.v, p.layout),
        d_o = heads_of(t.d_o, p.out_layout), g = gates_of(t.rule.g, p.layout), beta = gates_of(t.rule.beta, p.layout);
  Acc dA_log = 0, ddt_bias = 0;

  std::int64_t key_head() const { return h / p.sizes.group(); }
  Row<Acc> row(const TensorView& x, const Heads& at, std::int64_t i, std::int64_t head, std::int64_t width, bool norm) {
    return read_row<Acc>(x, at, s.row, i, head, width, norm);
  }

  // S after token i from S before it; returns what was written, d = beta (v - S^T k).
  Row<Acc> forward(std::int64_t i, Row<Acc>& S) {
    const Acc keep = std::exp(read_gate<Acc>(t.rule, g, options, s.row, i, h).log_decay);
    const Acc write = read_strength<Acc>(t.rule, beta, options, s.row, i, h);
    const Row<Acc> key = row(t.rule.k, k, i, key_head(), p.sizes.K, options.use_qk_l2norm);
    Row<Acc> x = row(t.rule.v, v, i, h, p.sizes.V, false);
    for (std::size_t j = 0; j < x.size(); ++j) {
      Acc seen = 0;
      for (std::size_t c = 0; c < key.size(); ++c) {
        Acc& e = S[c * x.size() + j];
        e = keep == 0 ? Acc(0) : keep * e;
        seen += e * key[c];
      }
      x[j] = write * (x[j] - seen);
      for (std::size_t c = 0; c < key.size(); ++c) {
        S[c * x.size() + j] += key[c] * x[j];
      }
    }
    return x;
  }

  // dS is the gradient of the state after token i and becomes that of the state before it.
  void backward(std::int64_t i, const Row<Acc>& before, Row<Acc>& dS) {
    const auto V = at(p.sizes.V), K = at(p.sizes.K);
    const Gate<Acc> gate = read_gate<Acc>(t.rule, g, options, s.row, i, h);
    const Acc keep = std::exp(gate.log_decay);
    const Acc write = read_strength<Acc>(t.rule, beta, options, s.row, i, h);
    const Row<Acc> key = row(t.rule.k, k, i, key_head(), p.sizes.K, options.use_qk_l2norm);
    const Row<Acc> query = row(t.rule.q, q, i, key_head(), p.sizes.K, options.use_qk_l2norm);
    const Row<Acc> value = row(t.rule.v, v, i, h, p.sizes.V, false);
    const Row<Acc> go = t.d_o.defined() ? row(t.d_o, d_o, i, h, p.sizes.V, false) : Row<Acc>(V, Acc(0));
    Row<Acc> after = before;
    const Row<Acc> written = forward(i, after);
    Row<Acc> dq(K), dk(K), dv(V);
    Acc strength = 0;
    Acc decay = 0;
    for (std::size_t j = 0; j < V; ++j) {
      Acc dwritten = 0;
      Acc seen = 0;
      for (std::size_t c = 0; c < K; ++c) {
        Acc& e = dS[c * V + j];
        dq[c] += static_cast<Acc>(p.scale) * after[c * V + j] * go[j];
        e += static_cast<Acc>(p.scale) * query[c] * go[j];
        dk[c] += e * written[j];
        dwritten += e * key[c];
        seen += keep == 0 ? Acc(0) : keep * before[c * V + j] * key[c];
      }
      strength += dwritten * (value[j] - seen);
      dv[j] = write * dwritten;
      for (std::size_t c = 0; c < K; ++c) {
        Acc& e = dS[c * V + j];
        const Acc kept = keep == 0 ? Acc(0) : keep * before[c * V + j];
        dk[c] -= kept * dv[j];
        e -= key[c] * dv[j];
        decay += e * kept;
        e = keep == 0 ? Acc(0) : keep * e;
      }
    }
    store(i, gate, write, dq, dk, dv, decay, strength);
  }

  void store(std::int64_t i, const Gate<Acc>& gate, Acc strength, Row<Acc> dq, Row<Acc> dk, const Row<Acc>& dv,
             Acc decay, Acc dstrength) {
    if (options.use_qk_l2norm) {
      dq = unnormalised(row(t.rule.q, q, i, key_head(), p.sizes.K, false), dq, options.zero_row_safe);
      dk = unnormalised(row(t.rule.k, k, i, key_head(), p.sizes.K, false), dk, options.zero_row_safe);
    }
    add_row(d.dq, offset(heads_of(d.dq, p.layout), s.row, i, key_head()), dq);
    add_row(d.dk, offset(heads_of(d.dk, p.layout), s.row, i, key_head()), dk);
    add_row(d.dv, offset(heads_of(d.dv, p.layout), s.row, i, h), dv);
    if (options.A_log.defined()) {
      dA_log += std::isinf(gate.log_decay) ? Acc(0) : decay * gate.log_decay;
      decay *= std::isinf(gate.rate) ? Acc(0) : -gate.rate * sigmoid(gate.raw);
      ddt_bias += decay;
    }
    if (options.beta_sigmoid) {
      const Acc open = sigmoid(static_cast<Acc>(read_element(t.rule.beta, offset(beta, s.row, i, h))));
      dstrength *= strength * (1 - open);
    }
    if (d.dg.defined()) {
      write_element(d.dg, offset(gates_of(d.dg, p.layout), s.row, i, h), static_cast<double>(decay));
    }
    if (d.dbeta.defined()) {
      write_element(d.dbeta, offset(gates_of(d.dbeta, p.layout), s.row, i, h), static_cast<double>(dstrength));
    }
  }

  void run() {
    const auto size = at(p.sizes.K * p.sizes.V);
    std::vector<Row<Acc>> states(1, Row<Acc>(size, Acc(0)));  // before every token
    if (t.rule.initial_state.defined()) {
      move_state(t.rule.initial_state, n, h, p.sizes, options.state_v_first, false, states[0]);
    }
    for (std::int64_t i = s.begin; i < s.end; ++i) {
      states.push_back(states.back());
      forward(i, states.back());
    }
    Row<Acc> dS(size, Acc(0));
    if (t.dfinal_state.defined()) {
      move_state(t.dfinal_state, n, h, p.sizes, options.state_v_first, false, dS);
    }
    for (std::int64_t i = s.end - 1; i >= s.begin; --i) {
      backward(i, states[at(i - s.begin)], dS);
    }
    if (d.dh0.defined()) {
      move_state(d.dh0, n, h, p.sizes, options.state_v_first, true, dS);
    }
  }
};

}  // namespace

template <class Acc>
void reference_bwd(const Problem& p, const Tensors& t, const ChunkGatedDeltaRuleGradients& d, const SeqLens& seq,
                   const ChunkGatedDeltaRuleOptions& options) {
  std::vector<Acc> dA_log(at(p.sizes.HV), Acc(0)), ddt_bias = dA_log;
  for (std::int64_t n = 0; n < seq.count(); ++n) {
    clear_rows(d.dq, heads_of(d.dq, p.layout), seq[n], p.sizes.HK, p.sizes.K);
    clear_rows(d.dk, heads_of(d.dk, p.layout), seq[n], p.sizes.HK, p.sizes.K);
    clear_rows(d.dv, heads_of(d.dv, p.layout), seq[n], p.sizes.HV, p.sizes.V);
    for (std::int64_t h = 0; h < p.sizes.HV; ++h) {
      HeadBackward<Acc> head{p, t, d, options, n, h, seq[n]};
      head.run();
      dA_log[at(h)] += head.dA_log;
      ddt_bias[at(h)] += head.ddt_bias;
    }
  }
  for (std::int64_t h = 0; h < p.sizes.HV; ++h) {
    if (d.dA_log.defined()) {
      write_element(d.dA_log, h * d.dA_log.strides[0], static_cast<double>(dA_log[at(h)]));
    }
    if (d.ddt_bias.defined()) {
      write_element(d.ddt_bias, h * d.ddt_bias.strides[0], static_cast<double>(ddt_bias[at(h)]));
    }
  }
}

template void reference_bwd<double>(const Problem&, const Tensors&, const ChunkGatedDeltaRuleGradients&, const SeqLens&,
                                    const ChunkGatedDeltaRuleOptions&);

}  // namespace tidegate::delta_rule_gradient
