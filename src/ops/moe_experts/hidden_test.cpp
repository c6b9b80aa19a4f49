// gate and up that a forward keeps: what they are, and that a backward has the same bits with and without them.
#include "ops/moe_experts/test_case.h"

namespace tidegate::test {
namespace {

// Unwritten: NaN everywhere.
Tensor room_for_hidden(const ExpertsCase& e, const Form& form = {}) {
  return Tensor(DType::kF32, {e.c.T * e.c.k, 2, e.c.I}, form);
}

Tensor forward_keeping(const ExpertsCase& e, const Tensor& hidden) {
  Tensor out = like(e.x);
  moe_experts_fwd(e.inputs(), out, e.c.options, hidden);
  return out;
}
ExpertsGradients backward_with(const ExpertsCase& e, const Tensor& hidden) {
  ExpertsGradients g = empty_gradients(e);
  MoeExpertsInputs in = e.inputs();
  in.hidden = hidden;
  moe_experts_bwd(e.dout, in, g.views(e), e.c.options);
  return g;
}

void expect_same_bits(const ExpertsCase& e, const Form& form = {}) {
  const Tensor hidden = room_for_hidden(e, form);
  EXPECT_TRUE(same_bits(forward_keeping(e, hidden), forward(e)));
  const ExpertsGradients again = backward(e);
  // Numbers of this problem in scratch memory would hide that the second backward leaves something out.
  ExpertsCase other = e;
  other.x.fill(1.0);
  backward(other);
  const ExpertsGradients kept = backward_with(e, hidden);
  for (int i = 0; i < kGradients; ++i) {
    if (again.has(i)) {
      EXPECT_TRUE(same_bits(kept.g[i], again.g[i])) << kGradientNames[i];
    }
  }
}

TEST(MoeExpertsHidden, TheBackwardHasTheSameBits) {
  for (const DType dtype : kKernelTypes) {
    Random random;
    Experts c{150, 70, 140, 5, 3, 0, dtype, dtype};  // more rows and columns than a block
    const ExpertsCase plain = make_experts(random, c);
    c.J = 20;
    c.rank = 6;
    const ExpertsCase everything = make_experts(random, c);
    c.options.interleaved = true;
    const ExpertsCase interleaved = make_experts(random, c);
    c = {17, 64, 32, 8, 2, 0, dtype, DType::kF32, true};  // few rows, weights of another type, turned
    c.options.weight_axes = WeightAxes::kKN;
    c.gap = 1;
    const ExpertsCase turned = make_experts(random, c);
    c.only = 3;
    const ExpertsCase one_expert = make_experts(random, c);
    const ExpertsCase no_tokens = make_experts(random, {0, 24, 9, 4, 2, 7, dtype, dtype});
    for_each_isa([&] {
      for (const ExpertsCase* e : {&plain, &everything, &interleaved, &turned, &one_expert, &no_tokens}) {
        expect_same_bits(*e);
      }
      expect_same_bits(everything, padded(3));
    });
  }
}

TEST(MoeExpertsHidden, OnlyWhatIsNeeded) {
  Random random;
  Experts c{20, 40, 24, 4, 2, 16, DType::kBF16, DType::kBF16};
  c.rank = 4;
  const ExpertsCase e = make_experts(random, c);
  for_each_isa([&] {
    const Tensor hidden = room_for_hidden(e);
    forward_keeping(e, hidden);
    const ExpertsGradients all = backward(e);
    MoeExpertsInputs in = e.inputs();
    in.hidden = hidden;
    for (int i = 0; i < kGradients; ++i) {
      ExpertsGradients one;
      one.g[i] = empty_gradients(e).g[i];
      moe_experts_bwd(e.dout, in, one.views(e), e.c.options);
      EXPECT_TRUE(same_bits(one.g[i], all.g[i])) << kGradientNames[i];
    }
  });
}

// The gradients are those of the gate and up that are given: the backward does not look at anything else.
TEST(MoeExpertsHidden, IsWhatTheBackwardReads) {
  Random random;
  const ExpertsCase e = make_experts(random, {20, 40, 24, 4, 2, 0});
  Tensor hidden = room_for_hidden(e);
  forward_keeping(e, hidden);
  hidden.set(0, hidden.get(0) + 1.0);
  EXPECT_FALSE(same_bits(backward_with(e, hidden).g[2], backward(e).g[2]));
}

// Row j: gate, then up, of the pair that moe_init_routing puts into place j; 0 behind the last one.
TEST(MoeExpertsHidden, RowsAreThePlacesOfTheRouting) {
  Random random;
  ExpertsCase e = make_experts(random, {30, 40, 24, 5, 3, 0});
  std::fill_n(e.ids.view().as<std::int32_t>() + 12, 9, -1);
  Tensor counts(DType::kI64, {5}), src(DType::kI32, {90}), pos(DType::kI32, {30, 3});
  moe_init_routing(e.ids, counts, src, pos);
  for_each_isa([&] {
    const Tensor hidden = room_for_hidden(e);
    forward_keeping(e, hidden);
    int unrouted = 0;
    for (std::int64_t j = 0; j < 90; ++j) {
      const std::int32_t pair = src.view().as<std::int32_t>()[j];
      unrouted += pair < 0 ? 1 : 0;
      for (std::int64_t i = 0; i < 48; ++i) {
        double want = 0.0;
        for (std::int64_t c = 0; pair >= 0 && c < 40; ++c) {
          const std::int32_t expert = e.ids.view().as<std::int32_t>()[pair];
          want += e.x.get(pair / 3 * 40 + c) * e.gate_up.get((expert * 48 + i) * 40 + c);
        }
        ASSERT_NEAR(hidden.get(j * 48 + i), want, pair < 0 ? 0.0 : 1e-5) << "row " << j << ", column " << i;
      }
    }
    EXPECT_GE(unrouted, 9);
  });
}

// Nothing is routed: every row is 0.
TEST(MoeExpertsHidden, IsZeroWhereNothingIsRouted) {
  Random random;
  ExpertsCase e = make_experts(random, {4, 16, 8, 3, 2, 5, DType::kBF16, DType::kBF16});
  std::fill_n(e.ids.view().as<std::int32_t>(), 8, -1);
  const Tensor hidden = room_for_hidden(e);
  forward_keeping(e, hidden);
  for (std::int64_t i = 0; i < hidden.view().numel(); ++i) {
    ASSERT_EQ(hidden.get(i), 0.0);
  }
  expect_same_bits(e);
}

TEST(MoeExpertsHidden, ThreadsDoNotMatter) {
  Random random;
  const ExpertsCase e = make_experts(random, {150, 70, 140, 5, 3, 0, DType::kBF16, DType::kBF16});
  const Tensor hidden = room_for_hidden(e);
  forward_keeping(e, hidden);
  for_each_thread_count([&] {
    const Tensor again = room_for_hidden(e);
    forward_keeping(e, again);
    EXPECT_TRUE(same_bits(again, hidden));
  });
}

TEST(MoeExpertsHidden, Errors) {
  Random random;
  const ExpertsCase e = make_experts(random, {3, 8, 5, 4, 2, 0});
  const Tensor out = like(e.x);
  const Tensor right = room_for_hidden(e);
  const auto expect = [&](const TensorView& hidden, const std::string& text) {
    expect_error([&] { moe_experts_fwd(e.inputs(), out, {}, hidden); }, "moe_experts_fwd: " + text);
    MoeExpertsInputs in = e.inputs();
    in.hidden = hidden;
    const ExpertsGradients g = empty_gradients(e);
    expect_error([&] { moe_experts_bwd(e.dout, in, g.views(e)); }, "moe_experts_bwd: " + text);
  };
  expect(ranked(right, 2), "hidden: expected shape [6, 2, 5], got [6, 2]");
  expect(sized(right, 0, 5), "hidden: expected shape [6, 2, 5], got [5, 2, 5]");
  expect(sized(right, 1, 1), "hidden: expected shape [6, 2, 5], got [6, 1, 5]");
  expect(sized(right, 2, 4), "hidden: expected shape [6, 2, 5], got [6, 2, 4]");
  expect(typed(right, DType::kBF16), "hidden: expected dtype float32, got dtype bfloat16");
  expect(strided(right, 2, 2), "hidden: expected inner stride 1, got 2");
  const MoeExpertsInputs in = e.inputs();
  expect_error([&] { moe_experts_fwd(in, out, {}, strided(right, 0, 0)); },
               "moe_experts_fwd: hidden: expected an output without repeated elements, got stride 0 in dimension 0");
  TensorView overlapping = right;
  overlapping.data = in.gate_up.data;
  expect_error([&] { moe_experts_fwd(in, out, {}, overlapping); },
               "moe_experts_fwd: hidden: expected memory of its own, got an overlap with gate_up");
  MoeExpertsInputs given = in;
  given.hidden = right;
  expect_error([&] { moe_experts_fwd(given, out); },
               "moe_experts_fwd: hidden: expected none among the inputs, got a tensor");
  ExpertsGradients g = empty_gradients(e);
  MoeExpertsGradients views = g.views(e);
  views.dx.data = right.view().data;
  expect_error([&] { moe_experts_bwd(e.dout, given, views); },
               "moe_experts_bwd: dx: expected memory of its own, got an overlap with hidden");
  const ExpertsCase exact = wide(e);
  const Tensor exact_out = like(exact.x);
  expect_error([&] { moe_experts_fwd(exact.inputs(), exact_out, {}, right); },
               "moe_experts_fwd: hidden: expected none with float64, got a tensor");
  given = exact.inputs();
  given.hidden = right;
  g = empty_gradients(exact);
  expect_error([&] { moe_experts_bwd(exact.dout, given, g.views(exact)); },
               "moe_experts_bwd: hidden: expected none with float64, got a tensor");
}

}  // namespace
}  // namespace tidegate::test
