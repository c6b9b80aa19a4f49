// gdn_gating_fwd and _bwd: accuracy, extremes, layouts, threads, memory.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "ops/gdn_gating/test_case.h"

namespace tidegate::test {
namespace {

TEST(GdnGating, ForwardMatchesFp64) {
  for (const DType dtype : kKernelTypes) {
    for (const DType beta_type : kKernelTypes) {
      std::map<Isa, Accuracy> g, beta;
      const double beta_bound = stored(beta_type, 3e-7);
      Random random;
      int turn = 0;
      for (const std::int64_t width : kWidths) {
        for (const Layout layout : {Layout::kTND, Layout::kNTD, Layout::kBSND, Layout::kBNSD}) {
          const GatingCase c{.B = 2,
                             .T = is_head_major(layout) ? width : 7,
                             .H = is_head_major(layout) ? 5 : width,
                             .dtype = dtype,
                             .beta_type = beta_type,
                             .layout = layout,
                             .dt_bias = ++turn % 3 != 0,
                             .beta_scale = turn % 2 == 0 ? 1.0 : 2.0};
          const Gating v = make_gating(random, c);
          const GatingForward truth = forward(wide(v));
          const GatingForward plain = plain_forward(v);
          for_each_isa([&] {
            const GatingForward got = forward(v);
            g[active_isa()].add(got.g, plain.g, truth.g, 3e-7);
            beta[active_isa()].add(got.beta, plain.beta, truth.beta, 3e-7);
          });
        }
      }
      for (const auto& [isa, a] : g) {
        const std::string name = std::string(dtype_name(dtype)) + "_" + std::string(isa_name(isa));
        a.expect("g_" + name, 3e-7);
        beta.at(isa).expect("beta_" + std::string(dtype_name(beta_type)) + "_of_" + name, beta_bound);
      }
    }
  }
}

struct Accuracies {
  Accuracy da, db, dA_log, ddt_bias;
};

TEST(GdnGating, BackwardMatchesFp64) {
  for (const DType dtype : kKernelTypes) {
    std::map<Isa, Accuracies> accuracy;
    const double bound = stored(dtype, 1e-6);
    Random random;
    int turn = 0;
    for (const std::int64_t width : kWidths) {
      for (const Layout layout : {Layout::kTND, Layout::kNTD, Layout::kBSND, Layout::kBNSD}) {
        ++turn;
        const GatingCase c{.B = 2,
                           .T = is_head_major(layout) ? 4 * width : 37,
                           .H = is_head_major(layout) ? 3 : width,
                           .dtype = dtype,
                           .beta_type = kKernelTypes[turn % 3],
                           .layout = layout,
                           .dt_bias = turn % 3 != 0,
                           .beta_scale = turn % 2 == 0 ? 1.0 : 2.0};
        const Gating v = make_gating(random, c);
        const GatingBackward truth = backward(wide(v));
        const GatingBackward plain = plain_backward(v);
        for_each_isa([&] {
          const GatingBackward got = backward(v);
          Accuracies& a = accuracy[active_isa()];
          a.da.add(got.da, plain.da, truth.da, 1e-6);
          a.db.add(got.db, plain.db, truth.db, 1e-6);
          a.dA_log.add(got.dA_log, plain.dA_log, truth.dA_log, 1e-6);
          a.ddt_bias.add(got.ddt_bias, plain.ddt_bias, truth.ddt_bias, 1e-6);
        });
      }
    }
    for (const auto& [isa, a] : accuracy) {
      const std::string name = std::string(dtype_name(dtype)) + "_" + std::string(isa_name(isa));
      a.da.expect("da_" + name, bound);
      a.db.expect("db_" + name, bound);
      a.dA_log.expect("dA_log_" + name, 1e-6);
      a.ddt_bias.expect("ddt_bias_" + name, 1e-6);
    }
  }
}

TEST(GdnGating, ReferenceIsTheDefinitionAndItsDerivative) {
  Random random;
  for (const Layout layout : {Layout::kBSND, Layout::kNTD}) {
    for (const double scale : {1.0, 2.0}) {
      Gating v = wide(make_gating(random, {.B = 2, .T = 3, .H = 4, .layout = layout, .beta_scale = scale}));
      const GatingForward out = forward(v);
      for (std::int64_t i = 0; i < out.g.view().numel(); ++i) {
        const std::int64_t h = is_head_major(layout) ? i / 3 % 4 : i % 4;
        const double x = v.a.get(i) + v.dt_bias.get(h);
        EXPECT_NEAR(out.g.get(i), -std::exp(v.A_log.get(h)) * std::log1p(std::exp(x)), 1e-13);
        EXPECT_NEAR(out.beta.get(i), scale / (1 + std::exp(-v.b.get(i))), 1e-15);
      }
      const GatingBackward grad = backward(v);
      const auto loss = [&] {
        const GatingForward y = forward(v);
        return dot(y.g, v.dg) + dot(y.beta, v.dbeta);
      };
      expect_gradient(v.a, grad.da, loss);
      expect_gradient(v.b, grad.db, loss);
      expect_gradient(v.A_log, grad.dA_log, loss);
      expect_gradient(v.dt_bias, grad.ddt_bias, loss);
    }
  }
}

void expect_same(const GatingBackward& a, const GatingBackward& b) {
  EXPECT_TRUE(same_bits(a.da, b.da));
  EXPECT_TRUE(same_bits(a.db, b.db));
  EXPECT_TRUE(same_bits(a.dA_log, b.dA_log));
  EXPECT_TRUE(same_bits(a.ddt_bias, b.ddt_bias));
}

// Element by element the two layouts do the same; only the order of the sums differs.
TEST(GdnGating, LayoutsHaveTheSameBits) {
  for_each_isa([] {
    Random random;
    const Gating v = make_gating(random, {.B = 2, .T = 21, .H = 13, .dtype = DType::kBF16});
    Gating heads = v;
    heads.c.layout = Layout::kBNSD;
    for (Tensor* t : {&heads.a, &heads.b, &heads.dg, &heads.dbeta}) {
      *t = copied(exchanged(*t, 1, 2));
    }
    const GatingForward one = forward(v);
    const GatingForward two = forward(heads);
    EXPECT_TRUE(same_bits(exchanged(two.g, 1, 2), one.g));
    EXPECT_TRUE(same_bits(exchanged(two.beta, 1, 2), one.beta));
    const GatingBackward grad_one = backward(v);
    const GatingBackward grad_two = backward(heads);
    EXPECT_TRUE(same_bits(exchanged(grad_two.da, 1, 2), grad_one.da));
    EXPECT_TRUE(same_bits(exchanged(grad_two.db, 1, 2), grad_one.db));
  });
}

TEST(GdnGating, AnyOutputMayBeAbsent) {
  for_each_isa([] {
    Random random;
    const Gating v = make_gating(random, {.T = 20, .H = 9, .layout = Layout::kTND});
    const GatingBackward all = backward(v);
    for (int mask = 0; mask < 16; ++mask) {
      GatingBackward out = gradients_of(v);
      Tensor* outputs[] = {&out.da, &out.db, &out.dA_log, &out.ddt_bias};
      const Tensor* expected[] = {&all.da, &all.db, &all.dA_log, &all.ddt_bias};
      for (int i = 0; i < 4; ++i) {
        if ((mask >> i & 1) == 0) {
          *outputs[i] = Tensor();
        }
      }
      run_backward(v, out);
      for (int i = 0; i < 4; ++i) {
        EXPECT_TRUE(!outputs[i]->defined() || same_bits(*outputs[i], *expected[i])) << mask;
      }
    }
  });
}

TEST(GdnGating, BitsDoNotDependOnThreadsOrCallers) {
  for_each_isa([] {
    for (const Layout layout : {Layout::kTND, Layout::kNTD}) {
      Random random;
      const Gating v = make_gating(random, {.T = 2500, .H = 17, .dtype = DType::kBF16, .layout = layout});
      const GatingForward once = forward(v);
      const GatingBackward grad = backward(v);
      const auto again = [&] {
        EXPECT_TRUE(same_bits(forward(v).g, once.g));
        expect_same(backward(v), grad);
      };
      for_each_thread_count(again);
      on_eight_callers([&](int) { again(); });
    }
  });
}

TEST(GdnGating, AnyMemory) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      for (const Layout layout : {Layout::kBSND, Layout::kBNSD}) {
        for (const std::int64_t H : {1, 7, 21, 131}) {
          GatingCase c{.B = 2, .T = 5, .H = H, .dtype = dtype, .layout = layout};
          Random random(3);
          const Gating dense = make_gating(random, c);
          const GatingForward once = forward(dense);
          const GatingBackward grad = backward(dense);
          for (const Form& form : {low(), padded(), low(reversed()), permuted({1, 0, 2}, 3)}) {
            c.form = form;
            Random again(3);
            const Gating v = make_gating(again, c);
            const GatingForward out = forward(v);
            const GatingBackward got = backward(v);
            EXPECT_TRUE(same_bits(out.g, once.g) && same_bits(out.beta, once.beta));
            expect_same(got, grad);
            EXPECT_TRUE(out.g.gaps_untouched() && out.beta.gaps_untouched() && got.da.gaps_untouched());
            EXPECT_TRUE(got.db.gaps_untouched());
          }
        }
      }
    }
  });
}

TEST(GdnGating, CallersFlushToZeroDoesNotMatter) {
  for_each_isa([] {
    Random random;
    Gating v = make_gating(random, {.T = 6, .H = 9, .layout = Layout::kTND});
    v.A_log.fill([](std::int64_t h) { return h % 2 == 0 ? -95.0 : -40.0; });  // e^-95 is a denormal in fp32
    v.dt_bias.fill(1e-40);
    v.a.fill([](std::int64_t i) { return i % 4 == 0 ? -60.0 : 0.5; });
    v.dg.fill([](std::int64_t i) { return i % 5 == 0 ? 1e-39 : 1.0; });
    const GatingForward once = forward(v);
    const GatingBackward grad = backward(v);
    ASSERT_NE(once.g.get(2), 0.0);
    ASSERT_NE(grad.dA_log.get(0), 0.0);
    GatingForward out = outputs_of(v);
    GatingBackward got = gradients_of(v);
    const FlushDenormals flush;
    run_forward(v, out);
    run_backward(v, got);
    EXPECT_TRUE(flush.still_set());
    EXPECT_TRUE(same_bits(out.g, once.g) && same_bits(out.beta, once.beta));
    expect_same(got, grad);
  });
}

}  // namespace
}  // namespace tidegate::test
