// Sums inside chunks in plain loops: the definition, and the path of fp64 gates.
#include "ops/chunk_local_cumsum/reference.h"

namespace tidegate::cumsum_stage {

template <class Acc>
void reference(const ChunkProblem& p, const TensorView& g, const TensorView& out,
               const ChunkLocalCumsumOptions& options) {
  const Elements<Acc> in(g, p.layout);
  const Elements<Acc> to(out, p.layout);
  for (const ChunkSpan& c : p.chunks) {
    for (std::int64_t head = 0; head < p.size.HV; ++head) {
      Acc sum = 0;
      for (std::int64_t n = 0; n < c.length; ++n) {
        const std::int64_t i = options.reverse ? c.length - 1 - n : n;
        const Acc x = in.get(c, i, head);
        sum += options.floor && x < static_cast<Acc>(*options.floor) ? static_cast<Acc>(*options.floor) : x;
        to.set(c, i, head, 0, static_cast<Acc>(options.scale) * sum);
      }
    }
  }
}

template void reference<double>(const ChunkProblem&, const TensorView&, const TensorView&,
                                const ChunkLocalCumsumOptions&);
template void reference<float>(const ChunkProblem&, const TensorView&, const TensorView&,
                               const ChunkLocalCumsumOptions&);

}  // namespace tidegate::cumsum_stage
