// The state from chunk to chunk in plain loops: the definition, and the fp64 path of the operator.
#include "ops/chunk_gated_delta_rule_fwd_h/reference.h"

#include <array>
#include <cmath>

namespace tidegate::h_stage {

template <class Acc>
void reference(const ChunkProblem& p, const TensorView& k, const TensorView& w, const TensorView& u,
               const TensorView& gc, const TensorView& initial_state, const TensorView& h, const TensorView& v_new,
               const TensorView& final_state, bool state_v_first) {
  const Elements<Acc> keys(k, p.layout);
  const Elements<Acc> weights(w, p.layout);
  const Elements<Acc> updates(u, p.layout);
  const Elements<Acc> decay(gc, p.layout);
  const Elements<Acc> to_v(v_new, p.layout);
  const StateElements<Acc> to_h(h, p.layout);
  const auto [HV, K, V] = std::array{p.size.HV, p.size.K, p.size.V};
  std::vector<Acc> state(static_cast<std::size_t>(K * V));
  std::vector<Acc> v(static_cast<std::size_t>(p.C * V));
  const auto S = [&](std::int64_t i, std::int64_t j) -> Acc& { return state[static_cast<std::size_t>(i * V + j)]; };
  const auto new_v = [&](std::int64_t i, std::int64_t j) -> Acc& { return v[static_cast<std::size_t>(i * V + j)]; };
  for (std::int64_t n = 0; n < p.sequences; ++n) {
    for (std::int64_t head = 0; head < HV; ++head) {
      const std::int64_t key_head = head / p.size.group();
      for (std::int64_t i = 0; i < K; ++i) {
        for (std::int64_t j = 0; j < V; ++j) {
          S(i, j) = initial_state.defined()
                        ? static_cast<Acc>(
                              read_element(initial_state, state_offset(initial_state, state_v_first, n, head, i, j)))
                        : Acc(0);
        }
      }
      for (const ChunkSpan& c : p.chunks) {
        if (c.sequence != n) {
          continue;
        }
        const Acc gl = decay.get(c, c.length - 1, head);
        for (std::int64_t j = 0; j < V; ++j) {
          for (std::int64_t i = 0; i < K; ++i) {
            to_h.set(c, head, i, j, S(i, j));
          }
          for (std::int64_t t = 0; t < c.length; ++t) {
            Acc sum = 0;
            for (std::int64_t i = 0; i < K; ++i) {
              sum += weights.get(c, t, head, i) * S(i, j);
            }
            new_v(t, j) = updates.get(c, t, head, j) - sum;
            to_v.set(c, t, head, j, new_v(t, j));
          }
          for (std::int64_t i = 0; i < K; ++i) {
            S(i, j) *= std::exp(gl);
            for (std::int64_t t = 0; t < c.length; ++t) {
              S(i, j) += keys.get(c, t, key_head, i) * (std::exp(gl - decay.get(c, t, head)) * new_v(t, j));
            }
          }
        }
      }
      for (std::int64_t i = 0; final_state.defined() && i < K; ++i) {
        for (std::int64_t j = 0; j < V; ++j) {
          write_element(final_state, state_offset(final_state, state_v_first, n, head, i, j), S(i, j));
        }
      }
    }
  }
}

template void reference<double>(const ChunkProblem&, const TensorView&, const TensorView&, const TensorView&,
                                const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                                const TensorView&, bool);
template void reference<float>(const ChunkProblem&, const TensorView&, const TensorView&, const TensorView&,
                               const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                               const TensorView&, bool);

}  // namespace tidegate::h_stage
