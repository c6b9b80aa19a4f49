// out_i = scale * sum of max(g_j, floor) over the tokens of the chunk up to i, in fp64. The vocabulary has no doubles:
// plain loops over neighbouring heads, which the compiler turns into vectors in the token-major layouts.
#include "ops/chunk_local_cumsum/kernel.h"

#include "simd/types.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using cumsum_stage::Args;
using cumsum_stage::kHeads;

template <class T, class U>
void run(const Args& a, const ChunkSpan& c, int64_t first, int64_t last) noexcept {
  double sum[kHeads] = {};
  for (int64_t n = 0; n < c.length; ++n) {
    const int64_t token = c.begin + (a.reverse ? c.length - 1 - n : n);
    const T* g = at<const T>(a.g, c.row, token, first);
    U* out = at<U>(a.out, c.row, token, first);
    for (int64_t h = 0; h < last - first; ++h) {
      const double x = static_cast<double>(widen(g[h * a.g.head]));
      sum[h] += x < a.floor ? a.floor : x;  // NaN stays
      out[h * a.out.head] = static_cast<U>(a.scale * sum[h]);
    }
  }
}

}  // namespace

#define TIDEGATE_PAIR(T) \
  { run<T, float>, run<T, double> }
extern const cumsum_stage::Kernels chunk_local_cumsum_kernels = {
    {TIDEGATE_PAIR(float), TIDEGATE_PAIR(bf16), TIDEGATE_PAIR(f16)}};

}  // namespace tidegate::TIDEGATE_ISA
