// Forward and backward stages one after the other give the gradients of the token recurrence
//   S' = e^g S    r = v - S'^T k    S = S' + k (beta r)^T    o = scale S^T q
// which are written out here token by token, in fp64.
#include <gtest/gtest.h>

#include "chunk_suite.h"

namespace tidegate::test {
namespace {

// The bound of the chain. dg is a difference of large sums, and gc is handed over as fp32; alone, a stage has 1e-6.
constexpr double kBound = 3e-6;
constexpr double kFloor = -104.0;  // of single gates: e^-104 is 0 in fp32

struct Gradients {
  Tensor dq, dk, dv, dg, dbeta, dh0;
  std::vector<std::pair<std::string, const Tensor*>> all() const {
    return {{"dq", &dq}, {"dk", &dk}, {"dv", &dv}, {"dg", &dg}, {"dbeta", &dbeta}, {"dh0", &dh0}};
  }
};

Tensor tokens(const ChunkCase& c, DType type, std::int64_t heads, std::int64_t width) {
  return {type, c.sizes(Kind::kTokens, heads, width)};
}
Tensor gates(const ChunkCase& c) { return {c.sum_type(), c.sizes(Kind::kGate, c.HV(), 0)}; }

Tensor sum_of(const Tensor& a, const Tensor& b) {
  return like(a).fill([&](std::int64_t i) { return a.get(i) + b.get(i); });
}

Gradients chain(const ChunkTensors& t) {
  const ChunkCall x = t.call();
  const ChunkCase& c = t.c;
  const Tensor gc = gates(c);
  chunk_local_cumsum(x.g, gc, c.C, x.seq, {.floor = kFloor, .layout = c.layout});
  const Tensor A0 = tokens(c, c.inter, c.HV(), c.C);
  chunk_scaled_dot_kkt(x.k, gc, x.beta, A0, x.seq, {c.C, c.layout});
  const Tensor A = tokens(c, c.inter, c.HV(), c.C);
  solve_tril(A0, A, x.seq, c.layout);
  const Tensor w = tokens(c, c.inter, c.HV(), c.K);
  const Tensor u = tokens(c, c.inter, c.HV(), c.V);
  recompute_w_u(x.k, x.v, x.beta, A, gc, w, u, x.seq, c.layout);
  const Tensor h(c.inter, c.sizes(Kind::kChunks, c.HV(), 0));
  const Tensor v_new = tokens(c, c.inter, c.HV(), c.V);
  chunk_gated_delta_rule_fwd_h(x.k, w, u, gc, x.initial, h, v_new, {}, x.seq, {c.C, c.v_first, c.layout});

  const ChunkBwdOptions options{kScale, c.C, c.layout};
  const Tensor dv = tokens(c, c.inter, c.HV(), c.V);
  chunk_bwd_dv_local(x.q, x.k, x.d_o, gc, dv, x.seq, options);
  Gradients out;
  out.dh0 = Tensor(c.sum_type(), c.sizes(Kind::kStates, 0, 0));
  const Tensor dh = like(h);
  const Tensor dv2 = like(dv);
  chunk_gated_delta_rule_bwd_dhu(x.q, x.k, w, x.d_o, dv, gc, x.dfinal, dh, out.dh0, dv2, x.seq,
                                 {kScale, c.C, c.v_first, c.layout});
  out.dq = tokens(c, c.inter, c.HK, c.K);
  const Tensor dk = like(out.dq);
  const Tensor dw = like(w);
  const Tensor dg = like(gc);
  chunk_bwd_dqkwg(x.q, x.k, v_new, gc, h, x.d_o, dh, dv2, out.dq, dk, dw, dg, x.seq, options);
  const Tensor dk_more = like(dk);
  const Tensor dg_more = like(dg);
  out.dv = like(dv);
  out.dbeta = like(dg);
  prepare_wy_repr_bwd(x.k, x.v, x.beta, A, dw, dv2, gc, dk_more, out.dv, out.dbeta, dg_more, x.seq, c.layout);
  out.dk = sum_of(dk, dk_more);
  out.dg = like(dg);
  chunk_local_cumsum(sum_of(dg, dg_more), out.dg, c.C, x.seq, {.reverse = true, .layout = c.layout});
  for (std::int64_t i = 0; i < out.dg.view().numel(); ++i) {
    if (t.g.get(i) <= kFloor) {
      out.dg.set(i, 0.0);  // a gate at its floor does not move the sum
    }
  }
  return out;
}

// One sequence and value head, kTND. States of all tokens are kept.
class TokenRule {
 public:
  TokenRule(const ChunkTensors& t, Gradients& out, std::int64_t n, std::int64_t head)
      : t_(t), c_(t.c), out_(out), head_(head), key_head_(head / t.c.G), state_((n * t.c.HV() + head) * t.c.K * t.c.V) {
    const Sequence s = t.c.seq()[n];
    std::vector<double> S(static_cast<std::size_t>(c_.K * c_.V));
    for (std::int64_t i = 0; i < c_.K * c_.V && c_.initial; ++i) {
      S[static_cast<std::size_t>(i)] = t.initial.get(state_ + i);
    }
    for (std::int64_t token = s.begin; token < s.end; ++token) {
      forward(token, S);
    }
    std::vector<double> D(S.size());
    for (std::int64_t i = 0; i < c_.K * c_.V && c_.initial; ++i) {
      D[static_cast<std::size_t>(i)] = t.dfinal.get(state_ + i);
    }
    for (std::int64_t token = s.end; token-- > s.begin;) {
      backward(token, D);
    }
    for (std::int64_t i = 0; i < c_.K * c_.V; ++i) {
      out.dh0.set(state_ + i, D[static_cast<std::size_t>(i)]);
    }
  }

 private:
  struct Step {
    std::vector<double> decayed, after, rest;  // S', S and r
  };
  std::int64_t gate(std::int64_t token) const { return token * c_.HV() + head_; }
  std::int64_t key(std::int64_t token) const { return (token * c_.HK + key_head_) * c_.K; }
  // f(element of a state, i, j)
  template <class F>
  void for_state(F f) const {
    for (std::int64_t i = 0; i < c_.K; ++i) {
      for (std::int64_t j = 0; j < c_.V; ++j) {
        f(static_cast<std::size_t>(i * c_.V + j), i, j);
      }
    }
  }

  void forward(std::int64_t token, std::vector<double>& S) {
    const std::int64_t a = gate(token);
    Step step{S, {}, std::vector<double>(static_cast<std::size_t>(c_.V))};
    for (std::int64_t j = 0; j < c_.V; ++j) {
      step.rest[static_cast<std::size_t>(j)] = t_.v.get(a * c_.V + j);
    }
    for_state([&](std::size_t at, std::int64_t i, std::int64_t j) {
      step.decayed[at] *= std::exp(t_.g.get(a));
      step.rest[static_cast<std::size_t>(j)] -= step.decayed[at] * t_.k.get(key(token) + i);
    });
    for_state([&](std::size_t at, std::int64_t i, std::int64_t j) {
      S[at] = step.decayed[at] + t_.k.get(key(token) + i) * t_.beta.get(a) * step.rest[static_cast<std::size_t>(j)];
    });
    step.after = S;
    steps_.push_back(std::move(step));
  }

  void backward(std::int64_t token, std::vector<double>& D) {
    const Step step = std::move(steps_.back());
    steps_.pop_back();
    const std::int64_t a = gate(token);
    const std::int64_t at_key = key(token);
    const double beta = t_.beta.get(a);
    const auto add = [](const Tensor& t, std::int64_t i, double x) { const_cast<Tensor&>(t).set(i, t.get(i) + x); };
    std::vector<double> dd(static_cast<std::size_t>(c_.V));  // of beta r
    for_state([&](std::size_t at, std::int64_t i, std::int64_t j) {
      const double d_o = kScale * t_.d_o.get(a * c_.V + j);
      add(out_.dq, at_key + i, step.after[at] * d_o);
      D[at] += t_.q.get(at_key + i) * d_o;
      add(out_.dk, at_key + i, D[at] * beta * step.rest[static_cast<std::size_t>(j)]);
      dd[static_cast<std::size_t>(j)] += D[at] * t_.k.get(at_key + i);
    });
    for (std::int64_t j = 0; j < c_.V; ++j) {
      out_.dv.set(a * c_.V + j, beta * dd[static_cast<std::size_t>(j)]);
      add(out_.dbeta, a, dd[static_cast<std::size_t>(j)] * step.rest[static_cast<std::size_t>(j)]);
    }
    for_state([&](std::size_t at, std::int64_t i, std::int64_t j) {
      const double dr = beta * dd[static_cast<std::size_t>(j)];
      add(out_.dk, at_key + i, -step.decayed[at] * dr);
      D[at] -= t_.k.get(at_key + i) * dr;
      add(out_.dg, a, D[at] * step.decayed[at]);
      D[at] *= std::exp(t_.g.get(a));
    });
  }

  const ChunkTensors& t_;
  const ChunkCase& c_;
  Gradients& out_;
  std::int64_t head_, key_head_, state_;
  std::vector<Step> steps_;
};

// t in fp64.
Gradients recurrence(const ChunkTensors& t) {
  const ChunkCase& c = t.c;
  Gradients out;
  out.dq = blank(c, Kind::kTokens, c.HK, c.K);
  out.dk = blank(c, Kind::kTokens, c.HK, c.K);
  out.dv = blank(c, Kind::kTokens, c.HV(), c.V);
  out.dg = blank(c, Kind::kGate, c.HV());
  out.dbeta = blank(c, Kind::kGate, c.HV());
  out.dh0 = blank(c, Kind::kStates, 0);
  for (std::int64_t n = 0; n < c.seq().count(); ++n) {
    for (std::int64_t head = 0; head < c.HV(); ++head) {
      const TokenRule rule(t, out, n, head);
    }
  }
  return out;
}

void expect_close(const Gradients& got, const Gradients& truth, double bound, const std::string& text) {
  const auto a = got.all();
  const auto b = truth.all();
  for (std::size_t i = 0; i < a.size(); ++i) {
    double error = 0.0;
    double size = 0.0;
    for (std::int64_t n = 0; n < b[i].second->view().numel(); ++n) {
      error += std::pow(a[i].second->get(n) - b[i].second->get(n), 2);
      size += std::pow(b[i].second->get(n), 2);
    }
    EXPECT_LE(std::sqrt(error / size), bound) << a[i].first << " " << text;
  }
}

TEST(ChunkBackwardChain, IsTheGradientOfTheTokenRecurrence) {
  for (const std::int64_t C : {16, 32, 64, 128}) {
    for (const std::int64_t G : {1, 2, 3, 4}) {
      for (const DType dtype : kKernelTypes) {
        Random random;
        const ChunkTensors t = make_chunk(random, {.T = 200,
                                                   .HK = 1,
                                                   .G = G,
                                                   .K = 24,
                                                   .V = 17,
                                                   .C = C,
                                                   .dtype = dtype,
                                                   .beta_type = dtype,
                                                   .lengths = {1, 130, 0, 65, 4},
                                                   .initial = G != 2,
                                                   .backward = true});
        const Gradients truth = recurrence(in_wide(t));
        expect_close(chain(in_wide(t)), truth, 1e-12, "fp64 " + t.c.text());
        for_each_isa([&] { expect_close(chain(t), truth, kBound, t.c.text()); });
      }
    }
  }
}

// The path of sequences that are not changed keeps its bits, whatever the changed one holds.
TEST(ChunkBackwardChain, SequencesDoNotMeet) {
  for_each_isa([] {
    Random random;
    const ChunkCase c{.T = 150, .HK = 2, .G = 2, .K = 20, .V = 24, .C = 32, .lengths = {70, 1, 79}, .backward = true};
    ChunkTensors t = make_chunk(random, c);
    const Gradients want = chain(t);
    for (Tensor* x : {&t.q, &t.k, &t.v, &t.g, &t.beta, &t.d_o}) {
      const std::int64_t width = x->view().numel() / 150;
      for (std::int64_t i = 70 * width; i < 71 * width; ++i) {
        x->set(i, i % 2 == 0 ? std::nan("") : 3.0);
      }
    }
    const Gradients got = chain(t);
    for (std::size_t i = 0; i < 5; ++i) {
      const TensorView& a = *got.all()[i].second;
      const TensorView& b = *want.all()[i].second;
      EXPECT_TRUE(same_bits(part(a, 0, 0, 70), part(b, 0, 0, 70)) &&
                  same_bits(part(a, 0, 71, 150), part(b, 0, 71, 150)))
          << got.all()[i].first;
    }
    for (const std::int64_t n : {0, 2}) {
      EXPECT_TRUE(same_bits(part(got.dh0, 0, n, n + 1), part(want.dh0, 0, n, n + 1)));
    }
  });
}

// Gates from "keeps everything" to "forgets everything" at random tokens.
TEST(ChunkBackwardChain, GateExtremes) {
  for (const double value : {0.0, -20.0, -88.0, -104.0, -1e3, -1e38, -HUGE_VAL}) {
    Random random;
    ChunkTensors t = make_chunk(
        random, {.T = 135, .HK = 1, .G = 2, .K = 16, .V = 16, .C = 32, .lengths = {3, 67, 65}, .backward = true});
    t.g.fill([&](std::int64_t) { return random.uniform() < 0.2 ? value : -0.05 * random.uniform(); });
    const Gradients truth = recurrence(in_wide(t));
    // gc is stored as fp32: a difference of two sums keeps what their size leaves.
    const Tensor gc(DType::kF32, t.g.sizes());
    chunk_local_cumsum(t.g, gc, t.c.C, t.c.seq(), {.floor = kFloor, .layout = t.c.layout});
    double largest = 0.0;
    for (const double x : values(gc)) {
      largest = std::max(largest, -x);
    }
    for_each_isa([&] { expect_close(chain(t), truth, kBound + 0x1p-24 * largest, std::to_string(value)); });
  }
}

}  // namespace
}  // namespace tidegate::test
