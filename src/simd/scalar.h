// The vocabulary without any instruction set in mind: eight floats in the compiler's own portable vector type, which
// becomes whatever the baseline has. (Arrays and loops would do, but g++ then needs minutes for an unrolled kernel.)
// fma is a multiplication and an addition here: without the instruction a true one is a slow library call.
#pragma once

#include "simd/types.h"

namespace tidegate::scalar {

constexpr int kLanes = 8;

typedef float FloatLanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t BitLanes __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfLanes __attribute__((vector_size(2 * kLanes)));

struct F32 {
  FloatLanes v;
};
struct Mask {
  IntLanes v;  // all bits of a lane, or none
};
struct Bf16Pairs {
  BitLanes v;
};

TIDEGATE_INLINE F32 set1(float x) { return {x - FloatLanes{}}; }
TIDEGATE_INLINE F32 zero() { return {FloatLanes{}}; }
TIDEGATE_INLINE F32 from_bits(BitLanes u) { return {reinterpret_cast<FloatLanes>(u)}; }
TIDEGATE_INLINE BitLanes to_bits(F32 a) { return reinterpret_cast<BitLanes>(a.v); }

// fp16 goes lane by lane, out of line: nothing here is worth the code size.
[[gnu::noinline, maybe_unused]] static void widen_half(const f16* p, float* out) {
  for (int i = 0; i < kLanes; ++i) {
    out[i] = widen(p[i]);
  }
}
[[gnu::noinline, maybe_unused]] static void narrow_half(const float* p, f16* out) {
  for (int i = 0; i < kLanes; ++i) {
    out[i] = narrow_f16(p[i]);
  }
}

TIDEGATE_INLINE F32 load(const float* p) {
  F32 r;
  memcpy(&r.v, p, sizeof r.v);
  return r;
}
TIDEGATE_INLINE F32 load(const bf16* p) {
  HalfLanes h;
  memcpy(&h, p, sizeof h);
  return from_bits(__builtin_convertvector(h, BitLanes) << 16);
}
TIDEGATE_INLINE F32 load(const f16* p) {
  float wide[kLanes];
  widen_half(p, wide);
  return load(wide);
}

TIDEGATE_INLINE Mask less(F32 a, F32 b) { return {a.v < b.v}; }
TIDEGATE_INLINE Mask equal(F32 a, F32 b) { return {a.v == b.v}; }
TIDEGATE_INLINE F32 select(Mask m, F32 yes, F32 no) { return {m.v ? yes.v : no.v}; }

// Round to nearest even: add just under half a unit of the last kept bit, and that bit itself, then cut. NaN would
// overflow into the sign, so it takes its own way and becomes quiet.
TIDEGATE_INLINE BitLanes round_bits_bf16(F32 a) {
  const BitLanes u = to_bits(a);
  const F32 rounded = from_bits(u + 0x7fffu + ((u >> 16) & 1u));
  return to_bits(select(equal(a, a), rounded, from_bits(u | 0x400000u)));
}

TIDEGATE_INLINE void store(float* p, F32 a) { memcpy(p, &a.v, sizeof a.v); }
TIDEGATE_INLINE void store(bf16* p, F32 a) {
  const HalfLanes h = __builtin_convertvector(round_bits_bf16(a) >> 16, HalfLanes);
  memcpy(p, &h, sizeof h);
}
TIDEGATE_INLINE void store(f16* p, F32 a) {
  float wide[kLanes];
  store(wide, a);
  narrow_half(wide, p);
}
// The first n elements, 0 in the other lanes; nothing beyond them is touched. 0 <= n <= kLanes.
template <class T>
TIDEGATE_INLINE F32 load_n(const T* p, int64_t n) {
  T part[kLanes] = {};
  memcpy(part, p, static_cast<size_t>(n) * sizeof(T));
  return load(part);
}
template <class T>
TIDEGATE_INLINE void store_n(T* p, F32 a, int64_t n) {
  T part[kLanes];
  store(part, a);
  memcpy(p, part, static_cast<size_t>(n) * sizeof(T));
}
template <class T>
TIDEGATE_INLINE void stream(T* p, F32 a) {
  store(p, a);
}
TIDEGATE_INLINE void stream_fence() {}
TIDEGATE_INLINE void prefetch(const void*) {}

TIDEGATE_INLINE F32 operator+(F32 a, F32 b) { return {a.v + b.v}; }
TIDEGATE_INLINE F32 operator-(F32 a, F32 b) { return {a.v - b.v}; }
TIDEGATE_INLINE F32 operator*(F32 a, F32 b) { return {a.v * b.v}; }
TIDEGATE_INLINE F32 operator/(F32 a, F32 b) { return {a.v / b.v}; }
TIDEGATE_INLINE F32 fma(F32 a, F32 b, F32 c) { return {a.v * b.v + c.v}; }
// min and max return b when either is NaN.
TIDEGATE_INLINE F32 min(F32 a, F32 b) { return {a.v < b.v ? a.v : b.v}; }
TIDEGATE_INLINE F32 max(F32 a, F32 b) { return {a.v > b.v ? a.v : b.v}; }
TIDEGATE_INLINE F32 abs(F32 a) { return from_bits(to_bits(a) & 0x7fffffffu); }
TIDEGATE_INLINE F32 sqrt(F32 a) {
  F32 r;
  for (int i = 0; i < kLanes; ++i) {
    r.v[i] = __builtin_sqrtf(a.v[i]);
  }
  return r;
}
// To the nearest integer, ties to even, for |a| < 2^22: adding and taking away 1.5 * 2^23 leaves the rounded value.
TIDEGATE_INLINE F32 round(F32 a) { return (a + set1(12582912.0f)) - set1(12582912.0f); }
// n as integers, 0 where it is NaN (a conversion of NaN is undefined).
TIDEGATE_INLINE IntLanes whole_lanes(F32 n) {
  return __builtin_convertvector(select(equal(n, n), n, zero()).v, IntLanes);
}
TIDEGATE_INLINE F32 power(IntLanes n) { return from_bits(reinterpret_cast<BitLanes>(n + 127) << 23); }
// a * 2^n for integral n in [-252, 254], in two exact steps so that only a denormal result rounds.
TIDEGATE_INLINE F32 scale_by_power(F32 a, F32 n) {
  const IntLanes whole = whole_lanes(n);
  const IntLanes half = whole >> 1;
  return a * power(half) * power(whole - half);
}
// m * 2^n for m near 1 and integral n in [-126, 126], where shifted = 1.5 * 2^23 + n: its low bits are n.
TIDEGATE_INLINE F32 add_exponent(F32 m, F32 shifted) { return from_bits(to_bits(m) + (to_bits(shifted) << 23)); }
// x / (1 + m 2^n) for m in (0.5, 2) and integral n in [-126, 255]. Both sides of the fraction are divided by 2^half, so
// that neither leaves the range and only a denormal quotient loses bits; n = 255 is infinity.
TIDEGATE_INLINE F32 over_one_plus(F32 x, F32 m, F32 n) {
  const IntLanes whole = whole_lanes(n);
  const IntLanes half = (whole & (whole > 0)) >> 1;
  const F32 down = power(-half);
  return x * down / (m * power(whole - half) + down);
}

// Sum of all lanes, always in the same order: halves are added until one lane is left.
TIDEGATE_INLINE float sum(F32 a) {
  const float four[4] = {a.v[0] + a.v[4], a.v[1] + a.v[5], a.v[2] + a.v[6], a.v[3] + a.v[7]};
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// Rounds to the type of the pointer and back: what a store and a load would do.
TIDEGATE_INLINE F32 round_to(F32 a, const float*) { return a; }
TIDEGATE_INLINE F32 round_to(F32 a, const bf16*) { return from_bits(round_bits_bf16(a) & 0xffff0000u); }
TIDEGATE_INLINE F32 round_to(F32 a, const f16*) {
  f16 narrow[kLanes];
  store(narrow, a);
  return load(narrow);
}

TIDEGATE_INLINE Bf16Pairs load_pairs(const bf16* p) {
  Bf16Pairs r;
  memcpy(&r.v, p, sizeof r.v);
  return r;
}
// One pair in every lane.
TIDEGATE_INLINE Bf16Pairs set1_pair(const bf16* p) {
  uint32_t pair;
  memcpy(&pair, p, 4);
  return {pair - BitLanes{}};
}
// acc[i] + a[2i] b[2i] + a[2i+1] b[2i+1]. The odd products come first, as in the instruction of AVX512-BF16.
TIDEGATE_INLINE F32 dot(F32 acc, Bf16Pairs a, Bf16Pairs b) {
  const F32 odd = fma(from_bits(a.v & 0xffff0000u), from_bits(b.v & 0xffff0000u), acc);
  return fma(from_bits(a.v << 16), from_bits(b.v << 16), odd);
}

// Two vectors of neighbouring elements. In memory order for float and f16; a bf16 pair shares 32 bits, so there `a`
// holds the even elements and `b` the odd ones. pair_element() says which is where.
struct F32x2 {
  F32 a, b;
};
TIDEGATE_INLINE F32x2 load2(const bf16* p) {
  const Bf16Pairs u = load_pairs(p);
  return {from_bits(u.v << 16), from_bits(u.v & 0xffff0000u)};
}
template <class T>
TIDEGATE_INLINE F32x2 load2(const T* p) {
  return {load(p), load(p + kLanes)};
}
TIDEGATE_INLINE void store2(bf16* p, F32x2 v) {
  const BitLanes u = (round_bits_bf16(v.a) >> 16) | (round_bits_bf16(v.b) & 0xffff0000u);
  memcpy(p, &u, sizeof u);
}
template <class T>
TIDEGATE_INLINE void store2(T* p, F32x2 v) {
  store(p, v.a);
  store(p + kLanes, v.b);
}
template <class T>
TIDEGATE_INLINE void stream2(T* p, F32x2 v) {
  store2(p, v);
}

}  // namespace tidegate::scalar
