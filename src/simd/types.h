// Storage types of 16 bits and their conversion, one value at a time. Arithmetic happens in fp32 after a load.
// Everything is static: a copy compiled for one instruction set must not serve another.
#pragma once

#include <stdint.h>
#include <string.h>

namespace tidegate {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

[[maybe_unused]] static inline uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
[[maybe_unused]] static inline float bits_float(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

[[maybe_unused]] static inline float widen(float x) { return x; }
[[maybe_unused]] static inline float widen(bf16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }
[[maybe_unused]] static inline float widen(f16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // Inf, NaN (made quiet)
    return bits_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13) | (magnitude > 0x7c00u ? 0x400000u : 0u));
  }
  if (magnitude < 0x400u) {  // denormal: an integer multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  return bits_float(sign | ((magnitude << 13) + 0x38000000u));  // exponent bias 15 -> 127
}

// Round to nearest even; NaN stays NaN and becomes quiet.
[[maybe_unused]] static inline bf16 narrow_bf16(float x) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<uint16_t>((u >> 16) | 0x40u)};
  }
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
[[maybe_unused]] static inline f16 narrow_f16(float x) {
  const uint32_t u = float_bits(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return {static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
  }
  if (magnitude >= 0x477ff000u) {  // 65520 and above round to Inf
    return {static_cast<uint16_t>(sign | 0x7c00u)};
  }
  if (magnitude < 0x38800000u) {    // below 2^-14: the result is a multiple of 2^-24
    if (magnitude < 0x33000000u) {  // below 2^-25
      return {static_cast<uint16_t>(sign)};
    }
    const uint32_t shift = 126u - (magnitude >> 23);  // 14 .. 24
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t half = 1u << (shift - 1u);
    const uint32_t kept = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1u);
    const uint32_t up = (rest > half || (rest == half && (kept & 1u) != 0u)) ? 1u : 0u;
    return {static_cast<uint16_t>(sign | (kept + up))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}
[[maybe_unused]] static inline void narrow(float x, float* out) { *out = x; }
[[maybe_unused]] static inline void narrow(float x, bf16* out) { *out = narrow_bf16(x); }
[[maybe_unused]] static inline void narrow(float x, f16* out) { *out = narrow_f16(x); }

}  // namespace tidegate
