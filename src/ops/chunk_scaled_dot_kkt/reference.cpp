// A0 in plain loops: the definition, and the fp64 path of the operator.
#include "ops/chunk_scaled_dot_kkt/reference.h"

#include <cmath>

namespace tidegate::kkt_stage {

template <class Acc>
void reference(const ChunkProblem& p, const TensorView& k, const TensorView& gc, const TensorView& beta,
               const TensorView& A0) {
  const Elements<Acc> keys(k, p.layout);
  const Elements<Acc> decay(gc, p.layout);
  const Elements<Acc> strength(beta, p.layout);
  const Elements<Acc> out(A0, p.layout);
  for (const ChunkSpan& c : p.chunks) {
    for (std::int64_t head = 0; head < p.size.HV; ++head) {
      for (std::int64_t i = 0; i < c.length; ++i) {
        for (std::int64_t j = 0; j < p.C; ++j) {
          Acc sum = 0;
          for (std::int64_t d = 0; d < p.size.K && j < i; ++d) {
            sum += keys.get(c, i, head / p.size.group(), d) * keys.get(c, j, head / p.size.group(), d);
          }
          if (j < i) {
            const Acc gamma = decay.defined() ? std::exp(decay.get(c, i, head) - decay.get(c, j, head)) : Acc(1);
            sum *= strength.get(c, i, head) * gamma;
          }
          out.set(c, i, head, j, sum);
        }
      }
    }
  }
}

template void reference<double>(const ChunkProblem&, const TensorView&, const TensorView&, const TensorView&,
                                const TensorView&);
template void reference<float>(const ChunkProblem&, const TensorView&, const TensorView&, const TensorView&,
                               const TensorView&);

}  // namespace tidegate::kkt_stage
