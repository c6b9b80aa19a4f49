// A problem for several ranks, and what one process makes of it.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/element.h"
#include "ranks.h"
#include "tidegate/ep.h"
#include "toolkit.h"

namespace tidegate::test {

struct EpCase {
  int ranks;
  std::int64_t E, K, H;
  std::vector<std::int64_t> tokens;  // by rank
  enum Routing { kUniform, kOneExpert, kHoles } routing;
  DType dtype;
};

// Tokens of all ranks, the same in every process.
struct EpProblem {
  explicit EpProblem(const EpCase& c, std::uint64_t seed = 1) : what(c) {
    Random random(seed);
    first.push_back(0);
    for (const std::int64_t t : c.tokens) {
      first.push_back(first.back() + t);
    }
    const std::int64_t T = first.back();
    x = normal(random, c.dtype, {T, c.H});
    weights = uniform(random, DType::kF32, {T, c.K}, 0.0, 1.0);
    ids = Tensor(DType::kI32, {T, c.K});
    ids.fill([&](std::int64_t) -> double {
      if (c.routing == EpCase::kOneExpert) {
        return static_cast<double>(c.E - 1);
      }
      return static_cast<double>(random.integer(c.routing == EpCase::kHoles ? -1 : 0, c.E - 1));
    });
  }
  TensorView part_of(const Tensor& t, int rank) const {
    return part(t, 0, first[static_cast<std::size_t>(rank)], first[static_cast<std::size_t>(rank) + 1]);
  }
  std::int32_t id(std::int64_t pair) const { return static_cast<std::int32_t>(ids.get(pair)); }
  ep::Config config() const {
    ep::Config c;
    c.experts = what.E;
    c.slots = what.K;
    c.max_tokens = *std::max_element(what.tokens.begin(), what.tokens.end());
    c.row_bytes = what.H * dtype_bytes(what.dtype);
    c.timeout_seconds = 20.0;
    return c;
  }

  EpCase what;
  std::vector<std::int64_t> first;  // token of the first rank, ... and the end
  Tensor x, ids, weights;
};

// Stands for an expert: a factor of its own, rounded to the type of the rows.
inline double expert_factor(std::int64_t e) { return 1.0 + 0.37 * static_cast<double>(e); }
inline void apply_experts(const TensorView& rows, const TensorView& y, std::int64_t first_expert,
                          const std::vector<std::int64_t>& expert_rows) {
  std::int64_t j = 0;
  for (std::size_t e = 0; e < expert_rows.size(); ++e) {
    for (std::int64_t end = j + expert_rows[e]; j < end; ++j) {
      for (std::int64_t c = 0; c < rows.sizes[1]; ++c) {
        const double value =
            read_element(rows, offset_of(rows, j, c)) * expert_factor(first_expert + static_cast<std::int64_t>(e));
        write_element(y, offset_of(y, j, c), value);
      }
    }
  }
}

// out [T,H] of all tokens in plain loops, bit by bit what ranks must give.
inline Tensor one_process(const EpProblem& p, bool weighted = true, const Tensor& shared = {}) {
  Tensor out(p.what.dtype, {p.first.back(), p.what.H});
  Tensor row(p.what.dtype, {1});
  std::vector<std::int64_t> slots(static_cast<std::size_t>(p.what.K));
  for (std::int64_t t = 0; t < p.first.back(); ++t) {
    std::iota(slots.begin(), slots.end(), 0);
    std::stable_sort(slots.begin(), slots.end(),
                     [&](std::int64_t a, std::int64_t b) { return p.id(t * p.what.K + a) < p.id(t * p.what.K + b); });
    for (std::int64_t c = 0; c < p.what.H; ++c) {
      float total = 0.0f;
      for (const std::int64_t k : slots) {
        const std::int32_t e = p.id(t * p.what.K + k);
        if (e >= 0) {
          row.set(0, p.x.get(t * p.what.H + c) * expert_factor(e));
          const auto w = weighted ? static_cast<float>(p.weights.get(t * p.what.K + k)) : 1.0f;
          total = std::fma(w, static_cast<float>(row.get(0)), total);
        }
      }
      if (shared.defined()) {
        total += static_cast<float>(shared.get(t * p.what.H + c));
      }
      out.set(t * p.what.H + c, total);
    }
  }
  return out;
}

}  // namespace tidegate::test
