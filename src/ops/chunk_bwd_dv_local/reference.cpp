// dv of every chunk in plain loops: the definition, and the fp64 path of the operator.
#include "ops/chunk_bwd_dv_local/reference.h"

#include <cmath>

namespace tidegate::dv_local_stage {

template <class Acc>
void reference(const ChunkProblem& p, const TensorView& q, const TensorView& k, const TensorView& d_o,
               const TensorView& gc, const TensorView& dv, double scale) {
  const Elements<Acc> queries(q, p.layout);
  const Elements<Acc> keys(k, p.layout);
  const Elements<Acc> gradient(d_o, p.layout);
  const Elements<Acc> decay(gc, p.layout);
  const Elements<Acc> out(dv, p.layout);
  std::vector<Acc> P(static_cast<std::size_t>(p.C));
  for (const ChunkSpan& c : p.chunks) {
    for (std::int64_t head = 0; head < p.size.HV; ++head) {
      const std::int64_t key_head = head / p.size.group();
      for (std::int64_t j = 0; j < c.length; ++j) {
        for (std::int64_t i = j; i < c.length; ++i) {
          Acc sum = 0;
          for (std::int64_t d = 0; d < p.size.K; ++d) {
            sum += queries.get(c, i, key_head, d) * keys.get(c, j, key_head, d);
          }
          P[static_cast<std::size_t>(i)] = sum * std::exp(decay.get(c, i, head) - decay.get(c, j, head));
        }
        for (std::int64_t d = 0; d < p.size.V; ++d) {
          Acc sum = 0;
          for (std::int64_t i = j; i < c.length; ++i) {
            sum += P[static_cast<std::size_t>(i)] * gradient.get(c, i, head, d);
          }
          out.set(c, j, head, d, static_cast<Acc>(scale) * sum);
        }
      }
    }
  }
}

template void reference<double>(const ChunkProblem&, const TensorView&, const TensorView&, const TensorView&,
                                const TensorView&, const TensorView&, double);
template void reference<float>(const ChunkProblem&, const TensorView&, const TensorView&, const TensorView&,
                               const TensorView&, const TensorView&, double);

}  // namespace tidegate::dv_local_stage
