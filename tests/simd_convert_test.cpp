// Every fp32 bit pattern to bf16 and fp16, every 16-bit pattern back. What is expected comes from the values of the
// formats: between two neighbours the midpoint decides, and on it the even one wins.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "simd_suite.h"
#include "tidegate/parallel.h"

namespace tidegate {
namespace {

struct Format {
  int index;  // in the tables of the probe
  int exponent_bits;
  int fraction_bits;

  std::uint32_t infinity() const { return ((1u << exponent_bits) - 1u) << fraction_bits; }
  std::uint32_t quiet() const { return 1u << (fraction_bits - 1); }
  // Of a finite magnitude; for the pattern of infinity, the value that would come after the largest finite one.
  double value(std::uint32_t bits) const {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = static_cast<int>(bits >> fraction_bits);
    const int fraction = static_cast<int>(bits & ((1u << fraction_bits) - 1u));
    return exponent == 0 ? std::ldexp(fraction, 1 - bias - fraction_bits)
                         : std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
  }
};
constexpr Format kBf16 = {1, 8, 7};
constexpr Format kF16 = {2, 5, 10};

// From this fp32 magnitude on, up to the next step, `result` is expected.
struct Step {
  std::uint32_t first;
  std::uint16_t result;
};

std::vector<Step> expected_steps(const Format& format) {
  std::vector<Step> steps = {{0, 0}};
  for (std::uint32_t bits = 0; bits < format.infinity(); ++bits) {
    const double middle = (format.value(bits) + format.value(bits + 1)) / 2;
    const float tie = static_cast<float>(middle);
    EXPECT_EQ(tie, middle);
    const bool up = bits % 2 == 1;
    steps.push_back({std::bit_cast<std::uint32_t>(tie) + (up ? 0u : 1u), static_cast<std::uint16_t>(bits + 1)});
  }
  // NaN: quiet, with the leading bits of what it carried.
  for (std::uint32_t payload = 0; payload < 1u << format.fraction_bits; ++payload) {
    steps.push_back({std::max(0x7f800001u, 0x7f800000u + (payload << (23 - format.fraction_bits))),
                     static_cast<std::uint16_t>(format.infinity() | format.quiet() | payload)});
  }
  return steps;
}

float widened(const Format& format, std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7fffu;
  const std::uint32_t payload = magnitude & ((1u << format.fraction_bits) - 1u);
  const std::uint32_t wide = magnitude >= format.infinity()
                                 ? 0x7f800000u | payload << (23 - format.fraction_bits)
                                 : std::bit_cast<std::uint32_t>(static_cast<float>(format.value(magnitude)));
  return std::bit_cast<float>(sign | wide);
}

constexpr std::uint32_t kBlock = 1u << 12;
constexpr std::uint32_t kTask = 1u << 16;

// Stores kTask consecutive patterns; returns how many of the results are wrong.
int wrong_stores(SimdProbe::Store store, const std::vector<Step>& steps, std::uint32_t first) {
  const std::uint32_t sign = first & 0x80000000u;
  auto step = std::upper_bound(steps.begin(), steps.end(), first & 0x7fffffffu,
                               [](std::uint32_t u, const Step& s) { return u < s.first; }) -
              1;
  alignas(64) float in[kBlock];
  alignas(64) std::uint16_t out[kBlock];
  int wrong = 0;
  for (std::uint32_t start = first; start != first + kTask; start += kBlock) {
    for (std::uint32_t i = 0; i < kBlock; ++i) {
      in[i] = std::bit_cast<float>(start + i);
    }
    store(out, in, kBlock);
    const std::uint32_t magnitude = start & 0x7fffffffu;
    for (std::uint32_t i = 0; i < kBlock;) {
      while (step + 1 != steps.end() && step[1].first <= magnitude + i) {
        ++step;
      }
      const std::uint32_t end = step + 1 == steps.end() ? kBlock : std::min(kBlock, step[1].first - magnitude);
      const auto expected = static_cast<std::uint16_t>(step->result | sign >> 16);
      for (; i < end; ++i) {
        wrong += out[i] != expected;
      }
    }
  }
  return wrong;
}

// Where the rule changes: zero and denormals of both sides, overflow of fp16, the last finite values, Inf and NaN.
bool special(std::uint32_t first) {
  const int exponent = static_cast<int>(first >> 23 & 0xffu) - 127;
  return exponent <= -126 || (exponent >= -26 && exponent <= -13) || exponent == 15 || exponent == 16 ||
         exponent >= 127;
}

class SimdConvert : public SimdSuite {
 protected:
  void check_stores(const Format& format, SimdProbe::Store store) {
    const std::vector<Step> steps = expected_steps(format);
    // All 2^32 patterns where that takes seconds; else every 7th run of 2^16 patterns and the special exponents.
    const bool all = kFastBuild && GetParam() != Isa::kScalar;
    const int every = kFastBuild ? 7 : 101;
    const int every_special = kFastBuild ? 1 : 11;
    std::atomic<std::int64_t> wrong{0};
    std::atomic<std::uint32_t> example{0};
    parallel_for((std::int64_t{1} << 32) / kTask, [&](std::int64_t task) {
      const std::uint32_t first = static_cast<std::uint32_t>(task) * kTask;
      if (all || task % every == 0 || (special(first) && task % every_special == 0)) {
        const int n = wrong_stores(store, steps, first);
        if (n != 0) {
          wrong += n;
          example = first;
        }
      }
    });
    EXPECT_EQ(wrong, 0) << "among others from pattern 0x" << std::hex << example;
  }

  void check_loads(const Format& format) {
    constexpr int kPatterns = 1 << 16;
    std::vector<std::uint16_t> in(kPatterns);
    std::vector<float> out(kPatterns);
    for (int i = 0; i < kPatterns; ++i) {
      in[i] = static_cast<std::uint16_t>(i);
    }
    probe.load[format.index](in.data(), out.data(), kPatterns);
    for (int i = 0; i < kPatterns; ++i) {
      // The conversion of fp16 makes NaN quiet; that of bf16 moves bits.
      const std::uint32_t quieted = format.index == kF16.index && std::isnan(out[i]) ? 0x400000u : 0u;
      const std::uint32_t expected = std::bit_cast<std::uint32_t>(widened(format, in[i])) | quieted;
      ASSERT_EQ(std::bit_cast<std::uint32_t>(out[i]), expected) << "pattern " << i;
    }
  }

  // round_to is a store and a load in one word.
  void check_rounding(const Format& format) {
    std::atomic<int> wrong{0};
    parallel_for((std::int64_t{1} << 32) / kTask, [&](std::int64_t task) {
      const std::uint32_t first = static_cast<std::uint32_t>(task) * kTask;
      if (task % 61 != 0 && first >> 23 != 0xff && first >> 23 != 0) {
        return;
      }
      alignas(64) float in[kBlock];
      alignas(64) float rounded[kBlock];
      alignas(64) float by_pairs[kBlock];
      alignas(64) float reloaded[kBlock];
      alignas(64) std::uint16_t stored[kBlock];
      for (std::uint32_t i = 0; i < kBlock; ++i) {
        in[i] = std::bit_cast<float>(first + i * (kTask / kBlock) + i % (kTask / kBlock));
      }
      probe.round_to[format.index](in, rounded, kBlock);
      probe.round_to2[format.index](in, by_pairs, kBlock);
      probe.store[format.index](stored, in, kBlock);
      probe.load[format.index](stored, reloaded, kBlock);
      for (std::uint32_t i = 0; i < kBlock; ++i) {
        const auto expected = std::bit_cast<std::uint32_t>(reloaded[i]);
        wrong += std::bit_cast<std::uint32_t>(rounded[i]) != expected;
        wrong += std::bit_cast<std::uint32_t>(by_pairs[i]) != expected;
      }
    });
    EXPECT_EQ(wrong, 0);
  }
};

TEST_P(SimdConvert, StoresBf16) { check_stores(kBf16, probe.store[kBf16.index]); }
TEST_P(SimdConvert, StoresF16) { check_stores(kF16, probe.store[kF16.index]); }
TEST_P(SimdConvert, StoresPairsOfBf16) { check_stores(kBf16, probe.store2[kBf16.index]); }
TEST_P(SimdConvert, StreamsPairsOfBf16) { check_stores(kBf16, probe.stream2[kBf16.index]); }

// A vector in which all kinds of numbers stand side by side has the results that they have among their like.
TEST_P(SimdConvert, StoresPairsOfMixedBf16) {
  alignas(64) float in[kBlock];
  alignas(64) std::uint16_t out[kBlock];
  alignas(64) std::uint16_t expected[kBlock];
  for (std::uint32_t i = 0; i < kBlock; ++i) {
    in[i] = std::bit_cast<float>((i * 2654435761u) & (i % 3 == 0 ? 0x80ffffffu : 0xffffffffu));
  }
  probe.store[kBf16.index](expected, in, kBlock);
  probe.store2[kBf16.index](out, in, kBlock);
  EXPECT_TRUE(std::equal(out, out + kBlock, expected));
}
TEST_P(SimdConvert, LoadsBf16) { check_loads(kBf16); }
TEST_P(SimdConvert, LoadsF16) { check_loads(kF16); }
TEST_P(SimdConvert, RoundsToBf16) { check_rounding(kBf16); }
TEST_P(SimdConvert, RoundsToF16) { check_rounding(kF16); }

TIDEGATE_EVERY_ISA(SimdConvert);

}  // namespace
}  // namespace tidegate
