// o of every chunk in plain loops: the definition, and the fp64 path of the operator.
#include "ops/chunk_fwd_o/reference.h"

#include <cmath>

namespace tidegate::o_stage {

template <class Acc>
void reference(const ChunkProblem& p, const TensorView& q, const TensorView& k, const TensorView& v_new,
               const TensorView& h, const TensorView& gc, const TensorView& o, double scale) {
  const Elements<Acc> queries(q, p.layout);
  const Elements<Acc> keys(k, p.layout);
  const Elements<Acc> values(v_new, p.layout);
  const Elements<Acc> decay(gc, p.layout);
  const Elements<Acc> out(o, p.layout);
  const StateElements<Acc> state(h, p.layout);
  std::vector<Acc> P(static_cast<std::size_t>(p.C));
  for (const ChunkSpan& c : p.chunks) {
    for (std::int64_t head = 0; head < p.size.HV; ++head) {
      const std::int64_t key_head = head / p.size.group();
      for (std::int64_t i = 0; i < c.length; ++i) {
        for (std::int64_t j = 0; j <= i; ++j) {
          Acc sum = 0;
          for (std::int64_t d = 0; d < p.size.K; ++d) {
            sum += queries.get(c, i, key_head, d) * keys.get(c, j, key_head, d);
          }
          P[static_cast<std::size_t>(j)] = sum * std::exp(decay.get(c, i, head) - decay.get(c, j, head));
        }
        for (std::int64_t d = 0; d < p.size.V; ++d) {
          Acc sum = 0;
          for (std::int64_t m = 0; m < p.size.K; ++m) {
            sum += queries.get(c, i, key_head, m) * state.get(c, head, m, d);
          }
          sum *= std::exp(decay.get(c, i, head));
          for (std::int64_t j = 0; j <= i; ++j) {
            sum += P[static_cast<std::size_t>(j)] * values.get(c, j, head, d);
          }
          out.set(c, i, head, d, static_cast<Acc>(scale) * sum);
        }
      }
    }
  }
}

template void reference<double>(const ChunkProblem&, const TensorView&, const TensorView&, const TensorView&,
                                const TensorView&, const TensorView&, const TensorView&, double);
template void reference<float>(const ChunkProblem&, const TensorView&, const TensorView&, const TensorView&,
                               const TensorView&, const TensorView&, const TensorView&, double);

}  // namespace tidegate::o_stage
