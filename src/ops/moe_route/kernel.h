// What moe_route.cpp hands to the kernels.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"

namespace tidegate::moe_route {

// Rows of elements of a data type, `row` elements apart; no data: absent.
struct TypedRows {
  void* data;
  int64_t row;
  int type;
};

struct Args {
  TypedRows logits, weights, probs;  // backward: weights = dweights, probs = dprobs
  TypedRows dlogits;
  int64_t experts, slots;
  int rounding;     // data type that logits are rounded to; 0: none
  int32_t* chosen;  // [T][slots]
  bool renormalise, replay;
};

// Why a row was refused.
enum : int { kNone = 0, kNotBelowInfinity, kTooFew, kMasked };
struct Refusal {
  int64_t row;
  int why;
};

// row: scratch of room_for(experts, slots) floats.
struct Kernels {
  int64_t (*room)(int64_t experts, int64_t slots) noexcept;
  Refusal (*choose)(const Args&, int64_t first, int64_t last, float* room) noexcept;
  void (*weigh)(const Args&, int64_t first, int64_t last, float* room) noexcept;
  void (*bwd)(const Args&, int64_t first, int64_t last, float* room) noexcept;
};

}  // namespace tidegate::moe_route

TIDEGATE_KERNEL_TABLE(moe_route::Kernels, moe_route_kernels)
