// Between the states of sequences, in either order of their dimensions, and panels of columns.
#pragma once

#include "simd/panels.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

// f(element of the state, its place in the panel) for the columns of the panel that exist.
template <class T, class F>
inline void for_state(const SequenceStates& s, int64_t sequence, int64_t head, int64_t K, int64_t first, int64_t V,
                      F f) {
  T* state = static_cast<T*>(s.data) + sequence * s.sequence + head * s.head;
  const int64_t columns = V - first < kPanel ? V - first : kPanel;
  for (int64_t r = 0; r < K; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      f(state[r * s.key + (first + c) * s.value], r * kPanel + c);
    }
  }
}

// The columns of a state [K,V] from `first` on to a panel; zeros if there are no states.
inline void load_state(const SequenceStates& s, int64_t sequence, int64_t head, int64_t K, int64_t first, int64_t V,
                       float* panel) {
  memset(panel, 0, static_cast<size_t>(K * kPanel) * sizeof(float));
  if (s.data != nullptr) {
    with_type(s.type, [&]<class T>(T*) {
      for_state<const T>(s, sequence, head, K, first, V, [&](T x, int64_t place) { panel[place] = widen(x); });
    });
  }
}

// Back to fp32 states.
inline void store_state(const float* panel, const SequenceStates& s, int64_t sequence, int64_t head, int64_t K,
                        int64_t first, int64_t V) {
  for_state<float>(s, sequence, head, K, first, V, [&](float& x, int64_t place) { x = panel[place]; });
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
