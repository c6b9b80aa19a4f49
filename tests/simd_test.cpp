// Words of the vocabulary one by one: arithmetic, selection, sums. Memory, conversions and functions have their own
// files.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "simd_suite.h"

namespace tidegate {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kMaxLanes = 16;

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

class Simd : public SimdSuite {
 protected:
  // Mostly ordinary numbers of many sizes, some special ones.
  std::vector<float> numbers(int count, unsigned seed) const {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> mantissa(-2.0f, 2.0f);
    std::uniform_int_distribution<int> exponent(-20, 20);
    const float special[] = {0.0f, -0.0f, kInfinity, -kInfinity, kNan, 1.0f, 0x1p-149f, -0x1.fffffep127f};
    std::vector<float> list(static_cast<std::size_t>(count));
    for (float& x : list) {
      x = random() % 8 == 0 ? special[random() % std::size(special)] : std::ldexp(mantissa(random), exponent(random));
    }
    return list;
  }

  template <class F>
  void check_binary(SimdProbe::Binary word, F expected) const {
    constexpr int kCount = 4096;
    const std::vector<float> a = numbers(kCount, 1);
    const std::vector<float> b = numbers(kCount, 2);
    std::vector<float> out(kCount);
    word(a.data(), b.data(), out.data(), kCount);
    for (int i = 0; i < kCount; ++i) {
      const float want = expected(a[i], b[i]);
      ASSERT_TRUE(bits(out[i]) == bits(want) || (std::isnan(out[i]) && std::isnan(want)))
          << a[i] << ", " << b[i] << ": expected " << want << ", got " << out[i];
    }
  }
};

TEST_P(Simd, Arithmetic) {
  check_binary(probe.add, [](float a, float b) { return a + b; });
  check_binary(probe.subtract, [](float a, float b) { return a - b; });
  check_binary(probe.multiply, [](float a, float b) { return a * b; });
  check_binary(probe.divide, [](float a, float b) { return a / b; });
}

TEST_P(Simd, MinAndMaxTakeTheSecondOnNan) {
  check_binary(probe.min, [](float a, float b) { return a < b ? a : b; });
  check_binary(probe.max, [](float a, float b) { return a > b ? a : b; });
}

TEST_P(Simd, Selection) {
  check_binary(probe.select_less, [](float a, float b) { return a < b ? a : b; });
  check_binary(probe.select_equal, [](float a, float b) { return a == b ? a : b; });
}

TEST_P(Simd, FmaRoundsOnceWhereThereIsAnInstruction) {
  constexpr int kCount = 4096;
  const std::vector<float> a = numbers(kCount, 3), b = numbers(kCount, 4), c = numbers(kCount, 5);
  std::vector<float> out(kCount);
  probe.fma(a.data(), b.data(), c.data(), out.data(), kCount);
  for (int i = 0; i < kCount; ++i) {
    const volatile float product = a[i] * b[i];
    const float want = GetParam() == Isa::kScalar ? product + c[i] : std::fma(a[i], b[i], c[i]);
    ASSERT_TRUE(bits(out[i]) == bits(want) || (std::isnan(out[i]) && std::isnan(want))) << a[i] << " " << b[i];
  }
}

TEST_P(Simd, UnaryWords) {
  constexpr int kCount = 4096;
  std::vector<float> in = numbers(kCount, 6);
  std::vector<float> out(kCount);
  probe.abs(in.data(), out.data(), kCount);
  for (int i = 0; i < kCount; ++i) {
    ASSERT_EQ(bits(out[i]), bits(in[i]) & 0x7fffffffu);
  }
  probe.sqrt(in.data(), out.data(), kCount);
  for (int i = 0; i < kCount; ++i) {
    ASSERT_TRUE(out[i] == std::sqrt(in[i]) || (std::isnan(out[i]) && !(in[i] >= 0))) << in[i];
  }
  for (int i = 0; i < kCount; ++i) {
    in[i] = static_cast<float>(i - kCount / 2) / 4.0f;  // ties included
  }
  in[0] = 4194303.5f;
  in[1] = -4194303.5f;
  probe.round(in.data(), out.data(), kCount);
  for (int i = 0; i < kCount; ++i) {
    ASSERT_EQ(out[i], std::nearbyint(in[i])) << in[i];
  }
}

TEST_P(Simd, ScaleByPowerRoundsOnce) {
  std::vector<float> a, n;
  for (int power = -252; power <= 254; ++power) {
    for (const float x : {0.7f, 1.0f, 1.41421f, 0x1.555554p0f, 0x1.fffffep0f, -1.1f, kNan, 0.0f}) {
      a.push_back(x);
      n.push_back(static_cast<float>(power));
    }
  }
  a.resize(a.size() / kMaxLanes * kMaxLanes);
  std::vector<float> out(a.size());
  probe.scale_by_power(a.data(), n.data(), out.data(), static_cast<std::int64_t>(a.size()));
  for (std::size_t i = 0; i < a.size(); ++i) {
    const float want = static_cast<float>(std::ldexp(static_cast<double>(a[i]), static_cast<int>(n[i])));
    ASSERT_TRUE(bits(out[i]) == bits(want) || (std::isnan(out[i]) && std::isnan(a[i]))) << a[i] << " * 2^" << n[i];
  }
}

TEST_P(Simd, SumAddsHalvesUntilOneIsLeft) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (int trial = 0; trial < 1000; ++trial) {
    std::vector<float> a(kMaxLanes);
    std::generate(a.begin(), a.end(), [&] { return std::exp(3.0f * normal(random)) * normal(random); });
    const float got = probe.sum(a.data());
    for (int half = probe.lanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) {
        a[i] += a[i + half];
      }
    }
    ASSERT_EQ(bits(got), bits(a[0]));
  }
}

// A product of two bf16 is exact in fp32, so that with one order of additions every instruction set has the same bits.
TEST_P(Simd, DotAddsTheOddProductFirst) {
  constexpr int kCount = 1024;
  std::mt19937 random(8);
  std::normal_distribution<float> normal;
  std::vector<float> acc(kCount), out(kCount), a(2 * kCount), b(2 * kCount);
  std::vector<std::uint16_t> pairs_a(2 * kCount), pairs_b(2 * kCount);
  for (auto* list : {&acc, &a, &b}) {
    std::generate(list->begin(), list->end(), [&] { return normal(random); });
  }
  a[2] = kInfinity;
  b[3] = kNan;
  for (auto [wide, narrow] : {std::pair(&a, &pairs_a), std::pair(&b, &pairs_b)}) {
    probe.store[1](narrow->data(), wide->data(), 2 * kCount);
    probe.load[1](narrow->data(), wide->data(), 2 * kCount);
  }
  probe.dot(acc.data(), pairs_a.data(), pairs_b.data(), out.data(), kCount);
  for (int i = 0; i < kCount; ++i) {
    const float odd = std::fma(a[2 * i + 1], b[2 * i + 1], acc[i]);
    const float want = std::fma(a[2 * i], b[2 * i], odd);
    ASSERT_TRUE(bits(out[i]) == bits(want) || (std::isnan(out[i]) && std::isnan(want))) << i;
  }
}

// AVX512-BF16 takes denormals as 0 and flushes those it computes; nothing else may be lost.
TEST_P(Simd, DotOfDenormalsIsNearZero) {
  const std::vector<std::uint16_t> small(2 * kMaxLanes, 0x0001), one(2 * kMaxLanes, 0x3f80);
  const std::vector<float> acc(kMaxLanes, 0x1p-126f);
  std::vector<float> out(kMaxLanes);
  probe.dot(acc.data(), small.data(), one.data(), out.data(), probe.lanes);
  const float want = GetParam() == Isa::kAvx512Bf16 ? 0x1p-126f : 0x1p-126f + 2 * 0x1p-133f;
  EXPECT_EQ(std::vector<float>(out.begin(), out.begin() + probe.lanes), std::vector<float>(probe.lanes, want));
}

TIDEGATE_EVERY_ISA(Simd);

}  // namespace
}  // namespace tidegate
