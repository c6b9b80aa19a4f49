// Top-k of logits, softmax over the chosen ones or over all, and the way back.
#include "ops/moe_route/kernel.h"

#include "simd/panels.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using namespace moe_route;

const float kInfinity = __builtin_inff();

int64_t whole(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }
int64_t room(int64_t experts, int64_t slots) noexcept { return 2 * whole(experts) + 2 * whole(slots); }

// The logits of a token as floats, -inf behind them.
void load_logits(const Args& a, int64_t r, float* z) {
  for (int64_t e = a.experts; e < whole(a.experts); ++e) {
    z[e] = -kInfinity;
  }
  with_type(a.logits.type, [&]<class T>(T*) {
    const T* from = static_cast<const T*>(a.logits.data) + r * a.logits.row;
    for_lanes(a.experts, [&](int64_t c, auto lanes) {
      const F32 v = lanes.get(from + c);
      with_type(a.rounding, [&]<class Q>(Q* like) { lanes.put(z + c, round_to(v, like)); });
    });
  });
}

// The largest of n numbers, n a multiple of kLanes.
float largest(const float* z, int64_t n) {
  F32 best = set1(-kInfinity);
  for (int64_t c = 0; c < n; c += kLanes) {
    best = max(load(z + c), best);
  }
  float lanes[kLanes];
  store(lanes, best);
  for (int i = 1; i < kLanes; ++i) {
    lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
  }
  return lanes[0];
}

int check_row(const Args& a, const float* z, const int32_t* chosen) {
  F32 refused = zero();
  F32 above = zero();
  for (int64_t c = 0; c < whole(a.experts); c += kLanes) {
    const F32 v = load(z + c);
    refused = refused + select(less(v, set1(kInfinity)), zero(), set1(1.0f));  // NaN is not less
    above = above + select(less(set1(-kInfinity), v), set1(1.0f), zero());
  }
  if (sum(refused) > 0.0f) {
    return kNotBelowInfinity;
  }
  if (!a.replay) {
    return sum(above) < static_cast<float>(a.slots) ? kTooFew : kNone;
  }
  bool any = false;
  bool open = false;
  for (int64_t s = 0; s < a.slots; ++s) {
    any = any || chosen[s] >= 0;
    open = open || (chosen[s] >= 0 && z[chosen[s]] > -kInfinity);
  }
  return any && !open ? kMasked : kNone;
}

Refusal choose(const Args& a, int64_t first, int64_t last, float* z) noexcept {
  for (int64_t r = first; r < last; ++r) {
    load_logits(a, r, z);
    int32_t* chosen = a.chosen + r * a.slots;
    if (const int why = check_row(a, z, chosen); why != kNone) {
      return {r, why};
    }
    for (int64_t s = 0; s < a.slots && !a.replay; ++s) {
      const float best = largest(z, whole(a.experts));
      int32_t id = 0;
      while (z[id] != best) {
        ++id;
      }
      chosen[s] = id;
      z[id] = -kInfinity;
    }
  }
  return {-1, kNone};
}

// p = e^(z - m), m the largest of z, 0 in place of -inf; returns the sum in lane order.
float exponentials(const float* z, int64_t n, float* p) {
  const F32 shift = set1(largest(z, n));
  F32 total = zero();
  for (int64_t c = 0; c < n; c += kLanes) {
    const F32 v = load(z + c);
    const F32 e = select(equal(v, set1(-kInfinity)), zero(), exp(v - shift));
    store(p + c, e);
    total = total + e;
  }
  return sum(total);
}

// What a row of the result is made of: w of the chosen, and the whole softmax p if it is needed.
struct Softmax {
  float *p, *w;
};
Softmax softmax(const Args& a, int64_t r, bool all, float* room) {
  float* z = room;
  float* p = z + whole(a.experts);
  float* picked = p + whole(a.experts);
  float* w = picked + whole(a.slots);
  const int32_t* chosen = a.chosen + r * a.slots;
  load_logits(a, r, z);
  if (all) {
    const float scale = 1.0f / exponentials(z, whole(a.experts), p);
    for (int64_t c = 0; c < whole(a.experts); c += kLanes) {
      store(p + c, load(p + c) * set1(scale));
    }
  }
  if (!a.renormalise) {
    for (int64_t s = 0; s < a.slots; ++s) {
      w[s] = chosen[s] >= 0 ? p[chosen[s]] : 0.0f;
    }
    return {p, w};
  }
  for (int64_t s = 0; s < whole(a.slots); ++s) {
    picked[s] = s < a.slots && chosen[s] >= 0 ? z[chosen[s]] : -kInfinity;
  }
  exponentials(picked, whole(a.slots), w);
  float total = 0.0f;
  for (int64_t s = 0; s < a.slots; ++s) {
    total += w[s];
  }
  for (int64_t s = 0; s < a.slots; ++s) {
    w[s] = total > 0.0f ? w[s] / total : 0.0f;  // 0: nothing is routed
  }
  return {p, w};
}

void put_row(const TypedRows& m, int64_t r, const float* from, int64_t n) {
  with_type(m.type, [&]<class T>(T*) {
    T* to = static_cast<T*>(m.data) + r * m.row;
    for_lanes(n, [&](int64_t c, auto lanes) { lanes.put(to + c, lanes.get(from + c)); });
  });
}
void get_row(const TypedRows& m, int64_t r, float* to, int64_t n) {
  with_type(m.type, [&]<class T>(T*) {
    const T* from = static_cast<const T*>(m.data) + r * m.row;
    for_lanes(n, [&](int64_t c, auto lanes) { lanes.put(to + c, lanes.get(from + c)); });
  });
}

void weigh(const Args& a, int64_t first, int64_t last, float* room) noexcept {
  const bool all = a.probs.data != nullptr || !a.renormalise;
  for (int64_t r = first; r < last; ++r) {
    const Softmax s = softmax(a, r, all, room);
    put_row(a.weights, r, s.w, a.slots);
    if (a.probs.data != nullptr) {
      put_row(a.probs, r, s.p, a.experts);
    }
  }
}

// dz = p (dp - <p, dp>) over all experts, dp = dprobs plus the gradients of weights that are not renormalised;
// dz of the chosen += w (dw - <w, dw>) if they are.
void bwd(const Args& a, int64_t first, int64_t last, float* room) noexcept {
  const bool all = a.probs.data != nullptr || !a.renormalise;
  for (int64_t r = first; r < last; ++r) {
    const Softmax s = softmax(a, r, all, room);
    const int32_t* chosen = a.chosen + r * a.slots;
    float* dz = room;  // the logits are not needed any more
    float* dw = s.w - whole(a.slots);
    memset(dz, 0, static_cast<size_t>(whole(a.experts)) * sizeof(float));
    memset(dw, 0, static_cast<size_t>(whole(a.slots)) * sizeof(float));
    if (a.probs.data != nullptr) {
      get_row(a.probs, r, dz, a.experts);
    }
    if (a.weights.data != nullptr) {
      get_row(a.weights, r, dw, a.slots);
    }
    float along = 0.0f;
    for (int64_t k = 0; k < a.slots; ++k) {
      dw[k] = chosen[k] >= 0 ? dw[k] : 0.0f;
      along += s.w[k] * dw[k];
      if (!a.renormalise && chosen[k] >= 0) {
        dz[chosen[k]] += dw[k];
      }
    }
    if (all) {
      F32 total = zero();
      for (int64_t c = 0; c < whole(a.experts); c += kLanes) {
        total = fma(load(s.p + c), load(dz + c), total);
      }
      const F32 mean = set1(sum(total));
      for (int64_t c = 0; c < whole(a.experts); c += kLanes) {
        store(dz + c, load(s.p + c) * (load(dz + c) - mean));
      }
    }
    for (int64_t k = 0; k < a.slots && a.renormalise; ++k) {
      if (chosen[k] >= 0) {
        dz[chosen[k]] += s.w[k] * (dw[k] - along);
      }
    }
    put_row(a.dlogits, r, dz, a.experts);
  }
}

}  // namespace

extern const moe_route::Kernels moe_route_kernels = {room, choose, weigh, bwd};

}  // namespace tidegate::TIDEGATE_ISA
