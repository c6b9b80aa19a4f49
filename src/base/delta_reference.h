// Pieces of the delta rule in plain loops, for the references of its operators.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/delta_checks.h"
#include "base/element.h"

namespace tidegate {

inline std::int64_t offset(const Heads& h, std::int64_t row, std::int64_t token, std::int64_t head) {
  return row * h.row + token * h.token + head * h.head;
}

template <class Acc>
std::vector<Acc> read_row(const TensorView& t, const Heads& h, std::int64_t row, std::int64_t token, std::int64_t head,
                          std::int64_t width, bool normalise) {
  std::vector<Acc> x(static_cast<std::size_t>(width));
  const std::int64_t begin = offset(h, row, token, head);
  Acc squares = 0;
  for (std::int64_t c = 0; c < width; ++c) {
    x[static_cast<std::size_t>(c)] = static_cast<Acc>(read_element(t, begin + c));
    squares += x[static_cast<std::size_t>(c)] * x[static_cast<std::size_t>(c)];
  }
  if (normalise) {
    const Acc inverse = 1 / std::sqrt(squares + static_cast<Acc>(1e-6));
    for (Acc& v : x) {
      v *= inverse;
    }
  }
  return x;
}

template <class Acc>
Acc softplus(Acc x) {
  return std::max(x, Acc(0)) + std::log1p(std::exp(-std::abs(x)));
}
template <class Acc>
Acc sigmoid(Acc x) {
  const Acc e = std::exp(-std::abs(x));
  return (x < 0 ? e : Acc(1)) / (1 + e);
}

// Copies between a dense S [K][V] and state `slot` of a tensor.
template <class Acc>
void move_state(const TensorView& t, std::int64_t slot, std::int64_t head, const DeltaSizes& z, bool v_first,
                bool write, std::vector<Acc>& S) {
  for (std::int64_t i = 0; i < z.K; ++i) {
    for (std::int64_t j = 0; j < z.V; ++j) {
      const std::int64_t at = offset_of(t, slot, head, v_first ? j : i, v_first ? i : j);
      Acc& x = S[static_cast<std::size_t>(i * z.V + j)];
      if (write) {
        write_element(t, at, static_cast<double>(x));
      } else {
        x = static_cast<Acc>(read_element(t, at));
      }
    }
  }
}

}  // namespace tidegate
