// The vocabulary on AVX-512 (F, BW, DQ, VL): sixteen floats in a zmm register. The same file serves avx512_bf16, which
// only adds the bf16 dot product and the conversion to bf16; its stores keep denormals, too.
#pragma once

#ifdef TIDEGATE_EMULATE_AVX512
#include "simd/emulate_avx512.h"
#else
// g++ 12 warns about the deliberately undefined operands inside its own intrinsics.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include "simd/types.h"

namespace tidegate::TIDEGATE_ISA {

constexpr int kLanes = 16;

struct F32 {
  __m512 v;
};
struct Mask {
  __mmask16 v;
};
struct Bf16Pairs {
  __m512i v;
};

TIDEGATE_INLINE F32 set1(float x) { return {_mm512_set1_ps(x)}; }
TIDEGATE_INLINE F32 zero() { return {_mm512_setzero_ps()}; }

TIDEGATE_INLINE F32 widen_lanes(__m256i x, const bf16*) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
}
TIDEGATE_INLINE F32 widen_lanes(__m256i x, const f16*) { return {_mm512_cvtph_ps(x)}; }

// Round to nearest even: add just under half a unit of the last kept bit, and that bit itself, then cut. NaN would
// overflow into the sign, so it takes its own way and becomes quiet.
TIDEGATE_INLINE __m512i round_bits_bf16(F32 a) {
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, is_nan, u, _mm512_set1_epi32(0x400000));
}
#if TIDEGATE_ISA_ID == 4
// The conversion instructions would flush denormals, so a vector that has one is rounded by hand.
TIDEGATE_INLINE __mmask16 denormals(F32 a) { return _mm512_fpclass_ps_mask(a.v, 0x20); }
#endif
TIDEGATE_INLINE __m256i narrow_lanes(F32 a, const bf16*) {
#if TIDEGATE_ISA_ID == 4
  if (__builtin_expect(denormals(a) == 0, 1)) {
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v));
  }
#endif
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_bits_bf16(a), 16));
}
TIDEGATE_INLINE __m256i narrow_lanes(F32 a, const f16*) { return _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT); }

TIDEGATE_INLINE F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
template <class T>
TIDEGATE_INLINE F32 load(const T* p) {
  return widen_lanes(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), p);
}
TIDEGATE_INLINE void store(float* p, F32 a) { _mm512_storeu_ps(p, a.v); }
template <class T>
TIDEGATE_INLINE void store(T* p, F32 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_lanes(a, p));
}
// The first n elements, 0 in the other lanes; nothing beyond them is touched. 0 <= n <= kLanes.
TIDEGATE_INLINE __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }
TIDEGATE_INLINE F32 load_n(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
template <class T>
TIDEGATE_INLINE F32 load_n(const T* p, int64_t n) {
  return widen_lanes(_mm256_maskz_loadu_epi16(first_lanes(n), p), p);
}
TIDEGATE_INLINE void store_n(float* p, F32 a, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
template <class T>
TIDEGATE_INLINE void store_n(T* p, F32 a, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_lanes(a, p));
}
// Stores past the caches; p must be aligned to the size of what is written. stream_fence() before others may read.
TIDEGATE_INLINE void stream(float* p, F32 a) { _mm512_stream_ps(p, a.v); }
template <class T>
TIDEGATE_INLINE void stream(T* p, F32 a) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow_lanes(a, p));
}
TIDEGATE_INLINE void stream_fence() { _mm_sfence(); }
// As an instruction of its own: g++ takes a function that only prefetches for one without effect, and drops its calls.
TIDEGATE_INLINE void prefetch(const void* p) { __asm__ volatile("prefetcht0 (%0)" : : "r"(p)); }
// Into the second cache only: for more than the first one holds.
TIDEGATE_INLINE void prefetch_far(const void* p) { __asm__ volatile("prefetcht1 (%0)" : : "r"(p)); }

TIDEGATE_INLINE F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
TIDEGATE_INLINE F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
TIDEGATE_INLINE F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
TIDEGATE_INLINE F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
TIDEGATE_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// min and max return b when either is NaN.
TIDEGATE_INLINE F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
TIDEGATE_INLINE F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
TIDEGATE_INLINE F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }
TIDEGATE_INLINE F32 sqrt(F32 a) { return {_mm512_sqrt_ps(a.v)}; }
TIDEGATE_INLINE F32 round(F32 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n for integral n; one instruction, denormal results rounded once.
TIDEGATE_INLINE F32 scale_by_power(F32 a, F32 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// m * 2^n for m near 1 and integral n in [-126, 126], where shifted = 1.5 * 2^23 + n: its low bits are n.
TIDEGATE_INLINE F32 add_exponent(F32 m, F32 shifted) {
  const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(m.v), n))};
}
// x / (1 + m 2^n) for m in (0.5, 2) and integral n. Both sides of the fraction are divided by a power of two that grows
// with n, so that neither leaves the range before the quotient is 0. scalef rounds its exponent down, both times alike.
TIDEGATE_INLINE F32 over_one_plus(F32 x, F32 m, F32 n) {
  const __m512 part = _mm512_max_ps(_mm512_setzero_ps(), _mm512_mul_ps(n.v, _mm512_set1_ps(0.25f)));
  const __m512 down = _mm512_scalef_ps(_mm512_set1_ps(1.0f), _mm512_sub_ps(_mm512_setzero_ps(), part));
  const __m512 rest = _mm512_scalef_ps(m.v, _mm512_sub_ps(n.v, part));
  return {_mm512_div_ps(_mm512_mul_ps(x.v, down), _mm512_add_ps(rest, down))};
}

TIDEGATE_INLINE Mask less(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
TIDEGATE_INLINE Mask equal(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
TIDEGATE_INLINE F32 select(Mask m, F32 yes, F32 no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }

// Sum of all lanes, always in the same order: halves are added until one lane is left.
TIDEGATE_INLINE float sum(F32 a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Rounds to the type of the pointer and back: what a store and a load would do.
TIDEGATE_INLINE F32 round_to(F32 a, const float*) { return a; }
TIDEGATE_INLINE F32 round_to(F32 a, const bf16*) {
  return {_mm512_castsi512_ps(_mm512_and_si512(round_bits_bf16(a), _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
TIDEGATE_INLINE F32 round_to(F32 a, const f16* like) { return widen_lanes(narrow_lanes(a, like), like); }

TIDEGATE_INLINE Bf16Pairs load_pairs(const bf16* p) { return {_mm512_loadu_si512(p)}; }
// One pair in every lane.
TIDEGATE_INLINE Bf16Pairs set1_pair(const bf16* p) {
  int32_t pair;
  memcpy(&pair, p, 4);
  return {_mm512_set1_epi32(pair)};
}
// acc[i] + a[2i] b[2i] + a[2i+1] b[2i+1]. The odd products come first, as in the instruction,
// which also takes denormals as 0.
TIDEGATE_INLINE F32 dot(F32 acc, Bf16Pairs a, Bf16Pairs b) {
#if TIDEGATE_ISA_ID == 4
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
#else
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512 odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a.v, high)),
                                     _mm512_castsi512_ps(_mm512_and_si512(b.v, high)), acc.v);
  return {_mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16)),
                          _mm512_castsi512_ps(_mm512_slli_epi32(b.v, 16)), odd)};
#endif
}

#if TIDEGATE_ISA_ID == 4
// The first n < 32 elements, then zeros.
TIDEGATE_INLINE Bf16Pairs load_pairs_n(const bf16* p, int64_t n) {
  return {_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << n) - 1u), p)};
}
TIDEGATE_INLINE void store_pairs(bf16* p, Bf16Pairs a) { _mm512_storeu_si512(p, a.v); }
// Eight pairs in both halves.
TIDEGATE_INLINE Bf16Pairs set1_half(const bf16* p) {
  return {_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Halves: a vector holds eight pairs of each of two rows, a row a half.
TIDEGATE_INLINE Bf16Pairs left_halves(Bf16Pairs a, Bf16Pairs b) { return {_mm512_shuffle_i32x4(a.v, b.v, 0x44)}; }
TIDEGATE_INLINE Bf16Pairs right_halves(Bf16Pairs a, Bf16Pairs b) { return {_mm512_shuffle_i32x4(a.v, b.v, 0xee)}; }
// The two halves of each, added: those of a to the left, those of b to the right.
TIDEGATE_INLINE F32 add_halves(F32 a, F32 b) {
  return {_mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x44), _mm512_shuffle_f32x4(a.v, b.v, 0xee))};
}
// Lane 4 c + i: the sum of quarter c of the i-th vector, (0 + 2) + (1 + 3) of its lanes.
TIDEGATE_INLINE F32 sum_quarters(F32 a0, F32 a1, F32 a2, F32 a3) {
  const __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(a0.v, a1.v), _mm512_unpackhi_ps(a0.v, a1.v));
  const __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(a2.v, a3.v), _mm512_unpackhi_ps(a2.v, a3.v));
  const __m512d l = _mm512_castps_pd(low), h = _mm512_castps_pd(high);
  return {_mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(l, h)), _mm512_castpd_ps(_mm512_unpackhi_pd(l, h)))};
}
// The sums of the halves of eight vectors: quarters 0 and 2 are those of the left halves, 1 and 3 of the right ones.
TIDEGATE_INLINE F32 sum_halves(F32 a0, F32 a1, F32 a2, F32 a3, F32 a4, F32 a5, F32 a6, F32 a7) {
  const F32 left = sum_quarters(a0, a1, a2, a3), right = sum_quarters(a4, a5, a6, a7);
  return {_mm512_add_ps(_mm512_shuffle_f32x4(left.v, right.v, 0x88), _mm512_shuffle_f32x4(left.v, right.v, 0xdd))};
}
// What sum_halves gives to two rows of memory, `pitch` apart, or to the first of them.
TIDEGATE_INLINE void store_halves(float* to, int64_t pitch, F32 a, int64_t rows) {
  _mm_storeu_ps(to, _mm512_castps512_ps128(a.v));
  _mm_storeu_ps(to + 4, _mm512_extractf32x4_ps(a.v, 2));
  if (rows > 1) {
    _mm_storeu_ps(to + pitch, _mm512_extractf32x4_ps(a.v, 1));
    _mm_storeu_ps(to + pitch + 4, _mm512_extractf32x4_ps(a.v, 3));
  }
}
// The quarters of a vector to four rows, `pitch` apart.
TIDEGATE_INLINE void store_quarters(float* to, int64_t pitch, F32 a) {
  _mm_storeu_ps(to, _mm512_castps512_ps128(a.v));
  _mm_storeu_ps(to + pitch, _mm512_extractf32x4_ps(a.v, 1));
  _mm_storeu_ps(to + 2 * pitch, _mm512_extractf32x4_ps(a.v, 2));
  _mm_storeu_ps(to + 3 * pitch, _mm512_extractf32x4_ps(a.v, 3));
}
// Lane i: the pair (even[i], odd[i]). Both are exact in bf16.
TIDEGATE_INLINE Bf16Pairs zip(F32 even, F32 odd) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even.v), 16),
                          _mm512_and_si512(_mm512_castps_si512(odd.v), high))};
}
#endif

// Two vectors of neighbouring elements. In memory order for float and f16; a bf16 pair shares 32 bits, so there `a`
// holds the even elements and `b` the odd ones: one instruction each instead of a conversion. pair_element() says which
// is where.
struct F32x2 {
  F32 a, b;
};
TIDEGATE_INLINE F32x2 load2(const bf16* p) {
  const __m512i u = _mm512_loadu_si512(p);
  const __m512i odd = _mm512_and_si512(u, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(u, 16))}, {_mm512_castsi512_ps(odd)}};
}
template <class T>
TIDEGATE_INLINE F32x2 load2(const T* p) {
  return {load(p), load(p + kLanes)};
}
TIDEGATE_INLINE __m512i join_bf16(F32x2 v) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return _mm512_or_si512(_mm512_srli_epi32(round_bits_bf16(v.a), 16),
                         _mm512_and_si512(round_bits_bf16(v.b), high));  // one vpternlogd
}
#if TIDEGATE_ISA_ID == 4
// The conversion takes two vectors at once and leaves the even elements in the lower half.
TIDEGATE_INLINE __m512i narrow2(F32x2 v) {
  if (__builtin_expect((denormals(v.a) | denormals(v.b)) != 0, 0)) {
    return join_bf16(v);
  }
  static constexpr uint16_t kInterleaved[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_loadu_si512(kInterleaved),
                                  reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(v.b.v, v.a.v)));
}
// round_to of both: one conversion, then the elements of each go back to the upper halves of its lanes.
TIDEGATE_INLINE F32x2 round_to(F32x2 v, const bf16* like) {
  if (__builtin_expect((denormals(v.a) | denormals(v.b)) != 0, 0)) {
    return {round_to(v.a, like), round_to(v.b, like)};
  }
  static constexpr uint16_t kUpper[32] = {0, 0, 0, 1, 0, 2,  0, 3,  0, 4,  0, 5,  0, 6,  0, 7,
                                          0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
  const __m512i a = _mm512_loadu_si512(kUpper);
  const __m512i b = _mm512_or_si512(a, _mm512_set1_epi16(16));
  const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(v.b.v, v.a.v));
  return {{_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, a, both))},
          {_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, b, both))}};
}
#else
TIDEGATE_INLINE __m512i narrow2(F32x2 v) { return join_bf16(v); }
#endif
TIDEGATE_INLINE void store2(bf16* p, F32x2 v) { _mm512_storeu_si512(p, narrow2(v)); }
TIDEGATE_INLINE void stream2(bf16* p, F32x2 v) {
  _mm512_stream_ps(reinterpret_cast<float*>(p), _mm512_castsi512_ps(narrow2(v)));
}
template <class T>
TIDEGATE_INLINE void store2(T* p, F32x2 v) {
  store(p, v.a);
  store(p + kLanes, v.b);
}
template <class T>
TIDEGATE_INLINE void stream2(T* p, F32x2 v) {
  stream(p, v.a);
  stream(p + kLanes, v.b);
}

}  // namespace tidegate::TIDEGATE_ISA
