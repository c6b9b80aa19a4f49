// The vocabulary on AVX2, FMA and F16C: eight floats in a ymm register.
#pragma once

#include <immintrin.h>

#include "simd/types.h"

namespace tidegate::avx2 {

constexpr int kLanes = 8;

struct F32 {
  __m256 v;
};
struct Mask {
  __m256 v;
};
struct Bf16Pairs {
  __m256i v;
};

TIDEGATE_INLINE F32 set1(float x) { return {_mm256_set1_ps(x)}; }
TIDEGATE_INLINE F32 zero() { return {_mm256_setzero_ps()}; }

TIDEGATE_INLINE F32 widen_lanes(__m128i x, const bf16*) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16))};
}
TIDEGATE_INLINE F32 widen_lanes(__m128i x, const f16*) { return {_mm256_cvtph_ps(x)}; }

// Round to nearest even: add just under half a unit of the last kept bit, and that bit itself, then cut. NaN would
// overflow into the sign, so it takes its own way and becomes quiet.
TIDEGATE_INLINE __m256i round_bits_bf16(F32 a) {
  const __m256i u = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const __m256 is_nan = _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan));
}
TIDEGATE_INLINE __m128i narrow_lanes(F32 a, const bf16*) {
  const __m256i high = _mm256_srli_epi32(round_bits_bf16(a), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
TIDEGATE_INLINE __m128i narrow_lanes(F32 a, const f16*) { return _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT); }

TIDEGATE_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
template <class T>
TIDEGATE_INLINE F32 load(const T* p) {
  return widen_lanes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), p);
}
TIDEGATE_INLINE void store(float* p, F32 a) { _mm256_storeu_ps(p, a.v); }
template <class T>
TIDEGATE_INLINE void store(T* p, F32 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_lanes(a, p));
}
// The first n elements, 0 in the other lanes; nothing beyond them is touched. 0 <= n <= kLanes.
TIDEGATE_INLINE __m256i first_lanes(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
TIDEGATE_INLINE F32 load_n(const float* p, int64_t n) { return {_mm256_maskload_ps(p, first_lanes(n))}; }
// Of 16-bit elements by pieces of the width of integers: a loop would become a call of memcpy, which saves no vector
// register. Two loads overlap; what both hold is shifted out, in two steps because a shift by all bits is none.
TIDEGATE_INLINE __m128i load_words(const void* p, int64_t n) {
  const char* from = static_cast<const char*>(p);
  uint64_t low = 0;
  uint64_t high = 0;
  if (n >= 4) {
    memcpy(&low, from, 8);
    memcpy(&high, from + 2 * n - 8, 8);
    high = high >> (8 * (8 - n)) >> (8 * (8 - n));
  } else if (n >= 2) {
    uint32_t first, last;
    memcpy(&first, from, 4);
    memcpy(&last, from + 2 * n - 4, 4);
    low = first | static_cast<uint64_t>(last >> (8 * (4 - n)) >> (8 * (4 - n))) << 32;
  } else if (n == 1) {
    memcpy(&low, from, 2);
  }
  return _mm_set_epi64x(static_cast<int64_t>(high), static_cast<int64_t>(low));
}
TIDEGATE_INLINE void store_words(void* p, __m128i a, int64_t n) {
  char* to = static_cast<char*>(p);
  if (n == 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), a);
    return;
  }
  uint64_t rest = static_cast<uint64_t>(_mm_cvtsi128_si64(a));
  if ((n & 4) != 0) {
    memcpy(to, &rest, 8);
    to += 8;
    rest = static_cast<uint64_t>(_mm_extract_epi64(a, 1));
  }
  if ((n & 2) != 0) {
    memcpy(to, &rest, 4);
    to += 4;
    rest >>= 32;
  }
  if ((n & 1) != 0) {
    memcpy(to, &rest, 2);
  }
}
template <class T>
TIDEGATE_INLINE F32 load_n(const T* p, int64_t n) {
  return widen_lanes(load_words(p, n), p);
}
TIDEGATE_INLINE void store_n(float* p, F32 a, int64_t n) { _mm256_maskstore_ps(p, first_lanes(n), a.v); }
template <class T>
TIDEGATE_INLINE void store_n(T* p, F32 a, int64_t n) {
  store_words(p, narrow_lanes(a, p), n);
}
// Stores past the caches; p must be aligned to the size of what is written. stream_fence() before others may read.
TIDEGATE_INLINE void stream(float* p, F32 a) { _mm256_stream_ps(p, a.v); }
template <class T>
TIDEGATE_INLINE void stream(T* p, F32 a) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), narrow_lanes(a, p));
}
TIDEGATE_INLINE void stream_fence() { _mm_sfence(); }
// As an instruction of its own: g++ takes a function that only prefetches for one without effect, and drops its calls.
TIDEGATE_INLINE void prefetch(const void* p) { __asm__ volatile("prefetcht0 (%0)" : : "r"(p)); }

TIDEGATE_INLINE F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.v, b.v)}; }
TIDEGATE_INLINE F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.v, b.v)}; }
TIDEGATE_INLINE F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.v, b.v)}; }
TIDEGATE_INLINE F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.v, b.v)}; }
TIDEGATE_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
// min and max return b when either is NaN.
TIDEGATE_INLINE F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.v, b.v)}; }
TIDEGATE_INLINE F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
TIDEGATE_INLINE F32 abs(F32 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
TIDEGATE_INLINE F32 sqrt(F32 a) { return {_mm256_sqrt_ps(a.v)}; }
TIDEGATE_INLINE F32 round(F32 a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n for integral n in [-252, 254], in two exact steps so that only a denormal result rounds.
TIDEGATE_INLINE F32 scale_by_power(F32 a, F32 n) {
  const __m256i whole = _mm256_cvtps_epi32(n.v);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
  return {_mm256_mul_ps(_mm256_mul_ps(a.v, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second))};
}
// m * 2^n for m near 1 and integral n in [-126, 126], where shifted = 1.5 * 2^23 + n: its low bits are n.
TIDEGATE_INLINE F32 add_exponent(F32 m, F32 shifted) {
  const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(shifted.v), 23);
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(m.v), n))};
}
// x / (1 + m 2^n) for m in (0.5, 2) and integral n in [-126, 255]. Both sides of the fraction are divided by 2^half, so
// that neither leaves the range and only a denormal quotient loses bits; n = 255 is infinity.
TIDEGATE_INLINE F32 over_one_plus(F32 x, F32 m, F32 n) {
  const __m256i whole = _mm256_cvtps_epi32(n.v);
  const __m256i half = _mm256_max_epi32(_mm256_srai_epi32(whole, 1), _mm256_setzero_si256());
  const __m256i one = _mm256_castps_si256(_mm256_set1_ps(1.0f));
  const __m256 down = _mm256_castsi256_ps(_mm256_sub_epi32(one, _mm256_slli_epi32(half, 23)));
  const __m256 rest = _mm256_castsi256_ps(_mm256_add_epi32(one, _mm256_slli_epi32(_mm256_sub_epi32(whole, half), 23)));
  return {_mm256_div_ps(_mm256_mul_ps(x.v, down), _mm256_fmadd_ps(m.v, rest, down))};
}

TIDEGATE_INLINE Mask less(F32 a, F32 b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
TIDEGATE_INLINE Mask equal(F32 a, F32 b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)}; }
TIDEGATE_INLINE F32 select(Mask m, F32 yes, F32 no) { return {_mm256_blendv_ps(no.v, yes.v, m.v)}; }

// Sum of all lanes, always in the same order: halves are added until one lane is left.
TIDEGATE_INLINE float sum(F32 a) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Rounds to the type of the pointer and back: what a store and a load would do.
TIDEGATE_INLINE F32 round_to(F32 a, const float*) { return a; }
TIDEGATE_INLINE F32 round_to(F32 a, const bf16*) {
  return {_mm256_castsi256_ps(_mm256_and_si256(round_bits_bf16(a), _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}
TIDEGATE_INLINE F32 round_to(F32 a, const f16* like) { return widen_lanes(narrow_lanes(a, like), like); }

TIDEGATE_INLINE Bf16Pairs load_pairs(const bf16* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
// One pair in every lane.
TIDEGATE_INLINE Bf16Pairs set1_pair(const bf16* p) {
  int32_t pair;
  memcpy(&pair, p, 4);
  return {_mm256_set1_epi32(pair)};
}
// acc[i] + a[2i] b[2i] + a[2i+1] b[2i+1]. The odd products come first, as in the instruction of AVX512-BF16.
TIDEGATE_INLINE F32 dot(F32 acc, Bf16Pairs a, Bf16Pairs b) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256 odd = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a.v, high)),
                                     _mm256_castsi256_ps(_mm256_and_si256(b.v, high)), acc.v);
  return {_mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a.v, 16)),
                          _mm256_castsi256_ps(_mm256_slli_epi32(b.v, 16)), odd)};
}

// Two vectors of neighbouring elements. In memory order for float and f16; a bf16 pair shares 32 bits, so there `a`
// holds the even elements and `b` the odd ones: one instruction each instead of a conversion. pair_element() says which
// is where.
struct F32x2 {
  F32 a, b;
};
TIDEGATE_INLINE F32x2 load2(const bf16* p) {
  const __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i odd = _mm256_and_si256(u, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(u, 16))}, {_mm256_castsi256_ps(odd)}};
}
template <class T>
TIDEGATE_INLINE F32x2 load2(const T* p) {
  return {load(p), load(p + kLanes)};
}
TIDEGATE_INLINE __m256i join_bf16(__m256i even, __m256i odd) {
  return _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
}
TIDEGATE_INLINE void store2(bf16* p, F32x2 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), join_bf16(round_bits_bf16(v.a), round_bits_bf16(v.b)));
}
TIDEGATE_INLINE void stream2(bf16* p, F32x2 v) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), join_bf16(round_bits_bf16(v.a), round_bits_bf16(v.b)));
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

}  // namespace tidegate::avx2
