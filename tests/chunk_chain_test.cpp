// The six chunk operators one after the other are the token recurrence: S <- e^g S, d = beta (v - S^T k),
// S <- S + k d^T, o = scale S^T q.
#include <gtest/gtest.h>

#include "chunk_suite.h"

namespace tidegate::test {
namespace {

constexpr double kFloor = -104.0;  // of single gates: e^-104 is 0 in fp32

struct Result {
  Tensor o, final_state;
};

Result chain(const ChunkTensors& t) {
  const ChunkCall x = t.call();
  const ChunkCase& c = t.c;
  const auto tokens = [&](DType type, std::int64_t width) {
    return Tensor(type, c.sizes(Kind::kTokens, c.HV(), width));
  };
  const Tensor gc(c.sum_type(), c.sizes(Kind::kGate, c.HV(), 0));
  chunk_local_cumsum(x.g, gc, c.C, x.seq, {.floor = kFloor, .layout = c.layout});
  const Tensor A0 = tokens(c.inter, c.C);
  chunk_scaled_dot_kkt(x.k, gc, x.beta, A0, x.seq, {c.C, c.layout});
  const Tensor A = tokens(c.inter, c.C);
  solve_tril(A0, A, x.seq, c.layout);
  const Tensor w = tokens(c.inter, c.K);
  const Tensor u = tokens(c.inter, c.V);
  recompute_w_u(x.k, x.v, x.beta, A, gc, w, u, x.seq, c.layout);
  const Tensor h(c.inter, c.sizes(Kind::kChunks, c.HV(), 0));
  const Tensor v_new = tokens(c.inter, c.V);
  Result out{tokens(c.dtype, c.V), Tensor(c.sum_type(), c.sizes(Kind::kStates, 0, 0))};
  chunk_gated_delta_rule_fwd_h(x.k, w, u, gc, x.initial, h, v_new, out.final_state, x.seq, {c.C, false, c.layout});
  chunk_fwd_o(x.q, x.k, v_new, h, gc, out.o, x.seq, {0.25, c.C, c.layout});
  return out;
}

// kTND only.
Result recurrence(const ChunkTensors& t) {
  const ChunkCase& c = t.c;
  const SeqLens seq = c.seq();
  Result out{Tensor(DType::kF64, t.v.sizes()), Tensor(DType::kF64, c.sizes(Kind::kStates, 0, 0))};
  for (std::int64_t n = 0; n < seq.count(); ++n) {
    for (std::int64_t head = 0; head < c.HV(); ++head) {
      const std::int64_t state = (n * c.HV() + head) * c.K * c.V;
      const std::int64_t key_head = head / c.G;
      for (std::int64_t j = 0; j < c.V; ++j) {
        std::vector<double> S;
        for (std::int64_t i = 0; i < c.K; ++i) {
          S.push_back(c.initial ? t.initial.get(state + i * c.V + j) : 0.0);
        }
        for (std::int64_t token = seq[n].begin; token < seq[n].end; ++token) {
          const std::int64_t gate = token * c.HV() + head;
          const std::int64_t key = (token * c.HK + key_head) * c.K;
          double d = t.v.get(gate * c.V + j);
          for (std::int64_t i = 0; i < c.K; ++i) {
            S[static_cast<std::size_t>(i)] *= std::exp(t.g.get(gate));
            d -= S[static_cast<std::size_t>(i)] * t.k.get(key + i);
          }
          double o = 0.0;
          for (std::int64_t i = 0; i < c.K; ++i) {
            S[static_cast<std::size_t>(i)] += t.k.get(key + i) * t.beta.get(gate) * d;
            o += S[static_cast<std::size_t>(i)] * t.q.get(key + i);
          }
          out.o.set(gate * c.V + j, 0.25 * o);
        }
        for (std::int64_t i = 0; i < c.K; ++i) {
          out.final_state.set(state + i * c.V + j, S[static_cast<std::size_t>(i)]);
        }
      }
    }
  }
  return out;
}

double relative_error(const Tensor& got, const Tensor& truth) {
  double error = 0.0;
  double size = 0.0;
  for (std::int64_t i = 0; i < truth.view().numel(); ++i) {
    error += std::pow(got.get(i) - truth.get(i), 2);
    size += std::pow(truth.get(i), 2);
  }
  return std::sqrt(error / size);
}

TEST(ChunkChain, IsTheTokenRecurrence) {
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
                                                   .initial = G != 2});
        const Result truth = recurrence(in_wide(t));
        const Result wider = chain(in_wide(t));
        EXPECT_LE(relative_error(wider.o, truth.o), 1e-13);
        EXPECT_LE(relative_error(wider.final_state, truth.final_state), 1e-13);
        for_each_isa([&] {
          const Result got = chain(t);
          EXPECT_LE(relative_error(got.o, truth.o), stored(dtype, 1e-6)) << t.c.text();
          EXPECT_LE(relative_error(got.final_state, truth.final_state), 1e-6) << t.c.text();
        });
      }
    }
  }
}

// Gates from "keeps everything" to "forgets everything" at random tokens.
TEST(ChunkChain, GateExtremes) {
  for (const double value : {0.0, -20.0, -88.0, -104.0, -1e3, -1e38, -HUGE_VAL}) {
    Random random;
    ChunkTensors t = make_chunk(random, {.T = 135, .HK = 1, .G = 2, .K = 16, .V = 16, .C = 32, .lengths = {3, 67, 65}});
    t.g.fill([&](std::int64_t) { return random.uniform() < 0.2 ? value : -0.05 * random.uniform(); });
    const Result truth = recurrence(in_wide(t));
    // gc is stored as fp32: a difference of two sums keeps what their size leaves.
    const Tensor gc(DType::kF32, t.g.sizes());
    chunk_local_cumsum(t.g, gc, t.c.C, t.c.seq(), {.floor = kFloor, .layout = t.c.layout});
    double largest = 0.0;
    for (const double x : values(gc)) {
      largest = std::max(largest, -x);
    }
    for_each_isa([&] {
      const Result got = chain(t);
      const double bound = 1e-6 + 1.2e-8 * largest;
      EXPECT_LE(relative_error(got.o, truth.o), bound) << value;
      EXPECT_LE(relative_error(got.final_state, truth.final_state), bound) << value;
    });
  }
}

}  // namespace
}  // namespace tidegate::test
