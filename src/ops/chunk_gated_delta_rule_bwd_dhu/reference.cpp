// The gradient of the state from chunk to chunk in plain loops: the definition, and the fp64 path of the operator.
#include "ops/chunk_gated_delta_rule_bwd_dhu/reference.h"

#include <array>
#include <cmath>

namespace tidegate::dhu_stage {

template <class Acc>
void reference(const ChunkProblem& p, const TensorView& q, const TensorView& k, const TensorView& w,
               const TensorView& d_o, const TensorView& dv, const TensorView& gc, const TensorView& dfinal_state,
               const TensorView& dh, const TensorView& dh0, const TensorView& dv2, double scale, bool state_v_first) {
  const Elements<Acc> queries(q, p.layout);
  const Elements<Acc> keys(k, p.layout);
  const Elements<Acc> weights(w, p.layout);
  const Elements<Acc> gradient(d_o, p.layout);
  const Elements<Acc> local(dv, p.layout);
  const Elements<Acc> decay(gc, p.layout);
  const Elements<Acc> to_v(dv2, p.layout);
  const StateElements<Acc> to_h(dh, p.layout);
  const auto [HV, K, V] = std::array{p.size.HV, p.size.K, p.size.V};
  std::vector<Acc> D(static_cast<std::size_t>(K));  // one column of it
  std::vector<Acc> v(static_cast<std::size_t>(p.C));
  for (std::int64_t n = 0; n < p.sequences; ++n) {
    for (std::int64_t head = 0; head < HV; ++head) {
      const std::int64_t key_head = head / p.size.group();
      const auto place = [&](const TensorView& t, std::int64_t i, std::int64_t j) {
        return state_offset(t, state_v_first, n, head, i, j);
      };
      for (std::int64_t j = 0; j < V; ++j) {
        for (std::int64_t i = 0; i < K; ++i) {
          D[static_cast<std::size_t>(i)] =
              dfinal_state.defined() ? static_cast<Acc>(read_element(dfinal_state, place(dfinal_state, i, j))) : Acc(0);
        }
        for (auto at = p.chunks.rbegin(); at != p.chunks.rend(); ++at) {
          const ChunkSpan& c = *at;
          if (c.sequence != n) {
            continue;
          }
          const Acc gl = decay.get(c, c.length - 1, head);
          for (std::int64_t t = 0; t < c.length; ++t) {
            Acc sum = 0;
            for (std::int64_t i = 0; i < K; ++i) {
              sum += keys.get(c, t, key_head, i) * D[static_cast<std::size_t>(i)];
            }
            Acc& x = v[static_cast<std::size_t>(t)];
            x = std::exp(gl - decay.get(c, t, head)) * sum + local.get(c, t, head, j);
            to_v.set(c, t, head, j, x);
          }
          for (std::int64_t i = 0; i < K; ++i) {
            Acc& d = D[static_cast<std::size_t>(i)];
            to_h.set(c, head, i, j, d);
            Acc from_o = 0;
            Acc from_v = 0;
            for (std::int64_t t = 0; t < c.length; ++t) {
              from_o += std::exp(decay.get(c, t, head)) * queries.get(c, t, key_head, i) * gradient.get(c, t, head, j);
              from_v += weights.get(c, t, head, i) * v[static_cast<std::size_t>(t)];
            }
            d = std::exp(gl) * d + static_cast<Acc>(scale) * from_o - from_v;
          }
        }
        for (std::int64_t i = 0; i < K; ++i) {
          write_element(dh0, place(dh0, i, j), D[static_cast<std::size_t>(i)]);
        }
      }
    }
  }
}

template void reference<double>(const ChunkProblem&, const TensorView&, const TensorView&, const TensorView&,
                                const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                const TensorView&, const TensorView&, const TensorView&, double, bool);
template void reference<float>(const ChunkProblem&, const TensorView&, const TensorView&, const TensorView&,
                               const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                               const TensorView&, const TensorView&, const TensorView&, double, bool);

}  // namespace tidegate::dhu_stage
