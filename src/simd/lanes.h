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

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
