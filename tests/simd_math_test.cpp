// Functions of the model against double, over a dense sample of all fp32 bit patterns.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "simd_suite.h"
#include "tidegate/parallel.h"

namespace tidegate {
namespace {

constexpr double kUnit = 0x1p-149;     // of a denormal result
constexpr double kOverflow = 0x1p128;  // what fp32 would hold next; stands for infinity on both sides

// The power of two below, without the cost of ilogb.
double power_below(double x) { return std::bit_cast<double>(std::bit_cast<std::uint64_t>(x) & 0x7ff0000000000000u); }

double exact_sigmoid(double x) {
  const double e = std::exp(-std::fabs(x));
  return (x < 0 ? e : 1) / (1 + e);
}
double exact_silu(double x) { return x * exact_sigmoid(x); }  // NaN for -inf, as inf / inf
double exact_softplus(double x) { return std::max(0.0, x) + std::log1p(std::exp(-std::fabs(x))); }
double exact_slope(double x) { return exact_sigmoid(x) * (1 + x * (1 - exact_sigmoid(x))); }

struct Error {
  double ulps = 0;         // of results that are normal numbers, in units of their last place
  double relative = 0;     // of the same
  double absolute = 0;     // of all finite results
  double units = 0;        // of denormal results, in units of 2^-149
  std::int64_t wrong = 0;  // NaN or infinite where that is not due, or the other way round
  float example = 0;

  void add(float x, float got, double want) {
    if (std::isnan(want) || std::isnan(got) || std::isinf(x)) {
      const bool same = std::isnan(want) ? std::isnan(got) : static_cast<double>(got) == want;
      wrong += !same;
      example = same ? example : x;
      return;
    }
    const double bounded = std::min(want, kOverflow);
    const double difference = std::fabs(std::min(static_cast<double>(got), kOverflow) - bounded);
    if (difference == 0) {
      return;
    }
    absolute = std::max(absolute, difference);
    if (std::fabs(bounded) < 0x1p-126) {
      units = std::max(units, difference / kUnit);
    } else {
      ulps = std::max(ulps, difference / (power_below(std::min(bounded, 0x1p127)) * 0x1p-23));
      relative = std::max(relative, difference / std::fabs(bounded));
    }
  }
  void merge(const Error& o) {
    ulps = std::max(ulps, o.ulps);
    relative = std::max(relative, o.relative);
    absolute = std::max(absolute, o.absolute);
    units = std::max(units, o.units);
    wrong += o.wrong;
    example = o.wrong != 0 ? o.example : example;
  }
};

constexpr int kBlock = 4096;

// Every stride-th bit pattern from first to last.
Error measure(SimdProbe::Unary function, double (*exact)(double), std::uint64_t first, std::uint64_t last, int stride) {
  Error total;
  std::mutex mutex;
  const std::uint64_t count = (last - first) / stride + 1;
  parallel_for(static_cast<std::int64_t>((count + kBlock - 1) / kBlock), [&](std::int64_t task) {
    std::vector<float> in(kBlock), out(kBlock);
    for (int i = 0; i < kBlock; ++i) {
      const std::uint64_t pattern = first + (static_cast<std::uint64_t>(task) * kBlock + i) * stride;
      in[i] = std::bit_cast<float>(static_cast<std::uint32_t>(std::min(pattern, last)));
    }
    function(in.data(), out.data(), kBlock);
    Error error;
    for (int i = 0; i < kBlock; ++i) {
      error.add(in[i], out[i], exact(in[i]));
    }
    const std::lock_guard lock(mutex);
    total.merge(error);
  });
  return total;
}

Error measure_specials(SimdProbe::Unary function, double (*exact)(double)) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> in = {0.0f,   0x1p-149f, 0x1p-127f, 0x1p-126f,       0x1p-24f,  17.0f,   79.99f,
                           80.01f, 87.3f,     88.7f,     88.72283f,       88.72284f, 89.0f,   89.01f,
                           102.0f, 103.9f,    103.98f,   104.0f,          104.01f,   176.74f, 176.76f,
                           177.0f, 200.0f,    1e30f,     0x1.fffffep127f, infinity,  nan};
  for (std::size_t i = 0, n = in.size(); i < n; ++i) {
    in.push_back(-in[i]);
  }
  in.resize(64, 1.0f);
  std::vector<float> out(in.size());
  function(in.data(), out.data(), static_cast<std::int64_t>(in.size()));
  Error error;
  for (std::size_t i = 0; i < in.size(); ++i) {
    error.add(in[i], out[i], exact(in[i]));
  }
  return error;
}

class SimdMath : public SimdSuite {
 protected:
  Error error_of(SimdProbe::Unary function, double (*exact)(double)) {
    Error error = measure(function, exact, 0, 0xffffffffu, kFastBuild ? 97 : 1009);
    error.merge(measure_specials(function, exact));
    EXPECT_EQ(error.wrong, 0) << "NaN or infinity misplaced, for example at " << error.example;
    report(error);
    return error;
  }
  void report(const Error& error) {
    RecordProperty("ulps", std::to_string(error.ulps));
    RecordProperty("relative", std::to_string(error.relative * 1e9) + "e-9");
    RecordProperty("absolute", std::to_string(error.absolute * 1e9) + "e-9");
    RecordProperty("denormal_units", std::to_string(error.units));
  }
};

TEST_P(SimdMath, Exp) {
  const Error error = error_of(probe.exp, [](double x) { return std::exp(x); });
  EXPECT_LE(error.ulps, 2);
  EXPECT_LE(error.units, 1);
}

TEST_P(SimdMath, Sigmoid) {
  const Error error = error_of(probe.sigmoid, exact_sigmoid);
  EXPECT_LE(error.relative, 4e-7);
  EXPECT_LE(error.units, 1);
}

TEST_P(SimdMath, Silu) {
  const Error error = error_of(probe.silu, exact_silu);
  EXPECT_LE(error.relative, 4e-7);
  EXPECT_LE(error.units, 1.5);
}

// The slope is 0 at x = -1.28, so that only its absolute error can be bounded. It is largest at x = 16, where the last
// bit of sigmoid(x) counts 16 times.
TEST_P(SimdMath, SiluSlope) { EXPECT_LE(error_of(probe.silu_slope, exact_slope).absolute, 1e-6); }

TEST_P(SimdMath, Softplus) {
  const Error error = error_of(probe.softplus, exact_softplus);
  EXPECT_LE(error.relative, 4e-7);
  EXPECT_LE(error.units, 1);
}

TEST_P(SimdMath, Log1pUnit) {
  const auto exact = [](double x) { return std::log1p(x); };
  const Error error = measure(probe.log1p_unit, exact, 0, 0x3f800000u, kFastBuild ? 23 : 1009);
  report(error);
  EXPECT_LE(error.relative, 3e-7);
  EXPECT_LE(error.units, 1);
  EXPECT_EQ(error.wrong, 0);
}

TEST_P(SimdMath, LimitsAreExact) {
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> in = {-infinity, -200.0f, 200.0f, infinity, 0.0f, -0.0f};
  in.resize(16);
  std::vector<float> out(16);
  const auto results = [&](SimdProbe::Unary function) {
    function(in.data(), out.data(), 16);
    return std::vector<float>(out.begin(), out.begin() + 5);
  };
  EXPECT_EQ(results(probe.exp), (std::vector<float>{0, 0, infinity, infinity, 1}));
  EXPECT_EQ(results(probe.sigmoid), (std::vector<float>{0, 0, 1, 1, 0.5f}));
  EXPECT_EQ(results(probe.softplus)[1], 0);
  EXPECT_EQ(results(probe.softplus)[2], 200);
  probe.silu(in.data(), out.data(), 16);
  EXPECT_EQ(out[1], 0);
  EXPECT_EQ(out[2], 200);
  EXPECT_FALSE(std::signbit(out[4]));
  EXPECT_TRUE(std::signbit(out[5]));
}

TIDEGATE_EVERY_ISA(SimdMath);

}  // namespace
}  // namespace tidegate
