// Test builds only: the AVX-512 intrinsics that avx512.h uses, for a compiler that may use AVX2, FMA and F16C.
// SIMDe translates most of them; what it lacks, or does not do as the instruction does, is defined here.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <immintrin.h>
#include <simde/x86/avx512/add.h>
#include <simde/x86/avx512/and.h>
#include <simde/x86/avx512/broadcast.h>
#include <simde/x86/avx512/cast.h>
#include <simde/x86/avx512/div.h>
#include <simde/x86/avx512/extract.h>
#include <simde/x86/avx512/fmadd.h>
#include <simde/x86/avx512/loadu.h>
#include <simde/x86/avx512/max.h>
#include <simde/x86/avx512/min.h>
#include <simde/x86/avx512/mul.h>
#include <simde/x86/avx512/or.h>
#include <simde/x86/avx512/set1.h>
#include <simde/x86/avx512/setzero.h>
#include <simde/x86/avx512/shuffle.h>
#include <simde/x86/avx512/slli.h>
#include <simde/x86/avx512/sqrt.h>
#include <simde/x86/avx512/srli.h>
#include <simde/x86/avx512/storeu.h>
#include <simde/x86/avx512/sub.h>
#include <simde/x86/avx512/unpackhi.h>
#include <simde/x86/avx512/unpacklo.h>
#include <stdint.h>
#include <string.h>

namespace tidegate::emulated {

#define TIDEGATE_EMULATED [[gnu::always_inline]] static inline

struct Halves {
  __m256 v[2];
};
TIDEGATE_EMULATED Halves split(simde__m512 a) {
  Halves h;
  memcpy(&h, &a, sizeof h);
  return h;
}
TIDEGATE_EMULATED simde__m512 join(__m256 low, __m256 high) {
  const Halves h = {{low, high}};
  simde__m512 a;
  memcpy(&a, &h, sizeof a);
  return a;
}

// Missing in SIMDe 0.7.4, for each of which AVX2 or F16C has the same operation on half the width.
TIDEGATE_EMULATED __m256 high_half(simde__m512 a) { return split(a).v[1]; }
TIDEGATE_EMULATED simde__m512 half_to_float(__m256i x) {
  return join(_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)));
}
template <int rounding>
TIDEGATE_EMULATED __m256i float_to_half(simde__m512 a) {
  const Halves h = split(a);
  return _mm256_set_m128i(_mm256_cvtps_ph(h.v[1], rounding), _mm256_cvtps_ph(h.v[0], rounding));
}
TIDEGATE_EMULATED simde__m512i widen_u16(__m256i x) {
  return simde_mm512_castps_si512(join(_mm256_castsi256_ps(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x))),
                                       _mm256_castsi256_ps(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1)))));
}

// Missing: keeps the low 16 bits of each lane. AVX2 only narrows with saturation, so the high bits go first.
TIDEGATE_EMULATED __m256i truncate_to_u16(simde__m512i a) {
  const Halves h = split(simde_mm512_castsi512_ps(a));
  const __m256i low_bits = _mm256_set1_epi32(0xffff);
  const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(_mm256_castps_si256(h.v[0]), low_bits),
                                             _mm256_and_si256(_mm256_castps_si256(h.v[1]), low_bits));
  return _mm256_permute4x64_epi64(packed, 0xd8);
}

// Missing for floats.
template <int quarters>
TIDEGATE_EMULATED simde__m512 shuffle_quarters(simde__m512 a, simde__m512 b) {
  return simde_mm512_castsi512_ps(
      simde_mm512_shuffle_i32x4(simde_mm512_castps_si512(a), simde_mm512_castps_si512(b), quarters));
}

// Missing: masked memory operations. Element by element, because a lane that is masked off must not be touched.
TIDEGATE_EMULATED simde__m512 load_floats(simde__mmask16 k, const void* p) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) {
    lanes[i] = (k >> i & 1) != 0 ? static_cast<const float*>(p)[i] : 0.0f;
  }
  return simde_mm512_loadu_ps(lanes);
}
TIDEGATE_EMULATED void store_floats(void* p, simde__mmask16 k, simde__m512 a) {
  float lanes[16];
  simde_mm512_storeu_ps(lanes, a);
  for (int i = 0; i < 16; ++i) {
    if ((k >> i & 1) != 0) {
      static_cast<float*>(p)[i] = lanes[i];
    }
  }
}
TIDEGATE_EMULATED __m256i load_words(simde__mmask16 k, const void* p) {
  uint16_t lanes[16] = {};
  for (int i = 0; i < 16; ++i) {
    if ((k >> i & 1) != 0) {
      memcpy(lanes + i, static_cast<const char*>(p) + 2 * i, 2);
    }
  }
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lanes));
}
TIDEGATE_EMULATED simde__m512i load_all_words(simde__mmask32 k, const void* p) {
  uint16_t lanes[32] = {};
  for (int i = 0; i < 32; ++i) {
    if ((k >> i & 1) != 0) {
      memcpy(lanes + i, static_cast<const char*>(p) + 2 * i, 2);
    }
  }
  return simde_mm512_loadu_si512(lanes);
}
TIDEGATE_EMULATED void store_words(void* p, simde__mmask16 k, __m256i a) {
  uint16_t lanes[16];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), a);
  for (int i = 0; i < 16; ++i) {
    if ((k >> i & 1) != 0) {
      memcpy(static_cast<char*>(p) + 2 * i, lanes + i, 2);
    }
  }
}

// Missing. The instruction faults unless p is a multiple of 64; two halves would let a multiple of 32 pass.
TIDEGATE_EMULATED void stream_floats(float* p, simde__m512 a) {
  if (reinterpret_cast<uintptr_t>(p) % 64 != 0) {
    __builtin_trap();
  }
  const Halves h = split(a);
  _mm256_stream_ps(p, h.v[0]);
  _mm256_stream_ps(p + 8, h.v[1]);
}

// SIMDe forms and spreads masks bit by bit, which would make the exhaustive tests several times slower.
template <int predicate>
TIDEGATE_EMULATED simde__mmask16 compare(simde__m512 a, simde__m512 b) {
  const Halves x = split(a);
  const Halves y = split(b);
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(x.v[0], y.v[0], predicate));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(x.v[1], y.v[1], predicate));
  return static_cast<simde__mmask16>(low | high << 8);
}
TIDEGATE_EMULATED __m256 spread(int k) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(k), bit), bit));
}
TIDEGATE_EMULATED simde__m512 blend(simde__mmask16 k, simde__m512 no, simde__m512 yes) {
  const Halves a = split(no);
  const Halves b = split(yes);
  return join(_mm256_blendv_ps(a.v[0], b.v[0], spread(k)), _mm256_blendv_ps(a.v[1], b.v[1], spread(k >> 8)));
}
TIDEGATE_EMULATED simde__m512i masked_or(simde__m512i src, simde__mmask16 k, simde__m512i a, simde__m512i b) {
  return simde_mm512_castps_si512(
      blend(k, simde_mm512_castsi512_ps(src), simde_mm512_castsi512_ps(simde_mm512_or_si512(a, b))));
}

// SIMDe compares with 0, so -0 and negative NaN keep their sign; the instruction clears the bit.
TIDEGATE_EMULATED simde__m512 clear_sign(simde__m512 a) {
  const Halves h = split(a);
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return join(_mm256_andnot_ps(sign, h.v[0]), _mm256_andnot_ps(sign, h.v[1]));
}

// SIMDe scales by exp2f() on both sides of the rounding; for no binary places that is the rounding of AVX.
template <int control>
TIDEGATE_EMULATED simde__m512 round_to_integer(simde__m512 a) {
  static_assert(control >> 4 == 0, "only rounding to integers is emulated");
  const Halves h = split(a);
  return join(_mm256_round_ps(h.v[0], control), _mm256_round_ps(h.v[1], control));
}

// SIMDe takes denormal operands as 0 and forms 2^floor(b) in fp32, which overflows or rounds twice. In fp64 the product
// is exact for every b that matters, and the one rounding is that of the result. The infinite b follow the manual.
TIDEGATE_EMULATED float scale_lane(float a, float b) {
  const float infinity = __builtin_inff();
  if (b != b) {
    return a != a ? a + a : b + b;
  }
  if (b == infinity) {
    return a != a ? infinity : a == 0.0f ? __builtin_nanf("") : __builtin_copysignf(infinity, a);
  }
  if (b == -infinity) {
    return a != a ? 0.0f : a - a != 0.0f || a - a != a - a ? __builtin_nanf("") : __builtin_copysignf(0.0f, a);
  }
  const float bounded = b < -400.0f ? -400.0f : b > 400.0f ? 400.0f : b;
  const uint64_t bits = static_cast<uint64_t>(1023 + static_cast<int>(__builtin_floorf(bounded))) << 52;
  double power;
  memcpy(&power, &bits, sizeof power);
  return static_cast<float>(static_cast<double>(a) * power);
}
TIDEGATE_EMULATED simde__m512 scale(simde__m512 a, simde__m512 b) {
  float x[16];
  float y[16];
  simde_mm512_storeu_ps(x, a);
  simde_mm512_storeu_ps(y, b);
  for (int i = 0; i < 16; ++i) {
    x[i] = scale_lane(x[i], y[i]);
  }
  return simde_mm512_loadu_ps(x);
}

// Denormals to 0 with their sign.
TIDEGATE_EMULATED __m256 flush(__m256 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  const __m256 denormal = _mm256_cmp_ps(_mm256_andnot_ps(sign, a), _mm256_set1_ps(0x1p-126f), _CMP_LT_OQ);
  return _mm256_blendv_ps(a, _mm256_and_ps(a, sign), denormal);
}
// SIMDe adds separately rounded products, the even element first. The instruction has two fused steps, the odd element
// first, takes denormals as 0 and flushes those that result; so does this. Which of several NaNs wins is not emulated.
TIDEGATE_EMULATED __m256 dot_half(__m256 acc, __m256i a, __m256i b) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256 a_odd = flush(_mm256_castsi256_ps(_mm256_and_si256(a, high)));
  const __m256 b_odd = flush(_mm256_castsi256_ps(_mm256_and_si256(b, high)));
  const __m256 a_even = flush(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)));
  const __m256 b_even = flush(_mm256_castsi256_ps(_mm256_slli_epi32(b, 16)));
  const __m256 first = flush(_mm256_fmadd_ps(a_odd, b_odd, flush(acc)));
  return flush(_mm256_fmadd_ps(a_even, b_even, first));
}
TIDEGATE_EMULATED simde__m512 dot(simde__m512 acc, simde__m512bh a, simde__m512bh b) {
  const Halves h = split(acc);
  __m256i x[2];
  __m256i y[2];
  memcpy(x, &a, sizeof x);
  memcpy(y, &b, sizeof y);
  return join(dot_half(h.v[0], x[0], y[0]), dot_half(h.v[1], x[1], y[1]));
}

// The conversion of two vectors to bf16: b's results in the upper half. Denormals become 0 before and after.
TIDEGATE_EMULATED simde__m512bh narrow_pair(simde__m512 b, simde__m512 a) {
  float lanes[32];
  simde_mm512_storeu_ps(lanes, a);
  simde_mm512_storeu_ps(lanes + 16, b);
  uint16_t words[32];
  for (int i = 0; i < 32; ++i) {
    uint32_t u;
    memcpy(&u, lanes + i, sizeof u);
    if ((u & 0x7f800000u) == 0) {
      words[i] = static_cast<uint16_t>(u >> 16 & 0x8000u);
    } else if ((u & 0x7fffffffu) > 0x7f800000u) {
      words[i] = static_cast<uint16_t>(u >> 16 | 0x40u);
    } else {
      words[i] = static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
    }
  }
  simde__m512bh result;
  memcpy(&result, words, sizeof result);
  return result;
}
TIDEGATE_EMULATED __m256i narrow_one(simde__m512 a) {
  const simde__m512bh both = narrow_pair(a, a);
  __m256i half;
  memcpy(&half, &both, sizeof half);
  return half;
}
TIDEGATE_EMULATED simde__m512i permute_words(uint32_t mask, simde__m512i order, simde__m512i a) {
  uint16_t from[32];
  uint16_t to[32];
  uint16_t index[32];
  memcpy(from, &a, sizeof from);
  memcpy(index, &order, sizeof index);
  for (int i = 0; i < 32; ++i) {
    to[i] = (mask >> i & 1) != 0 ? from[index[i] & 31] : uint16_t{0};
  }
  simde__m512i result;
  memcpy(&result, to, sizeof result);
  return result;
}
template <int classes>
TIDEGATE_EMULATED simde__mmask16 classify(simde__m512 a) {
  static_assert(classes == 0x20, "only denormals are asked for");
  const Halves h = split(a);
  int mask = 0;
  for (int i = 0; i < 2; ++i) {
    const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), h.v[i]);
    const __m256 small = _mm256_cmp_ps(size, _mm256_set1_ps(0x1p-126f), _CMP_LT_OQ);
    mask |= _mm256_movemask_ps(_mm256_and_ps(small, _mm256_cmp_ps(size, _mm256_setzero_ps(), _CMP_GT_OQ))) << 8 * i;
  }
  return static_cast<simde__mmask16>(mask);
}

// Integer products, as AVX2 has them on half the width. SIMDe's byte product goes through 16 bits lane by lane.
struct IntegerHalves {
  __m256i v[2];
};
TIDEGATE_EMULATED IntegerHalves split_integers(simde__m512i a) {
  IntegerHalves h;
  memcpy(&h, &a, sizeof h);
  return h;
}
TIDEGATE_EMULATED simde__m512i join_integers(__m256i low, __m256i high) {
  const IntegerHalves h = {{low, high}};
  simde__m512i a;
  memcpy(&a, &h, sizeof a);
  return a;
}
TIDEGATE_EMULATED simde__m512i multiply_words(simde__m512i a, simde__m512i b) {
  const IntegerHalves x = split_integers(a);
  const IntegerHalves y = split_integers(b);
  return join_integers(_mm256_madd_epi16(x.v[0], y.v[0]), _mm256_madd_epi16(x.v[1], y.v[1]));
}
TIDEGATE_EMULATED __m256i dot_bytes_half(__m256i acc, __m256i a, __m256i b) {
  const __m256i low = _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm256_castsi256_si128(a)),
                                        _mm256_cvtepi8_epi16(_mm256_castsi256_si128(b)));
  const __m256i high = _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm256_extracti128_si256(a, 1)),
                                         _mm256_cvtepi8_epi16(_mm256_extracti128_si256(b, 1)));
  return _mm256_add_epi32(acc, _mm256_permute4x64_epi64(_mm256_hadd_epi32(low, high), 0xd8));
}
TIDEGATE_EMULATED simde__m512i dot_bytes(simde__m512i acc, simde__m512i a, simde__m512i b) {
  const IntegerHalves t = split_integers(acc);
  const IntegerHalves x = split_integers(a);
  const IntegerHalves y = split_integers(b);
  return join_integers(dot_bytes_half(t.v[0], x.v[0], y.v[0]), dot_bytes_half(t.v[1], x.v[1], y.v[1]));
}
TIDEGATE_EMULATED simde__m512i widen_bytes(__m256i a) {
  return join_integers(_mm256_cvtepi8_epi16(_mm256_castsi256_si128(a)),
                       _mm256_cvtepi8_epi16(_mm256_extracti128_si256(a, 1)));
}
TIDEGATE_EMULATED simde__m512 integers_to_float(simde__m512i a) {
  const IntegerHalves h = split_integers(a);
  return join(_mm256_cvtepi32_ps(h.v[0]), _mm256_cvtepi32_ps(h.v[1]));
}

#undef TIDEGATE_EMULATED

}  // namespace tidegate::emulated

#undef _mm256_mask_storeu_epi16
#undef _mm256_maskz_loadu_epi16
#undef _mm512_abs_ps
#undef _mm512_cmp_ps_mask
#undef _mm512_cvtepi32_epi16
#undef _mm512_cvtepi8_epi16
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtph_ps
#undef _mm512_cvtne2ps_pbh
#undef _mm512_cvtneps_pbh
#undef _mm512_cvtps_ph
#undef _mm512_dpbf16_ps
#undef _mm512_dpbusd_epi32
#undef _mm512_extractf32x8_ps
#undef _mm512_fpclass_ps_mask
#undef _mm512_madd_epi16
#undef _mm512_mask_blend_ps
#undef _mm512_mask_or_epi32
#undef _mm512_mask_storeu_ps
#undef _mm512_maskz_loadu_epi16
#undef _mm512_maskz_loadu_ps
#undef _mm512_maskz_permutexvar_epi16
#undef _mm512_permutexvar_epi16
#undef _mm512_roundscale_ps
#undef _mm512_scalef_ps
#undef _mm512_shuffle_f32x4
#undef _mm512_stream_ps
#define _mm256_mask_storeu_epi16(p, k, a) tidegate::emulated::store_words(p, k, a)
#define _mm256_maskz_loadu_epi16(k, p) tidegate::emulated::load_words(k, p)
#define _mm512_abs_ps(a) tidegate::emulated::clear_sign(a)
#define _mm512_cmp_ps_mask(a, b, predicate) tidegate::emulated::compare<predicate>(a, b)
#define _mm512_cvtepi32_epi16(a) tidegate::emulated::truncate_to_u16(a)
#define _mm512_cvtepi8_epi16(a) tidegate::emulated::widen_bytes(a)
#define _mm512_cvtepi32_ps(a) tidegate::emulated::integers_to_float(a)
#define _mm512_cvtepu16_epi32(a) tidegate::emulated::widen_u16(a)
#define _mm512_cvtph_ps(a) tidegate::emulated::half_to_float(a)
#define _mm512_cvtne2ps_pbh(b, a) tidegate::emulated::narrow_pair(b, a)
#define _mm512_cvtneps_pbh(a) tidegate::emulated::narrow_one(a)
#define _mm512_cvtps_ph(a, rounding) tidegate::emulated::float_to_half<rounding>(a)
#define _mm512_dpbf16_ps(acc, a, b) tidegate::emulated::dot(acc, a, b)
#define _mm512_dpbusd_epi32(acc, a, b) tidegate::emulated::dot_bytes(acc, a, b)
#define _mm512_extractf32x8_ps(a, i) tidegate::emulated::high_half(a)
#define _mm512_fpclass_ps_mask(a, classes) tidegate::emulated::classify<classes>(a)
#define _mm512_madd_epi16(a, b) tidegate::emulated::multiply_words(a, b)
#define _mm512_mask_blend_ps(k, no, yes) tidegate::emulated::blend(k, no, yes)
#define _mm512_mask_or_epi32(src, k, a, b) tidegate::emulated::masked_or(src, k, a, b)
#define _mm512_mask_storeu_ps(p, k, a) tidegate::emulated::store_floats(p, k, a)
#define _mm512_maskz_loadu_epi16(k, p) tidegate::emulated::load_all_words(k, p)
#define _mm512_maskz_loadu_ps(k, p) tidegate::emulated::load_floats(k, p)
#define _mm512_maskz_permutexvar_epi16(k, order, a) tidegate::emulated::permute_words(k, order, a)
#define _mm512_permutexvar_epi16(order, a) tidegate::emulated::permute_words(~0u, order, a)
#define _mm512_roundscale_ps(a, control) tidegate::emulated::round_to_integer<control>(a)
#define _mm512_scalef_ps(a, b) tidegate::emulated::scale(a, b)
#define _mm512_shuffle_f32x4(a, b, quarters) tidegate::emulated::shuffle_quarters<quarters>(a, b)
#define _mm512_stream_ps(p, a) tidegate::emulated::stream_floats(p, a)
