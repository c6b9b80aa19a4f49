// The chunk form in plain fp32 loops, as a yardstick for rounding errors: a kernel may have at most twice its error.
// (The token recurrence rounds less; it is the truth, in fp64.)
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/element.h"
#include "ops/chunk_gated_delta_rule/test_case.h"
#include "toolkit.h"

namespace tidegate::test {

struct PlainChunk {
  const Rule& r;
  std::int64_t C;
  using Row = std::vector<float>;

  static float element(const Tensor& t, Layout layout, std::int64_t row, std::int64_t token, std::int64_t head,
                       std::int64_t c) {
    const Heads h = heads_of(t, layout);
    return static_cast<float>(read_element(t, row * h.row + token * h.token + head * h.head + c));
  }
  float gate(std::int64_t row, std::int64_t token, std::int64_t head) const {
    const float x = element(r.g, r.c.layout, row, token, head, 0);
    if (!r.options.A_log.defined()) {
      return std::max(x, -1000.0f);
    }
    const auto parameter = [&](const TensorView& t) {
      return t.defined() ? static_cast<float>(read_element(t, head * t.strides[0])) : 0.0f;
    };
    const float y = x + parameter(r.options.dt_bias);
    return -std::exp(parameter(r.options.A_log)) * (std::max(y, 0.0f) + std::log1p(std::exp(-std::abs(y))));
  }
  float write(std::int64_t row, std::int64_t token, std::int64_t head) const {
    const float x = element(r.beta, r.c.layout, row, token, head, 0);
    return r.options.beta_sigmoid ? static_cast<float>(r.options.beta_scale) / (1.0f + std::exp(-x)) : x;
  }
  Row row_of(const Tensor& t, std::int64_t row, std::int64_t token, std::int64_t head, std::int64_t width,
             bool normalise) const {
    Row x(static_cast<std::size_t>(width));
    float squares = 1e-6f;
    for (std::int64_t c = 0; c < width; ++c) {
      x[static_cast<std::size_t>(c)] = element(t, r.c.layout, row, token, head, c);
      squares += x[static_cast<std::size_t>(c)] * x[static_cast<std::size_t>(c)];
    }
    for (float& v : x) {
      v = normalise ? v / std::sqrt(squares) : v;
    }
    return x;
  }

  // One chunk of one head: o rows are written, S advances.
  void chunk(std::int64_t row, std::int64_t begin, std::int64_t L, std::int64_t head, std::vector<Row>& S,
             RuleResult& out) const {
    const RuleCase& c = r.c;
    const auto n = static_cast<std::size_t>(L);
    const auto K = static_cast<std::size_t>(c.K);
    const auto V = static_cast<std::size_t>(c.V);
    const auto dot = [](const Row& a, const Row& b) {
      float sum = 0.0f;
      for (std::size_t i = 0; i < a.size(); ++i) {
        sum += a[i] * b[i];
      }
      return sum;
    };
    std::vector<Row> q(n), k(n), v(n);
    Row beta(n);
    std::vector<double> gc(n);
    for (std::size_t i = 0; i < n; ++i) {
      const std::int64_t t = begin + static_cast<std::int64_t>(i);
      q[i] = row_of(r.q, row, t, head / c.G, c.K, r.options.use_qk_l2norm);
      k[i] = row_of(r.k, row, t, head / c.G, c.K, r.options.use_qk_l2norm);
      v[i] = row_of(r.v, row, t, head, c.V, false);
      beta[i] = write(row, t, head);
      gc[i] = (i > 0 ? gc[i - 1] : 0.0) + static_cast<double>(gate(row, t, head));
    }
    const auto decay = [](double x) { return std::exp(static_cast<float>(x)); };
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t j = 0; j < V; ++j) {
        float seen = 0.0f;
        for (std::size_t m = 0; m < K; ++m) {
          seen += k[i][m] * S[m][j];
        }
        v[i][j] = beta[i] * (v[i][j] - decay(gc[i]) * seen);
      }
      for (std::size_t l = 0; l < i; ++l) {
        const float a = beta[i] * decay(gc[i] - gc[l]) * dot(k[i], k[l]);
        for (std::size_t j = 0; j < V; ++j) {
          v[i][j] -= a * v[l][j];
        }
      }
      Row o(V, 0.0f);
      for (std::size_t m = 0; m < K; ++m) {
        for (std::size_t j = 0; j < V; ++j) {
          o[j] += q[i][m] * S[m][j];
        }
      }
      for (float& x : o) {
        x *= decay(gc[i]);
      }
      for (std::size_t l = 0; l <= i; ++l) {
        const float p = decay(gc[i] - gc[l]) * dot(q[i], k[l]);
        for (std::size_t j = 0; j < V; ++j) {
          o[j] += p * v[l][j];
        }
      }
      const Heads h = heads_of(out.o, c.layout);
      for (std::size_t j = 0; j < V; ++j) {
        const std::int64_t t = begin + static_cast<std::int64_t>(i);
        write_element(out.o, row * h.row + t * h.token + head * h.head + static_cast<std::int64_t>(j),
                      static_cast<double>(o[j] / std::sqrt(static_cast<float>(c.K))));
      }
    }
    for (std::size_t m = 0; m < K; ++m) {
      for (std::size_t j = 0; j < V; ++j) {
        S[m][j] *= decay(gc[n - 1]);
        for (std::size_t i = 0; i < n; ++i) {
          S[m][j] += k[i][m] * decay(gc[n - 1] - gc[i]) * v[i][j];
        }
      }
    }
  }

  RuleResult run() const {
    RuleResult out = outputs(r, r.c.dtype, DType::kF32);
    const SeqLens seq = r.c.seq();
    const auto V = static_cast<std::size_t>(r.c.V);
    for (std::int64_t n = 0; n < seq.count(); ++n) {
      for (std::int64_t head = 0; head < r.c.HK * r.c.G; ++head) {
        std::vector<Row> S(static_cast<std::size_t>(r.c.K), Row(V, 0.0f));
        const std::int64_t first = (n * r.c.HK * r.c.G + head) * r.c.K * r.c.V;
        for (std::size_t i = 0; i < S.size() * V && r.h0.defined(); ++i) {
          S[i / V][i % V] = static_cast<float>(r.h0.get(first + static_cast<std::int64_t>(i)));
        }
        for (std::int64_t t = seq[n].begin; t < seq[n].end; t += C) {
          chunk(seq[n].row, t, std::min(C, seq[n].end - t), head, S, out);
        }
        for (std::size_t i = 0; i < S.size() * V; ++i) {
          out.ht.set(first + static_cast<std::int64_t>(i), static_cast<double>(S[i / V][i % V]));
        }
      }
    }
    return out;
  }
};

inline RuleResult plain_chunk(const Rule& r) { return PlainChunk{r, chunk_size()}.run(); }

}  // namespace tidegate::test
