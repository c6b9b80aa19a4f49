// (I + A0)^-1 in plain loops: the definition, and the fp64 path of the operator.
#include "ops/solve_tril/reference.h"

namespace tidegate::solve_stage {

template <class Acc>
void reference(const ChunkProblem& p, const TensorView& A0, const TensorView& A) {
  const Elements<Acc> in(A0, p.layout);
  const Elements<Acc> out(A, p.layout);
  std::vector<Acc> x(static_cast<std::size_t>(p.C * p.C));
  const auto at = [&](std::int64_t i, std::int64_t j) -> Acc& { return x[static_cast<std::size_t>(i * p.C + j)]; };
  for (const ChunkSpan& c : p.chunks) {
    for (std::int64_t head = 0; head < p.size.HV; ++head) {
      for (std::int64_t i = 0; i < c.length; ++i) {
        for (std::int64_t j = 0; j < p.C; ++j) {
          at(i, j) = i == j ? Acc(1) : Acc(0);
          for (std::int64_t m = 0; m < i && j < i; ++m) {
            at(i, j) -= in.get(c, i, head, m) * at(m, j);
          }
          out.set(c, i, head, j, at(i, j));
        }
      }
    }
  }
}

template void reference<double>(const ChunkProblem&, const TensorView&, const TensorView&);
template void reference<float>(const ChunkProblem&, const TensorView&, const TensorView&);

}  // namespace tidegate::solve_stage
