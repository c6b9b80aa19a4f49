// Words of the vocabulary for sums of products of int8, exact in int32.
//
// A lane takes kGroup neighbours along the inner index at a time. With VNNI these are four bytes: the left factor is
// shifted by 128 to be unsigned, as the instruction wants it, and 128 times the sum of the right one is taken away
// again. Elsewhere they are two words: the byte instruction of AVX2 adds its pairs with saturation, words never do.
#pragma once

#include "simd/simd.h"

namespace tidegate::TIDEGATE_ISA {

#if TIDEGATE_ISA_ID == 4
constexpr int kGroup = 4;
typedef uint8_t Int8Left;
typedef int8_t Int8Right;
constexpr int kInt8Shift = 128;
#else
constexpr int kGroup = 2;
typedef int16_t Int8Left;
typedef int16_t Int8Right;
constexpr int kInt8Shift = 0;
#endif

// Sums, the vectors of a panel's row, a group of the left factor and a product: 12 + 3 + 1 of 16 where the product
// replaces the group, and there are fewer loads a product than in 6 x 2. 24 + 3 + 1 + 1 of 32.
#if TIDEGATE_ISA_ID == 1
constexpr int kInt8Rows = 2, kInt8Vectors = 1;
#elif TIDEGATE_ISA_ID == 2
constexpr int kInt8Rows = 4, kInt8Vectors = 3;
#else
constexpr int kInt8Rows = 8, kInt8Vectors = 3;
#endif
constexpr int kInt8Panel = kInt8Vectors * kLanes;

#if TIDEGATE_ISA_ID == 1
struct I32 {
  IntLanes v;
};
TIDEGATE_INLINE I32 integer_zero() { return {IntLanes{}}; }
TIDEGATE_INLINE I32 load(const int32_t* p) {
  I32 r;
  memcpy(&r.v, p, sizeof r.v);
  return r;
}
TIDEGATE_INLINE void store(int32_t* p, I32 a) { memcpy(p, &a.v, sizeof a.v); }
TIDEGATE_INLINE I32 load_group(const void* p) { return load(static_cast<const int32_t*>(p)); }
TIDEGATE_INLINE I32 set1_group(const void* p) {
  int32_t group;
  memcpy(&group, p, 4);
  return {group - IntLanes{}};
}
// kLanes groups of neighbours.
TIDEGATE_INLINE I32 load_widened(const int8_t* p) {
  int16_t words[2 * kLanes];
  for (int i = 0; i < 2 * kLanes; ++i) {
    words[i] = p[i];
  }
  return load_group(words);
}
TIDEGATE_INLINE I32 operator-(I32 a, I32 b) { return {a.v - b.v}; }
TIDEGATE_INLINE F32 to_float(I32 a) { return {__builtin_convertvector(a.v, FloatLanes)}; }
// acc + a0 b0 + a1 b1, the two words of every lane.
TIDEGATE_INLINE I32 add_groups(I32 acc, I32 a, I32 b) {
  return {acc.v + (a.v << 16 >> 16) * (b.v << 16 >> 16) + (a.v >> 16) * (b.v >> 16)};
}
#elif TIDEGATE_ISA_ID == 2
struct I32 {
  __m256i v;
};
TIDEGATE_INLINE I32 integer_zero() { return {_mm256_setzero_si256()}; }
TIDEGATE_INLINE I32 load_group(const void* p) { return {_mm256_loadu_si256(static_cast<const __m256i*>(p))}; }
TIDEGATE_INLINE I32 load(const int32_t* p) { return load_group(p); }
TIDEGATE_INLINE void store(int32_t* p, I32 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v); }
TIDEGATE_INLINE I32 set1_group(const void* p) {
  int32_t group;
  memcpy(&group, p, 4);
  return {_mm256_set1_epi32(group)};
}
// kLanes groups of neighbours.
TIDEGATE_INLINE I32 load_widened(const int8_t* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
TIDEGATE_INLINE I32 operator-(I32 a, I32 b) { return {_mm256_sub_epi32(a.v, b.v)}; }
TIDEGATE_INLINE F32 to_float(I32 a) { return {_mm256_cvtepi32_ps(a.v)}; }
// acc + a0 b0 + a1 b1, the two words of every lane. The addition is written out because g++ otherwise moves the sums to
// other registers, runs out of them and goes through memory.
TIDEGATE_INLINE I32 add_groups(I32 acc, I32 a, I32 b) {
  const __m256i product = _mm256_madd_epi16(a.v, b.v);
  __asm__("vpaddd %1, %0, %0" : "+x"(acc.v) : "x"(product));
  return acc;
}
#else
struct I32 {
  __m512i v;
};
TIDEGATE_INLINE I32 integer_zero() { return {_mm512_setzero_si512()}; }
TIDEGATE_INLINE I32 load_group(const void* p) { return {_mm512_loadu_si512(p)}; }
TIDEGATE_INLINE I32 load(const int32_t* p) { return load_group(p); }
TIDEGATE_INLINE void store(int32_t* p, I32 a) { _mm512_storeu_si512(p, a.v); }
TIDEGATE_INLINE I32 set1_group(const void* p) {
  int32_t group;
  memcpy(&group, p, 4);
  return {_mm512_set1_epi32(group)};
}
// kLanes groups of neighbours.
TIDEGATE_INLINE I32 load_widened(const int8_t* p) {
#if TIDEGATE_ISA_ID == 4
  return load_group(p);
#else
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
#endif
}
TIDEGATE_INLINE I32 operator-(I32 a, I32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
TIDEGATE_INLINE F32 to_float(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
// acc plus the products of every lane: four of unsigned and signed bytes, or two of words.
TIDEGATE_INLINE I32 add_groups(I32 acc, I32 a, I32 b) {
#if TIDEGATE_ISA_ID == 4
  return {_mm512_dpbusd_epi32(acc.v, a.v, b.v)};
#else
  return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(a.v, b.v))};
#endif
}
#if TIDEGATE_ISA_ID == 4
// Quads: a quarter of a vector for each of four rows, sixteen bytes of it.
TIDEGATE_INLINE void store_shifted_quad(uint8_t* to, const int8_t* a, const int8_t* b, const int8_t* c,
                                        const int8_t* d) {
  const auto pair = [](const int8_t* low, const int8_t* high) {
    const __m256i first = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low)));
    const __m256i both = _mm256_inserti128_si256(first, _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);
    return _mm256_xor_si256(both, _mm256_set1_epi8(-128));  // as bytes without sign: 128 more
  };
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), pair(a, b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + 1, pair(c, d));
}
TIDEGATE_INLINE I32 set1_quad(const int8_t* p) {
  return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// Lane 4 c + i: the sum of quarter c of the i-th vector.
TIDEGATE_INLINE I32 sum_quads(I32 a0, I32 a1, I32 a2, I32 a3) {
  const __m512i low = _mm512_add_epi32(_mm512_unpacklo_epi32(a0.v, a1.v), _mm512_unpackhi_epi32(a0.v, a1.v));
  const __m512i high = _mm512_add_epi32(_mm512_unpacklo_epi32(a2.v, a3.v), _mm512_unpackhi_epi32(a2.v, a3.v));
  return {_mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high))};
}
TIDEGATE_INLINE void store_quarters(int32_t* to, int64_t pitch, I32 a) {
  store_quarters(reinterpret_cast<float*>(to), pitch, F32{_mm512_castsi512_ps(a.v)});
}
#endif
#endif

}  // namespace tidegate::TIDEGATE_ISA
