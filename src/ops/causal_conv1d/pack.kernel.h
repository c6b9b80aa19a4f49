// Weights [D,W] of any type to fp32 rows [W+1][channels], the bias last.
#pragma once

#include "ops/causal_conv1d/kernel.h"
#include "simd/lanes.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

// n channels of taps that lie channel after channel. Constant strides let the compiler use shuffles.
template <int W, class T>
inline void pack_dense(const T* __restrict p, int64_t n, float* __restrict out) {
  for (int64_t c = 0; c < n; ++c) {
    for (int j = 0; j < W; ++j) {
      out[j * n + c] = widen(p[c * W + j]);
    }
  }
}
// Four bf16 taps are two words, each with one tap in its low and one in its high half: a shift or a mask is all it
// takes. A decode step packs the weights again, so this is a part of its time.
template <>
inline void pack_dense<4>(const bf16* __restrict p, int64_t n, float* __restrict out) {
  typedef uint32_t __attribute__((may_alias)) Word;
  const Word* __restrict words = reinterpret_cast<const Word*>(p);
  Word* __restrict to = reinterpret_cast<Word*>(out);
  for (int64_t c = 0; c < n; ++c) {
    const uint32_t first = words[2 * c];
    const uint32_t second = words[2 * c + 1];
    to[c] = first << 16;
    to[n + c] = first & 0xffff0000u;
    to[2 * n + c] = second << 16;
    to[3 * n + c] = second & 0xffff0000u;
  }
}

template <class T, int W>
void pack(const causal_conv1d::Weights& weights, int64_t channel, int64_t channel_end, bool pair_odd,
          float* out) noexcept {
  const int64_t n = channel_end - channel;
  const T* p = static_cast<const T*>(weights.data) + channel * weights.channel;
  if (weights.tap == 1 && weights.channel == W && reinterpret_cast<uintptr_t>(p) % 4 == 0) {
    pack_dense<W>(p, n, out);
  } else {
    for (int64_t c = 0; c < n; ++c) {
      for (int j = 0; j < W; ++j) {
        out[j * n + c] = widen(p[c * weights.channel + j * weights.tap]);
      }
    }
  }
  memcpy(out + W * n, weights.bias + channel, static_cast<size_t>(n) * sizeof(float));
  for (int j = 0; j <= W && pair_odd; ++j) {
    pair_parameters<bf16>(out + j * n, n);
  }
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
