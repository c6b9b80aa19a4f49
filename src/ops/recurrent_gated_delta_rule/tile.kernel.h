// One token on one tile of a state: kColumns value channels, or fewer at the end, of one value head.
//
//   seen = S^T (D k), read = S^T (D q)       one pass over the old state, D the decay of every key channel
//   d = beta (v - seen)                      o = scale (read + <k, q> d)
//   S <- D S + k d^T                         one more pass, while the tile is in the first cache
//
// Every sum runs in an order that depends on K and the instruction set only.
//
// read and write are calls of their own: inlined into the loops over tokens and tiles they run out of registers.
// `ahead` is what will be read next, as many bytes as the tile has: the rows of a tile lie too far apart in memory, and
// its passes take too long, for the hardware to ask for it early enough. Reading asks for the first half, writing for
// the second, so that memory is busy all the time.
#pragma once

#include "ops/recurrent_gated_delta_rule/kernel.h"
#include "simd/lanes.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using recurrence::kColumns;
constexpr int kVectors = kColumns / kLanes;

// A token as one value head sees it. Rows of K floats.
struct Token {
  const float *key, *decayed_key, *decayed_query, *decay;
  float key_query;  // <k, q>
};

// Which rows of the old state count. A decay of 0 is a reset: what it forgets is left out, not multiplied by 0, so that
// a NaN ends there. kSome: look at every decay.
enum class Old { kAll, kNone, kSome };

// Columns [0, n) of a tile as rows in memory, `step` elements from row to row.
template <class S>
struct Place {
  S* data;
  int64_t step;
};

// Asks for `bytes` (a multiple of 32) of what comes next; null: nothing is known of it.
TIDEGATE_INLINE const char* ask(const char* ahead, int64_t bytes) {
  if (ahead == nullptr) {
    return nullptr;
  }
  for (int64_t b = 0; b < bytes; b += 64) {
    prefetch(ahead + b);
  }
  return ahead + bytes;
}

// A state [K][V]: a row of the tile is one key channel.
struct KeyRows {
  // Half a row of the tile.
  template <int N, class S>
  static constexpr int64_t kAsked = N * kLanes * static_cast<int64_t>(sizeof(S)) / 2;

  template <int N, Old kOld, class S, class Lanes>
  TIDEGATE_INLINE void read_vectors(Place<const S> from, int64_t K, const Token& t, float* seen, float* read,
                                    const char* ahead, Lanes lanes) {
    F32 s[N], r[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      s[i] = zero();
      r[i] = zero();
    }
    for (int64_t k = 0; k < K; ++k) {
      ahead = ask(ahead, kAsked<N, S>);
      if (kOld == Old::kSome && t.decay[k] == 0.0f) {
        continue;
      }
      const F32 key = set1(t.decayed_key[k]);
      const F32 query = set1(t.decayed_query[k]);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) {
        const F32 x = lanes.get(from.data + k * from.step + i * kLanes);
        s[i] = fma(key, x, s[i]);
        r[i] = fma(query, x, r[i]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      store(seen + i * kLanes, s[i]);
      store(read + i * kLanes, r[i]);
    }
  }

  template <int N, Old kOld, class S, class Lanes>
  TIDEGATE_INLINE void write_vectors(Place<const S> from, Place<S> to, int64_t K, const Token& t, const float* d,
                                     const char* ahead, Lanes lanes) {
    F32 write[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      write[i] = load(d + i * kLanes);
    }
    for (int64_t k = 0; k < K; ++k) {
      ahead = ask(ahead, kAsked<N, S>);
      const F32 key = set1(t.key[k]);
      const F32 decay = set1(t.decay[k]);
      const bool kept = kOld == Old::kAll || (kOld == Old::kSome && t.decay[k] != 0.0f);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) {
        const F32 old = kept ? decay * lanes.get(from.data + k * from.step + i * kLanes) : zero();
        lanes.put(to.data + k * to.step + i * kLanes, fma(key, write[i], old));
      }
    }
  }
  template <class S>
  TIDEGATE_INLINE Place<S> tile(S* state, int64_t step, int64_t c) {
    return {state + c, step};
  }

  template <Old kOld, class S>
  [[gnu::noinline]] static void read(Place<const S> from, int64_t K, int64_t n, const Token& t, float* seen,
                                     float* read, const char* ahead) {
    if (n == kColumns) {
      read_vectors<kVectors, kOld>(from, K, t, seen, read, ahead, AllLanes{});
      return;
    }
    for_lanes(n, [&](int64_t c, auto lanes) {
      read_vectors<1, kOld>(Place<const S>{from.data + c, from.step}, K, t, seen + c, read + c, nullptr, lanes);
    });
  }
  template <Old kOld, class S>
  [[gnu::noinline]] static void write(Place<const S> from, Place<S> to, int64_t K, int64_t n, const Token& t,
                                      const float* d, const char* ahead) {
    if (n == kColumns) {
      write_vectors<kVectors, kOld>(from, to, K, t, d, ahead, AllLanes{});
      return;
    }
    for_lanes(n, [&](int64_t c, auto lanes) {
      write_vectors<1, kOld>(Place<const S>{from.data + c, from.step}, Place<S>{to.data + c, to.step}, K, t, d + c,
                             nullptr, lanes);
    });
  }
};

// A state [V][K]: a row of the tile is one value channel, seen and read are sums along it.
struct ValueRows {
  // Rows that share the loads of keys and queries: 8 sums, 2 loads and a row fit 16 registers. Writing needs two
  // pointers a row, so there it is half as many.
  static constexpr int kRows = 4, kWrittenRows = 2;

  template <Old kOld, class Lanes, class S>
  TIDEGATE_INLINE F32 old_state(const S* p, F32 decay, Lanes lanes) {
    const F32 x = lanes.get(p);
    return kOld == Old::kSome ? select(equal(decay, zero()), zero(), x) : x;
  }

  template <int N, Old kOld, class S>
  TIDEGATE_INLINE void read_rows(const S* from, int64_t step, int64_t K, const Token& t, float* seen, float* read) {
    F32 s[N], r[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      s[i] = zero();
      r[i] = zero();
    }
    for_lanes(K, [&](int64_t k, auto lanes) {
      const F32 key = lanes.get(t.decayed_key + k);
      const F32 query = lanes.get(t.decayed_query + k);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) {
        const F32 x = old_state<kOld>(from + i * step + k, kOld == Old::kSome ? lanes.get(t.decay + k) : zero(), lanes);
        s[i] = fma(key, x, s[i]);
        r[i] = fma(query, x, r[i]);
      }
    });
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      seen[i] = sum(s[i]);
      read[i] = sum(r[i]);
    }
  }

  template <int N, Old kOld, class S>
  TIDEGATE_INLINE void write_rows(const S* from, int64_t from_step, S* to, int64_t to_step, int64_t K, const Token& t,
                                  const float* d) {
    F32 write[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      write[i] = set1(d[i]);
    }
    for_lanes(K, [&](int64_t k, auto lanes) {
      const F32 key = lanes.get(t.key + k);
      const F32 decay = lanes.get(t.decay + k);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) {
        const F32 old = kOld == Old::kNone ? zero() : decay * old_state<kOld>(from + i * from_step + k, decay, lanes);
        lanes.put(to + i * to_step + k, fma(key, write[i], old));
      }
    });
  }
  template <class S>
  TIDEGATE_INLINE Place<S> tile(S* state, int64_t step, int64_t c) {
    return {state + c * step, step};
  }

  template <Old kOld, class S>
  [[gnu::noinline]] static void read(Place<const S> from, int64_t K, int64_t n, const Token& t, float* seen,
                                     float* read, const char* ahead) {
    int64_t c = 0;
    for (; c + kRows <= n; c += kRows) {
      ahead = ask(ahead, kRows * K * static_cast<int64_t>(sizeof(S)) / 2);
      read_rows<kRows, kOld>(from.data + c * from.step, from.step, K, t, seen + c, read + c);
    }
    for (; c < n; ++c) {
      read_rows<1, kOld>(from.data + c * from.step, from.step, K, t, seen + c, read + c);
    }
  }
  template <Old kOld, class S>
  [[gnu::noinline]] static void write(Place<const S> from, Place<S> to, int64_t K, int64_t n, const Token& t,
                                      const float* d, const char* ahead) {
    int64_t c = 0;
    for (; c + kWrittenRows <= n; c += kWrittenRows) {
      ahead = ask(ahead, kWrittenRows * K * static_cast<int64_t>(sizeof(S)) / 2);
      write_rows<kWrittenRows, kOld>(from.data + c * from.step, from.step, to.data + c * to.step, to.step, K, t, d + c);
    }
    for (; c < n; ++c) {
      write_rows<1, kOld>(from.data + c * from.step, from.step, to.data + c * to.step, to.step, K, t, d + c);
    }
  }
};

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
