// A tensor of tokens and heads in any layout: where the row of (batch row, token, head) begins. Plain data, used by
// kernels and by the code that calls them.
#pragma once

#include <stdint.h>

namespace tidegate {

struct Heads {
  void* data;                // null: the tensor is absent
  int64_t row, token, head;  // strides in elements
};

template <class T>
[[gnu::always_inline]] static inline T* at(const Heads& t, int64_t row, int64_t token, int64_t head) {
  return static_cast<T*>(t.data) + row * t.row + token * t.token + head * t.head;
}

}  // namespace tidegate
