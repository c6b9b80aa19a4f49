// causal_conv1d_bwd: accuracy, layouts, states, boundaries.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "ops/causal_conv1d/test_case.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

const Sizes kPacked = {3, 0, 64, 1, 65, 2, 0, 63, 130};  // 328 tokens

struct Accuracies {
  Accuracy dx, dweight, dbias, dinitial;
};

TEST(CausalConv1dBackward, MatchesFp64) {
  for (const DType dtype : kKernelTypes) {
    std::map<Isa, Accuracies> accuracy;
    const double bound = stored(dtype, 5e-7);
    constexpr std::int64_t lengths[] = {1, 2, 3, 4, 5, 63, 64, 65, 130, 0};
    Random random;
    int turn = 0;
    for (const std::int64_t D : kWidths) {
      for (int i = 0; i < 2; ++i, ++turn) {
        const std::int64_t W = 2 + turn % 3;
        const ConvCase c{.T = D == 17 ? 2000 : lengths[turn % 10],
                         .D = D,
                         .W = W,
                         .dtype = dtype,
                         .bias = turn % 4 != 0,
                         .silu = turn % 5 != 0,
                         .state = turn % 3 == 0 ? 0 : W - 1 + turn % 4,
                         .final_state = turn % 2 == 0 ? 0 : W - 1 + turn % 5,
                         .weight_type = turn % 2 == 0 ? dtype : DType::kF32};
        SCOPED_TRACE(c.text());
        const Conv v = make_conv(random, c);
        const ConvBackward truth = backward(wide(v));
        const ConvBackward plain = plain_backward(v);
        for_each_isa([&] {
          const ConvBackward got = backward(v);
          Accuracies& a = accuracy[active_isa()];
          a.dx.add(got.dx, plain.dx, truth.dx, 5e-7);
          a.dweight.add(got.dweight, plain.dweight, truth.dweight, 5e-7);
          a.dbias.add(got.dbias, plain.dbias, truth.dbias, 5e-7);
          if (c.state > 0) {
            a.dinitial.add(got.dinitial, plain.dinitial, truth.dinitial, 5e-7);
          }
        });
      }
    }
    for (const auto& [isa, a] : accuracy) {
      const std::string name = std::string(dtype_name(dtype)) + "_" + std::string(isa_name(isa));
      a.dx.expect("dx_" + name, bound);
      a.dweight.expect("dweight_" + name, 5e-7);
      a.dbias.expect("dbias_" + name, 5e-7);
      a.dinitial.expect("dinitial_" + name, bound);
    }
  }
}

// The fp64 reference against differences of the forward: states of all lengths, sequences shorter than them.
TEST(CausalConv1dBackward, ReferenceIsTheDerivative) {
  Random random;
  for (std::int64_t W = 2; W <= 4; ++W) {
    for (const bool silu : {false, true}) {
      for (const std::int64_t S : {W - 1, W, W + 2}) {
        const ConvCase c{
            .T = 12, .D = 2, .W = W, .silu = silu, .state = S, .final_state = 2 * W + 1 - S, .lengths = {0, 1, 2, 9}};
        SCOPED_TRACE(c.text());
        Conv v = wide(make_conv(random, c));
        const ConvBackward g = backward(v);
        const auto loss = [&] {
          const ConvForward out = forward(v);
          return dot(out.y, v.dy) + dot(out.final_state, v.dfinal);
        };
        expect_gradient(v.x, g.dx, loss);
        expect_gradient(v.weight, g.dweight, loss);
        expect_gradient(v.bias, g.dbias, loss);
        expect_gradient(v.initial, g.dinitial, loss);
      }
    }
  }
}

void expect_same(const ConvBackward& a, const ConvBackward& b) {
  EXPECT_TRUE(same_bits(a.dx, b.dx));
  EXPECT_TRUE(same_bits(a.dweight, b.dweight));
  EXPECT_TRUE(same_bits(a.dbias, b.dbias));
  EXPECT_TRUE(same_bits(a.dinitial, b.dinitial));
}

TEST(CausalConv1dBackward, PackedHasTheBitsOfSeparateCallsAddedUp) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      Random random;
      for (int i = 0; i < 4; ++i) {
        Sizes lengths = kPacked;
        for (std::size_t k = lengths.size() - 1; k > 0; --k) {
          std::swap(lengths[k], lengths[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(k)))]);
        }
        const ConvCase c{.T = 328,
                         .D = 83,
                         .W = 2 + i % 3,
                         .dtype = dtype,
                         .state = 4,
                         .final_state = i == 0 ? 0 : 5,
                         .lengths = lengths};
        SCOPED_TRACE(c.text());
        const Conv v = make_conv(random, c);
        const ConvBackward all = backward(v);
        ConvBackward sum = gradients_of(v);
        sum.dweight.fill(0.0);
        sum.dbias.fill(0.0);
        const auto add = [](Tensor& total, const Tensor& t) {
          for (std::int64_t k = 0; k < t.view().numel(); ++k) {
            total.set(k, static_cast<double>(static_cast<float>(total.get(k)) + static_cast<float>(t.get(k))));
          }
        };
        for (std::int64_t n = 0; n < v.seq.count(); ++n) {
          const ConvBackward one = backward(sequence_of(v, n));
          EXPECT_TRUE(same_bits(part(all.dx, 0, v.seq[n].begin, v.seq[n].end), one.dx)) << "sequence " << n;
          EXPECT_TRUE(same_bits(part(all.dinitial, 0, n, n + 1), one.dinitial)) << "sequence " << n;
          add(sum.dweight, one.dweight);
          add(sum.dbias, one.dbias);
        }
        EXPECT_TRUE(same_bits(all.dweight, sum.dweight));
        EXPECT_TRUE(same_bits(all.dbias, sum.dbias));
      }
    }
  });
}

TEST(CausalConv1dBackward, EveryLayoutHasTheSameBits) {
  for_each_isa([] {
    for (const std::int64_t n : {1, 3, 8, 10}) {
      for (const bool batch : {false, true}) {
        const std::int64_t D = n == 3 ? 51 : n == 8 ? 1024 : 1030;
        const int at = batch ? 1 : 0;
        Random random;
        const Conv v = make_conv(random, {.T = 35,
                                          .D = D,
                                          .dtype = DType::kBF16,
                                          .layout = batch ? Layout::kBSND : Layout::kTND,
                                          .B = batch ? 2 : 1,
                                          .state = 3});
        SCOPED_TRACE(v.c.text() + " n=" + std::to_string(n));
        const ConvBackward plain = backward(v);
        const auto head_major = [&](const Tensor& t) { return copied(exchanged(with_heads(t, n), at, at + 1)); };
        Conv out = v;  // x token-major, dy head-major
        out.c.head_num = n;
        out.dy = head_major(v.dy);
        expect_same(backward(out), plain);
        Conv in = out;  // both head-major
        in.c.layout = batch ? Layout::kBNSD : Layout::kNTD;
        in.c.heads = n;
        in.c.head_num = 0;
        in.x = head_major(v.x);
        ConvBackward got = backward(in);
        EXPECT_TRUE(same_bits(got.dx, exchanged(with_heads(plain.dx, n), at, at + 1)));
        EXPECT_TRUE(same_bits(got.dweight, plain.dweight));
      }
    }
  });
}

TEST(CausalConv1dBackward, AnyOutputMayBeAbsent) {
  for_each_isa([] {
    Random random;
    const Conv v = make_conv(random, {.T = 70, .D = 21, .state = 4, .final_state = 4, .lengths = {5, 65}});
    const ConvBackward all = backward(v);
    for (int mask = 0; mask < 16; ++mask) {
      ConvBackward out = gradients_of(v);
      Tensor* outputs[] = {&out.dx, &out.dweight, &out.dbias, &out.dinitial};
      for (int i = 0; i < 4; ++i) {
        if ((mask >> i & 1) == 0) {
          *outputs[i] = Tensor();
        }
      }
      causal_conv1d_bwd(v.dy, v.x, v.weight, v.bias, v.initial, v.dfinal, out.dx, out.dweight, out.dbias, out.dinitial,
                        v.seq, v.c.options());
      const Tensor* expected[] = {&all.dx, &all.dweight, &all.dbias, &all.dinitial};
      for (int i = 0; i < 4; ++i) {
        EXPECT_TRUE(!outputs[i]->defined() || same_bits(*outputs[i], *expected[i])) << mask;
      }
    }
  });
}

// A NaN reaches the weights' sums, and dx of the tokens that share a window with it; no other sequence.
TEST(CausalConv1dBackward, NaNStaysInItsSequence) {
  for_each_isa([] {
    Random random;
    Conv v = make_conv(random, {.T = 328, .D = 37, .state = 3, .lengths = kPacked});
    const ConvBackward clean = backward(v);
    const std::vector<std::int64_t> owner = v.seq.seq_idx();
    for (Tensor* t : {&v.x, &v.dy}) {
      for (const std::int64_t token : {0, 3, 66, 68, 140, 327}) {
        const double kept = t->get(token * 37 + 11);
        t->set(token * 37 + 11, std::nan(""));
        const ConvBackward got = backward(v);
        for (std::int64_t i = 0; i < got.dx.view().numel(); ++i) {
          const std::int64_t at = i / 37;
          const bool may_reach = i % 37 == 11 && std::abs(at - token) < 4 &&
                                 owner[static_cast<std::size_t>(at)] == owner[static_cast<std::size_t>(token)];
          ASSERT_TRUE(may_reach || got.dx.get(i) == clean.dx.get(i)) << "NaN at token " << token << ", dx " << at;
        }
        for (std::int64_t n = 0; n < v.seq.count(); ++n) {
          EXPECT_TRUE(n == owner[static_cast<std::size_t>(token)] ||
                      same_bits(part(got.dinitial, 0, n, n + 1), part(clean.dinitial, 0, n, n + 1)));
        }
        EXPECT_TRUE(std::isnan(got.dbias.get(11)));
        EXPECT_EQ(got.dbias.get(10), clean.dbias.get(10));
        t->set(token * 37 + 11, kept);
      }
    }
  });
}

TEST(CausalConv1dBackward, TokensOutsideSequencesAreNotTouched) {
  for_each_isa([] {
    Random random;
    Conv v = make_conv(random, {.T = 12, .D = 20, .layout = Layout::kBSND, .B = 2});
    const Sizes mask = {0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0};
    v.seq = SeqLens::from_mask(mask, 2, 12);
    const ConvBackward clean = backward(v);
    for (Tensor* t : {&v.x, &v.dy}) {
      const Tensor other = *t;
      t->fill([&](std::int64_t i) { return mask[static_cast<std::size_t>(i / 20)] ? other.get(i) : std::nan(""); });
    }
    const ConvBackward got = backward(v);
    expect_same(got, clean);
    for (std::int64_t i = 0; i < got.dx.view().numel(); ++i) {
      ASSERT_EQ(std::isnan(got.dx.get(i)), mask[static_cast<std::size_t>(i / 20)] == 0);
    }
  });
}

TEST(CausalConv1dBackward, BitsDoNotDependOnThreadsOrCallers) {
  for_each_isa([] {
    Random random;
    const Conv v = make_conv(
        random, {.T = 230, .D = 1541, .dtype = DType::kBF16, .state = 3, .final_state = 3, .lengths = {30, 200}});
    const ConvBackward once = backward(v);
    for_each_thread_count([&] { expect_same(backward(v), once); });
    on_eight_callers([&](int) { expect_same(backward(v), once); });
  });
}

TEST(CausalConv1dBackward, AnyMemory) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      for (const std::int64_t D : {1, 7, 21, 515}) {
        ConvCase c{.T = 9, .D = D, .dtype = dtype, .layout = Layout::kBSND, .B = 3, .state = 4, .final_state = 3};
        Random random(3);
        const ConvBackward dense = backward(make_conv(random, c));
        for (const Form& form : {low(), padded(), low(reversed()), permuted({1, 0, 2}, 3)}) {
          c.form = form;
          c.state_form = form.order.empty() ? form : permuted({2, 0, 1}, 2);
          Random again(3);
          const ConvBackward out = backward(make_conv(again, c));
          expect_same(out, dense);
          EXPECT_TRUE(out.dx.gaps_untouched() && out.dinitial.gaps_untouched()) << c.text();
        }
        Tensor dweight(DType::kF32, {D, 4}, permuted({1, 0}, 3));  // the sums may have strides too
        Tensor dbias(DType::kF32, {D, 2}, permuted({0, 1}, 1));
        Random again(3);
        const Conv v = make_conv(
            again, {.T = 9, .D = D, .dtype = dtype, .layout = Layout::kBSND, .B = 3, .state = 4, .final_state = 3});
        TensorView strided = part(dbias, 1, 0, 1);
        strided.rank = 1;
        causal_conv1d_bwd(v.dy, v.x, v.weight, v.bias, v.initial, v.dfinal, {}, dweight, strided, {}, v.seq,
                          v.c.options());
        EXPECT_TRUE(same_bits(dweight, dense.dweight) && same_bits(strided, dense.dbias));
        EXPECT_TRUE(dweight.gaps_untouched() && dbias.gaps_untouched());
      }
    }
  });
}

TEST(CausalConv1dBackward, CallersFlushToZeroDoesNotMatter) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      Random random;
      Conv v = make_conv(random, {.T = 9, .D = 40, .dtype = dtype});
      v.dy.fill([&](std::int64_t) { return random.normal() * (dtype == DType::kF16 ? 1e-6 : 1e-39); });
      const ConvBackward once = backward(v);
      ASSERT_NE(once.dbias.get(5), 0.0);
      ConvBackward out = gradients_of(v);
      const FlushDenormals flush;
      causal_conv1d_bwd(v.dy, v.x, v.weight, v.bias, v.initial, v.dfinal, out.dx, out.dweight, out.dbias, out.dinitial,
                        v.seq, v.c.options());
      EXPECT_TRUE(flush.still_set());
      expect_same(out, once);
    }
  });
}

}  // namespace
}  // namespace tidegate::test
