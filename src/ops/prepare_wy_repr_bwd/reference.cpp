// The way back through w and u in plain loops: the definition, and the fp64 path of the three operators.
#include "ops/prepare_wy_repr_bwd/reference.h"

#include <cmath>

namespace tidegate::wy_stage {
namespace {

template <class Acc>
struct Squares {  // [C][C]
  std::int64_t C;
  std::vector<Acc> x = std::vector<Acc>(static_cast<std::size_t>(C * C));
  Acc& operator()(std::int64_t i, std::int64_t j) { return x[static_cast<std::size_t>(i * C + j)]; }
};

template <class Acc>
struct Reference {
  const ChunkProblem& p;
  Elements<Acc> k, v, beta, A, dw, du, gc, dA, dk, dv, dbeta, dg;
  Squares<Acc> D, X, Y;
  std::vector<Acc> sum;  // of dk over the heads of a group

  Reference(const ChunkProblem& problem, const Tensors& t)
      : p(problem),
        k(t.k, p.layout),
        v(t.v, p.layout),
        beta(t.beta, p.layout),
        A(t.A, p.layout),
        dw(t.dw, p.layout),
        du(t.du, p.layout),
        gc(t.gc, p.layout),
        dA(t.dA, p.layout),
        dk(t.dk, p.layout),
        dv(t.dv, p.layout),
        dbeta(t.dbeta, p.layout),
        dg(t.dg, p.layout),
        D{p.C},
        X{p.C},
        Y{p.C},
        sum(static_cast<std::size_t>(p.C * p.size.K)) {}

  void make_d(const ChunkSpan& c, std::int64_t head) {
    const std::int64_t L = c.length;
    const std::int64_t key_head = head / p.size.group();
    for (std::int64_t i = 0; i < L; ++i) {
      for (std::int64_t j = 0; j < L; ++j) {
        X(i, j) = 0;
        for (std::int64_t d = 0; d < p.size.K && j < i; ++d) {
          const Acc factor = beta.get(c, j, head) * std::exp(gc.get(c, j, head));
          X(i, j) += dw.get(c, i, head, d) * (factor * k.get(c, j, key_head, d));
        }
        for (std::int64_t d = 0; d < p.size.V && j < i; ++d) {
          X(i, j) += du.get(c, i, head, d) * (beta.get(c, j, head) * v.get(c, j, head, d));
        }
      }
    }
    for (std::int64_t i = 0; i < L; ++i) {
      for (std::int64_t j = 0; j < L; ++j) {
        Y(i, j) = 0;
        for (std::int64_t m = 0; m <= j; ++m) {
          Y(i, j) += X(i, m) * A.get(c, j, head, m);
        }
      }
    }
    for (std::int64_t i = 0; i < L; ++i) {
      for (std::int64_t j = 0; j < L; ++j) {
        D(i, j) = 0;
        for (std::int64_t m = i; m < L && j < i; ++m) {
          D(i, j) -= A.get(c, m, head, i) * Y(m, j);
        }
        D(i, j) *= j < i ? std::exp(gc.get(c, i, head) - gc.get(c, j, head)) : Acc(0);
      }
    }
  }

  void store_d(const ChunkSpan& c, std::int64_t head) {
    for (std::int64_t t = 0; t < c.length; ++t) {
      for (std::int64_t j = 0; j < p.C; ++j) {
        dA.set(c, t, head, j, j < c.length ? D(j, t) : Acc(0));
      }
    }
  }
  void load_d(const ChunkSpan& c, std::int64_t head) {
    for (std::int64_t i = 0; i < c.length; ++i) {
      for (std::int64_t j = 0; j < c.length; ++j) {
        D(i, j) = j < i ? dA.get(c, j, head, i) : Acc(0);
      }
    }
  }

  void gradients(const ChunkSpan& c, std::int64_t head) {
    const std::int64_t key_head = head / p.size.group();
    if (head % p.size.group() == 0) {
      sum.assign(sum.size(), Acc(0));
    }
    for (std::int64_t i = 0; i < c.length; ++i) {
      const Acc b = beta.get(c, i, head);
      const Acc decay = std::exp(gc.get(c, i, head));
      Acc strength = 0;
      Acc gate = 0;
      for (std::int64_t d = 0; d < p.size.K; ++d) {
        Acc Dk = 0;
        Acc Dtk = 0;
        Acc tw = 0;
        for (std::int64_t j = 0; j < i; ++j) {
          Dk += D(i, j) * k.get(c, j, key_head, d);
        }
        for (std::int64_t j = i + 1; j < c.length; ++j) {
          Dtk += D(j, i) * (beta.get(c, j, head) * k.get(c, j, key_head, d));
        }
        for (std::int64_t j = i; j < c.length; ++j) {
          tw += A.get(c, j, head, i) * dw.get(c, j, head, d);
        }
        const Acc x = k.get(c, i, key_head, d);
        strength += (Dk + decay * tw) * x;
        gate += (b * Dk - Dtk + b * decay * tw) * x;
        Acc& total = sum[static_cast<std::size_t>(i * p.size.K + d)];
        dk.set(c, i, key_head, d, total += b * Dk + Dtk + b * decay * tw);  // the last head of the group stays
      }
      for (std::int64_t d = 0; d < p.size.V; ++d) {
        Acc tu = 0;
        for (std::int64_t j = i; j < c.length; ++j) {
          tu += A.get(c, j, head, i) * du.get(c, j, head, d);
        }
        dv.set(c, i, head, d, b * tu);
        strength += tu * v.get(c, i, head, d);
      }
      dbeta.set(c, i, head, 0, strength);
      dg.set(c, i, head, 0, gate);
    }
  }

  template <class F>
  void for_chunks(F f) {
    for (const ChunkSpan& c : p.chunks) {
      for (std::int64_t head = 0; head < p.size.HV; ++head) {
        f(c, head);
      }
    }
  }
};

}  // namespace

template <class Acc>
void reference_da(const ChunkProblem& p, const Tensors& t) {
  Reference<Acc> r(p, t);
  r.for_chunks([&](const ChunkSpan& c, std::int64_t head) {
    r.make_d(c, head);
    r.store_d(c, head);
  });
}

template <class Acc>
void reference_full(const ChunkProblem& p, const Tensors& t) {
  Reference<Acc> r(p, t);
  r.for_chunks([&](const ChunkSpan& c, std::int64_t head) {
    r.load_d(c, head);
    r.gradients(c, head);
  });
}

template <class Acc>
void reference_both(const ChunkProblem& p, const Tensors& t) {
  Reference<Acc> r(p, t);
  r.for_chunks([&](const ChunkSpan& c, std::int64_t head) {
    r.make_d(c, head);
    r.gradients(c, head);
  });
}

template void reference_da<double>(const ChunkProblem&, const Tensors&);
template void reference_da<float>(const ChunkProblem&, const Tensors&);
template void reference_full<double>(const ChunkProblem&, const Tensors&);
template void reference_full<float>(const ChunkProblem&, const Tensors&);
template void reference_both<double>(const ChunkProblem&, const Tensors&);
template void reference_both<float>(const ChunkProblem&, const Tensors&);

}  // namespace tidegate::wy_stage
