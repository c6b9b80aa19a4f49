// w and u in plain loops: the definition, and the fp64 path of the operator.
#include "ops/recompute_w_u/reference.h"

#include <cmath>

namespace tidegate::wu_stage {

template <class Acc>
void reference(const ChunkProblem& p, const TensorView& k, const TensorView& v, const TensorView& beta,
               const TensorView& A, const TensorView& gc, const TensorView& w, const TensorView& u) {
  const Elements<Acc> keys(k, p.layout);
  const Elements<Acc> values(v, p.layout);
  const Elements<Acc> strength(beta, p.layout);
  const Elements<Acc> inverse(A, p.layout);
  const Elements<Acc> decay(gc, p.layout);
  const Elements<Acc> to_w(w, p.layout);
  const Elements<Acc> to_u(u, p.layout);
  for (const ChunkSpan& c : p.chunks) {
    for (std::int64_t head = 0; head < p.size.HV; ++head) {
      for (std::int64_t i = 0; i < c.length; ++i) {
        for (std::int64_t d = 0; d < p.size.V; ++d) {
          Acc sum = 0;
          for (std::int64_t j = 0; j <= i; ++j) {
            sum += inverse.get(c, i, head, j) * (strength.get(c, j, head) * values.get(c, j, head, d));
          }
          to_u.set(c, i, head, d, sum);
        }
        for (std::int64_t d = 0; d < p.size.K; ++d) {
          Acc sum = 0;
          for (std::int64_t j = 0; j <= i; ++j) {
            const Acc factor = strength.get(c, j, head) * std::exp(decay.get(c, j, head));
            sum += inverse.get(c, i, head, j) * (factor * keys.get(c, j, head / p.size.group(), d));
          }
          to_w.set(c, i, head, d, sum);
        }
      }
    }
  }
}

template void reference<double>(const ChunkProblem&, const TensorView&, const TensorView&, const TensorView&,
                                const TensorView&, const TensorView&, const TensorView&, const TensorView&);
template void reference<float>(const ChunkProblem&, const TensorView&, const TensorView&, const TensorView&,
                               const TensorView&, const TensorView&, const TensorView&, const TensorView&);

}  // namespace tidegate::wu_stage
