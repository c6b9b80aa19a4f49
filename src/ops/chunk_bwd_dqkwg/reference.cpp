// dq, dk, dw and dg of every chunk in plain loops: the definition, and the fp64 path of the operator.
#include "ops/chunk_bwd_dqkwg/reference.h"

#include <array>
#include <cmath>

namespace tidegate::dqkwg_stage {

template <class Acc>
void reference(const ChunkProblem& p, const Tensors& t, double scale) {
  const Elements<Acc> q(t.q, p.layout), k(t.k, p.layout), v(t.v_new, p.layout), gc(t.gc, p.layout);
  const Elements<Acc> d_o(t.d_o, p.layout), dv(t.dv2, p.layout);
  const Elements<Acc> dq(t.dq, p.layout), dk(t.dk, p.layout), dw(t.dw, p.layout), dg(t.dg, p.layout);
  const StateElements<Acc> h(t.h, p.layout), dh(t.dh, p.layout);
  const auto [C, K, V] = std::array{p.C, p.size.K, p.size.V};
  std::vector<Acc> ds(static_cast<std::size_t>(C * C)), gate(static_cast<std::size_t>(C));
  std::vector<Acc> sum_q(static_cast<std::size_t>(C * K)), sum_k(static_cast<std::size_t>(C * K));
  const auto at = [](std::vector<Acc>& x, std::int64_t i) -> Acc& { return x[static_cast<std::size_t>(i)]; };
  for (const ChunkSpan& c : p.chunks) {
    const std::int64_t L = c.length;
    for (std::int64_t head = 0; head < p.size.HV; ++head) {
      const std::int64_t key_head = head / p.size.group();
      const Acc gl = gc.get(c, L - 1, head);
      if (head % p.size.group() == 0) {
        sum_q.assign(sum_q.size(), Acc(0));
        sum_k.assign(sum_k.size(), Acc(0));
      }
      gate.assign(gate.size(), Acc(0));
      for (std::int64_t i = 0; i < L; ++i) {
        for (std::int64_t j = 0; j <= i; ++j) {
          Acc from_o = 0;
          Acc qk = 0;
          for (std::int64_t d = 0; d < V; ++d) {
            from_o += d_o.get(c, i, head, d) * v.get(c, j, head, d);
          }
          for (std::int64_t d = 0; d < K; ++d) {
            qk += q.get(c, i, key_head, d) * k.get(c, j, key_head, d);
          }
          at(ds, i * C + j) = static_cast<Acc>(scale) * from_o * std::exp(gc.get(c, i, head) - gc.get(c, j, head));
          at(gate, i) += at(ds, i * C + j) * qk;
          at(gate, j) -= at(ds, i * C + j) * qk;
        }
      }
      Acc all_bk = 0;
      Acc state = 0;
      for (std::int64_t m = 0; m < K; ++m) {
        for (std::int64_t d = 0; d < V; ++d) {
          state += h.get(c, head, m, d) * dh.get(c, head, m, d);
        }
        for (std::int64_t i = 0; i < L; ++i) {
          Acc a = 0;
          Acc b = 0;
          Acc w = 0;
          for (std::int64_t d = 0; d < V; ++d) {
            a += d_o.get(c, i, head, d) * h.get(c, head, m, d);
            b += v.get(c, i, head, d) * dh.get(c, head, m, d);
            w += dv.get(c, i, head, d) * h.get(c, head, m, d);
          }
          a *= static_cast<Acc>(scale) * std::exp(gc.get(c, i, head));
          b *= std::exp(gl - gc.get(c, i, head));
          dw.set(c, i, head, m, -w);
          const Acc bk = b * k.get(c, i, key_head, m);
          at(gate, i) += a * q.get(c, i, key_head, m) - bk;
          all_bk += bk;
          for (std::int64_t j = 0; j <= i; ++j) {
            a += at(ds, i * C + j) * k.get(c, j, key_head, m);
          }
          for (std::int64_t j = i; j < L; ++j) {
            b += at(ds, j * C + i) * q.get(c, j, key_head, m);
          }
          dq.set(c, i, key_head, m, at(sum_q, i * K + m) += a);  // the last head of the group stays
          dk.set(c, i, key_head, m, at(sum_k, i * K + m) += b);
        }
      }
      at(gate, L - 1) += std::exp(gl) * state + all_bk;
      for (std::int64_t i = 0; i < L; ++i) {
        dg.set(c, i, head, 0, at(gate, i));
      }
    }
  }
}

template void reference<double>(const ChunkProblem&, const Tensors&, double);
template void reference<float>(const ChunkProblem&, const Tensors&, double);

}  // namespace tidegate::dqkwg_stage
