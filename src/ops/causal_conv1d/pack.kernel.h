// Weights [D,W] of any type to fp32 rows [W+1][channels], the bias last.
#pragma once

#include "ops/causal_conv1d/kernel.h"
#include "simd/lanes.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

// n channels of taps that lie channel after channel. Constant strides let the compiler use shuffles.
template <int W, class T>
inline void pack_dense(const T* __restrict p, int64_t n, float* __restrict out, bool pair_odd) {
  for (int64_t c = 0; c < n; ++c) {
    for (int j = 0; j < W; ++j) {
      out[j * n + c] = widen(p[c * W + j]);
    }
  }
  for (int j = 0; j < W && pair_odd; ++j) {
    pair_parameters<bf16>(out + j * n, n);
  }
}
// Four bf16 taps are two words, each with one tap in its low and one in its high half: a shift or a mask is all it
// takes. A decode step packs the weights again, so this is a part of its time.
typedef uint32_t __attribute__((may_alias)) Word;
template <int kCount, int kStep>
TIDEGATE_INLINE void pack_words(const Word* __restrict words, int64_t n, Word* __restrict to) {
  for (int i = 0; i < kCount; ++i) {
    const uint32_t first = words[2 * kStep * i];
    const uint32_t second = words[2 * kStep * i + 1];
    to[i] = first << 16;
    to[n + i] = first & 0xffff0000u;
    to[2 * n + i] = second << 16;
    to[3 * n + i] = second & 0xffff0000u;
  }
}
template <>
inline void pack_dense<4>(const bf16* __restrict p, int64_t n, float* __restrict out, bool pair_odd) {
  const Word* words = reinterpret_cast<const Word*>(p);
  Word* to = reinterpret_cast<Word*>(out);
  int64_t c = 0;
  for (; pair_odd && c + 2 * kLanes <= n; c += 2 * kLanes) {
    pack_words<kLanes, 2>(words + 2 * c, n, to + c);
    pack_words<kLanes, 2>(words + 2 * c + 2, n, to + c + kLanes);
  }
  for (; c + kLanes <= n; c += kLanes) {
    pack_words<kLanes, 1>(words + 2 * c, n, to + c);
  }
  for (; c < n; ++c) {
    pack_words<1, 1>(words + 2 * c, n, to + c);
  }
}

template <class T, int W>
void pack(const causal_conv1d::Weights& weights, int64_t channel, int64_t channel_end, bool pair_odd,
          float* out) noexcept {
  const int64_t n = channel_end - channel;
  const T* p = static_cast<const T*>(weights.data) + channel * weights.channel;
  if (weights.tap == 1 && weights.channel == W && reinterpret_cast<uintptr_t>(p) % 4 == 0) {
    pack_dense<W>(p, n, out, pair_odd);
  } else {
    for (int64_t c = 0; c < n; ++c) {
      for (int j = 0; j < W; ++j) {
        out[j * n + c] = widen(p[c * weights.channel + j * weights.tap]);
      }
    }
    for (int j = 0; j < W && pair_odd; ++j) {
      pair_parameters<bf16>(out + j * n, n);
    }
  }
  memcpy(out + W * n, weights.bias + channel, static_cast<size_t>(n) * sizeof(float));
  if (pair_odd) {
    pair_parameters<bf16>(out + W * n, n);
  }
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
