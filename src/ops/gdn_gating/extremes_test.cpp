// gdn_gating_fwd and _bwd where numbers end: rates that overflow, and NaN.
#include <gtest/gtest.h>

#include "ops/gdn_gating/test_case.h"

namespace tidegate::test {
namespace {

// Rates that overflow times gates that are closed: 0, not NaN. Rates that overflow times open gates: -inf, a reset.
TEST(GdnGating, ExtremesNeverMakeNaN) {
  for_each_isa([] {
    for (const Layout layout : {Layout::kTND, Layout::kNTD}) {
      for (const DType dtype : kKernelTypes) {
        Random random;
        GatingCase c{.T = 401, .H = 4, .dtype = dtype, .layout = layout};
        Gating v = make_gating(random, c);
        const auto token = [&](std::int64_t i) { return is_head_major(layout) ? i % 401 : i / 4; };
        const auto head = [&](std::int64_t i) { return is_head_major(layout) ? i / 401 : i % 4; };
        const double rates[] = {-100.0, 0.0, 89.0, 200.0};
        v.A_log.fill([&](std::int64_t h) { return rates[h]; });
        v.dt_bias.fill(0.0);
        v.a.fill([&](std::int64_t i) { return static_cast<double>(token(i)) - 200.0; });
        v.b.fill([&](std::int64_t i) { return static_cast<double>(token(i)) - 200.0; });
        const GatingForward out = forward(v);
        const GatingBackward grad = backward(v);
        for (std::int64_t i = 0; i < out.g.view().numel(); ++i) {
          const double a = v.a.get(i);
          const bool overflows = head(i) >= 2;
          ASSERT_TRUE(out.g.get(i) <= 0.0) << rates[head(i)] << " " << a;
          ASSERT_TRUE(!overflows || a > -104 || out.g.get(i) == 0.0) << rates[head(i)] << " " << a;
          ASSERT_TRUE(!overflows || a < -80 || std::isinf(out.g.get(i))) << rates[head(i)] << " " << a;
          ASSERT_TRUE(overflows || std::isfinite(out.g.get(i))) << rates[head(i)] << " " << a;
          ASSERT_TRUE(out.beta.get(i) >= 0.0 && out.beta.get(i) <= 1.0) << a;
          ASSERT_TRUE(std::isfinite(grad.da.get(i)) && std::isfinite(grad.db.get(i))) << rates[head(i)] << " " << a;
          ASSERT_TRUE(!overflows || grad.da.get(i) == 0.0) << rates[head(i)] << " " << a;
        }
        for (std::int64_t h = 0; h < 4; ++h) {
          EXPECT_TRUE(std::isfinite(grad.dA_log.get(h)) && std::isfinite(grad.ddt_bias.get(h))) << rates[h];
        }
      }
    }
  });
}

TEST(GdnGating, NaNStaysInItsTokenAndHead) {
  for_each_isa([] {
    Random random;
    Gating v = make_gating(random, {.T = 30, .H = 9, .layout = Layout::kTND});
    const GatingForward clean = forward(v);
    const GatingBackward clean_grad = backward(v);
    v.a.set(100, std::nan(""));
    v.b.set(101, std::nan(""));
    const GatingForward out = forward(v);
    const GatingBackward grad = backward(v);
    for (std::int64_t i = 0; i < out.g.view().numel(); ++i) {
      EXPECT_TRUE(i == 100 ? std::isnan(out.g.get(i)) : out.g.get(i) == clean.g.get(i));
      EXPECT_TRUE(i == 101 ? std::isnan(out.beta.get(i)) : out.beta.get(i) == clean.beta.get(i));
      EXPECT_TRUE(i == 100 ? std::isnan(grad.da.get(i)) : grad.da.get(i) == clean_grad.da.get(i));
      EXPECT_TRUE(i == 101 ? std::isnan(grad.db.get(i)) : grad.db.get(i) == clean_grad.db.get(i));
    }
    for (std::int64_t h = 0; h < 9; ++h) {
      EXPECT_TRUE(h == 1 ? std::isnan(grad.ddt_bias.get(h)) : grad.ddt_bias.get(h) == clean_grad.ddt_bias.get(h));
      EXPECT_TRUE(h == 1 ? std::isnan(grad.dA_log.get(h)) : grad.dA_log.get(h) == clean_grad.dA_log.get(h));
    }
  });
}

// A closed gate (softplus = 0) does not hide a parameter that is NaN. fp64 runs the reference.
TEST(GdnGating, NaNOfAHeadFillsTheHead) {
  for_each_isa([] {
    for (const bool fp64 : {false, true}) {
      Random random;
      Gating v = make_gating(random, {.T = 30, .H = 9, .layout = Layout::kTND});
      v.a.fill([](std::int64_t i) { return i % 2 == 0 ? -1000.0 : 1.0; });
      v.A_log.set(4, std::nan(""));
      v = fp64 ? wide(v) : v;
      const GatingForward out = forward(v);
      const GatingBackward grad = backward(v);
      for (std::int64_t i = 0; i < out.g.view().numel(); ++i) {
        ASSERT_EQ(std::isnan(out.g.get(i)), i % 9 == 4) << i;
        ASSERT_EQ(std::isnan(grad.da.get(i)), i % 9 == 4) << i;
      }
      for (std::int64_t h = 0; h < 9; ++h) {
        EXPECT_EQ(std::isnan(grad.dA_log.get(h)), h == 4);
        EXPECT_EQ(std::isnan(grad.ddt_bias.get(h)), h == 4);
      }
    }
  });
}

}  // namespace
}  // namespace tidegate::test
