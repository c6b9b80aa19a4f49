// Loops over a row: whole vectors, then the rest. The body is written once for both.
#pragma once

#include "simd/simd.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

struct AllLanes {
  template <class T>
  [[gnu::always_inline]] F32 get(const T* p) const {
    return load(p);
  }
  template <class T>
  [[gnu::always_inline]] void put(T* p, F32 v) const {
    store(p, v);
  }
};
// Stores go past the caches; the caller has checked the alignment.
struct StreamedLanes : AllLanes {
  template <class T>
  [[gnu::always_inline]] void put(T* p, F32 v) const {
    stream(p, v);
  }
};
// The first n lanes; the others read as 0 and are not written.
struct FirstLanes {
  int64_t n;
  template <class T>
  [[gnu::always_inline]] F32 get(const T* p) const {
    return load_n(p, n);
  }
  template <class T>
  [[gnu::always_inline]] void put(T* p, F32 v) const {
    store_n(p, v, n);
  }
};

// body(c, lanes) for c = 0, kLanes, ... < n.
template <class Body>
[[gnu::always_inline]] inline void for_lanes(int64_t n, Body body) {
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) {
    body(c, AllLanes{});
  }
  if (c < n) {
    body(c, FirstLanes{n - c});
  }
}

// pairs(c) for c = 0, 2 * kLanes, ... as long as a whole group is left, then body(c, lanes) for the rest.
template <class Pairs, class Body>
[[gnu::always_inline]] inline void for_pairs(int64_t n, Pairs pairs, Body body) {
  int64_t c = 0;
  for (; c + 2 * kLanes <= n; c += 2 * kLanes) {
    pairs(c);
  }
  for_lanes(n - c, [&](int64_t i, auto lanes) { body(c + i, lanes); });
}

// Brings the whole groups of a row of parameters into the order that an F32x2 of type T has.
template <class T>
inline void pair_parameters(float* p, int64_t n) {
  for (int64_t c = 0; c + 2 * kLanes <= n; c += 2 * kLanes) {
    float group[2 * kLanes];
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < kLanes; ++i) {
        group[half * kLanes + i] = p[c + pair_element(half * kLanes + i, static_cast<const T*>(nullptr))];
      }
    }
    memcpy(p + c, group, sizeof group);
  }
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
