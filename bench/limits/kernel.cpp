// The loops of limits.h, compiled once per instruction set like every kernel.
//
// Twelve chains: an fma takes 4 cycles and two start per cycle on current cores, vdpbf16ps takes 6; 12 accumulators and
// their operands still fit 16 registers. Operands from memory change their address with every step, or the compiler
// would load and widen them once.
#include "limits/limits.h"
#include "simd/simd.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

constexpr int kChains = 12;
constexpr int kRing = 8;  // start addresses that the steps rotate through; all of them stay in L1

int64_t fp32_fma(int64_t steps, float* sink) {
  F32 acc[kChains];
  for (int j = 0; j < kChains; ++j) {
    acc[j] = set1(static_cast<float>(j));
  }
  const F32 a = set1(0.999f);
  const F32 b = set1(0.001f * *sink);
  for (int64_t step = 0; step < steps; ++step) {
    for (int j = 0; j < kChains; ++j) {
      acc[j] = fma(acc[j], a, b);
    }
  }
  for (int j = 0; j < kChains; ++j) {
    *sink += sum(acc[j]);
  }
  return steps * kChains * kLanes * 2;
}

int64_t bf16_dot(int64_t steps, float* sink) {
  alignas(64) bf16 memory[(kRing + kChains) * 2 * kLanes];
  for (bf16& x : memory) {
    x = narrow_bf16(0.001f);
  }
  const Bf16Pairs held = load_pairs(memory);
  F32 acc[kChains];
  for (int j = 0; j < kChains; ++j) {
    acc[j] = zero();
  }
  for (int64_t step = 0; step < steps; ++step) {
    const bf16* p = memory + (step % kRing) * 2 * kLanes;
    for (int j = 0; j < kChains; ++j) {
      acc[j] = dot(acc[j], load_pairs(p + j * 2 * kLanes), held);
    }
  }
  for (int j = 0; j < kChains; ++j) {
    *sink += sum(acc[j]);
  }
  return steps * kChains * 2 * kLanes * 2;
}

// The vocabulary has no bytes: nothing in the library computes with them yet. These few words are for the limit only.
#if defined(__AVX512BW__)
using Bytes = __m512i;
Bytes load_bytes(const uint8_t* p) { return _mm512_load_si512(p); }
Bytes add_products(Bytes acc, Bytes a, Bytes b) {
  const Bytes pairs = _mm512_maddubs_epi16(a, b);
  return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
#elif defined(__AVX2__)
using Bytes = __m256i;
Bytes load_bytes(const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
Bytes add_products(Bytes acc, Bytes a, Bytes b) {
  const Bytes pairs = _mm256_maddubs_epi16(a, b);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

#if defined(__AVX2__)
template <Bytes (*kAdd)(Bytes, Bytes, Bytes)>
int64_t int8_loop(int64_t steps, float* sink) {
  constexpr int kBytes = sizeof(Bytes);
  alignas(64) uint8_t memory[(kRing + kChains) * kBytes];
  memset(memory, 1, sizeof memory);
  const Bytes held = load_bytes(memory);
  Bytes acc[kChains] = {};
  for (int64_t step = 0; step < steps; ++step) {
    const uint8_t* p = memory + (step % kRing) * kBytes;
    for (int j = 0; j < kChains; ++j) {
      acc[j] = kAdd(acc[j], load_bytes(p + j * kBytes), held);
    }
  }
  for (int j = 0; j < kChains; ++j) {
    int32_t first;
    memcpy(&first, &acc[j], sizeof first);
    *sink += static_cast<float>(first);
  }
  return steps * kChains * kBytes * 2;
}
constexpr ComputeLoop kInt8Dot = int8_loop<add_products>;
#else
constexpr ComputeLoop kInt8Dot = nullptr;
#endif

#if defined(__AVX512VNNI__)
Bytes add_products_vnni(Bytes acc, Bytes a, Bytes b) { return _mm512_dpbusd_epi32(acc, a, b); }
constexpr ComputeLoop kInt8Vnni = int8_loop<add_products_vnni>;
#else
constexpr ComputeLoop kInt8Vnni = nullptr;
#endif

#if defined(__AVX512BF16__)
constexpr bool kBf16Instruction = true;
#else
constexpr bool kBf16Instruction = false;
#endif

void read(const float* x, int64_t n, float* sink) {
  F32 acc[8];
  for (F32& a : acc) {
    a = zero();
  }
  for (int64_t i = 0; i < n; i += 8 * kLanes) {
    for (int j = 0; j < 8; ++j) {
      acc[j] = acc[j] + load(x + i + j * kLanes);
    }
  }
  for (const F32& a : acc) {
    *sink += sum(a);
  }
}

void read_modify_write(float* x, int64_t n) {
  const F32 factor = set1(0.999f);
  for (int64_t i = 0; i < n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      store(x + i + j * kLanes, load(x + i + j * kLanes) * factor);
    }
  }
}

void copy(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store(y + i, load(x + i));
  }
}

void stream_copy(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    stream(y + i, load(x + i));
  }
  stream_fence();
}

}  // namespace

extern const LimitLoops limit_loops;
const LimitLoops limit_loops = {fp32_fma, bf16_dot,          kInt8Dot, kInt8Vnni,  kBf16Instruction,
                                read,     read_modify_write, copy,     stream_copy};

}  // namespace tidegate::TIDEGATE_ISA
