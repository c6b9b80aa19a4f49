// moe_experts_fwd and _bwd: precision, bits, needs.
#include "ops/moe_experts/test_case.h"

namespace tidegate::test {
namespace {

// Errors of 16-bit types: a and the result are rounded (forward); gate and up's gradients too (backward).
double forward_bound(DType dtype) { return dtype == DType::kF32 ? 1e-6 : 1.45 * stored(dtype, 0.0); }
double backward_bound(DType dtype, DType stored_as) {
  return dtype == DType::kF32 ? 2e-6 : 1.75 * std::max(stored(dtype, 0.0), stored(stored_as, 0.0));
}

struct Errors {
  std::map<Isa, Accuracy> out;
  std::map<std::pair<Isa, int>, Accuracy> gradients;
  void add(const ExpertsCase& e) {
    const ExpertsCase exact = wide(e);
    const Tensor truth = forward(exact);
    const Tensor plain = plain_forward(e);
    const ExpertsGradients truth_g = backward(exact);
    const ExpertsGradients plain_g = plain_backward(e);
    for_each_isa([&] {
      // Roundings inside make elements differ by more than the last rounding: the scale of a row's error is the result.
      const double inside = e.c.dtype == DType::kF32 ? 1e-6 : stored(e.c.dtype, 0.0);
      out[active_isa()].add(forward(e), plain, truth, inside);
      const ExpertsGradients g = backward(e);
      for (int i = 0; i < kGradients; ++i) {
        if (!g.has(i)) {
          continue;
        }
        SCOPED_TRACE(kGradientNames[i]);
        gradients[{active_isa(), i}].add(g.g[i], plain_g.g[i], truth_g.g[i], inside);
      }
    });
  }
  void expect(DType dtype, DType weight_type) const {
    for (const auto& [isa, a] : out) {
      a.expect("out_" + std::string(isa_name(isa)), forward_bound(dtype));
    }
    for (const auto& [key, a] : gradients) {
      a.expect(std::string(kGradientNames[key.second]) + "_" + std::string(isa_name(key.first)),
               backward_bound(dtype, key.second == 0 ? dtype : weight_type));
    }
  }
};

TEST(MoeExperts, MatchesFp64) {
  for (const DType dtype : kKernelTypes) {
    for (const DType weight_type : {dtype, DType::kF32}) {
      Random random;
      Errors errors;
      for (const bool turned : {false, true}) {
        for (const WeightAxes axes : {WeightAxes::kNK, WeightAxes::kKN}) {
          if (turned && axes == WeightAxes::kNK) {
            continue;  // the same memory as the view below
          }
          Experts c{17, 64, 32, 8, 2, 0, dtype, weight_type, turned};  // 2I == H: nothing may be guessed
          c.options.weight_axes = axes;
          c.gap = 1;
          errors.add(make_experts(random, c));
          c.J = 24;
          errors.add(make_experts(random, c));
          c.only = 3;
          errors.add(make_experts(random, c));
          c.rank = 5;
          errors.add(make_experts(random, c));
        }
      }
      Experts wide_one{70, 83, 150, 3, 2, 37, dtype, weight_type};
      errors.add(make_experts(random, wide_one));
      wide_one.rank = 20;
      errors.add(make_experts(random, wide_one));
      wide_one.options.interleaved = true;
      errors.add(make_experts(random, wide_one));
      errors.expect(dtype, weight_type);
    }
  }
}

// Experts, slots and tokens of real models.
TEST(MoeExperts, ManyExpertsAndTokens) {
  Random random;
  Errors errors[2];
  for (const std::int64_t E : {1, 8, 64, 256, 512}) {
    for (const std::int64_t k : {1, 2, 8, 10}) {
      for (const std::int64_t T : {0, 1, 3, 16, 257}) {
        const DType dtype = (E + k + T) % 2 == 0 ? DType::kF32 : DType::kBF16;
        errors[dtype == DType::kBF16].add(make_experts(random, {T, 24, 9, E, k, 0, dtype, dtype}));
      }
    }
  }
  errors[0].add(make_experts(random, {2048, 16, 8, 64, 8, 0, DType::kF32, DType::kF32}));
  errors[1].add(make_experts(random, {2048, 16, 8, 256, 10, 0, DType::kBF16, DType::kBF16}));
  errors[0].expect(DType::kF32, DType::kF32);
  errors[1].expect(DType::kBF16, DType::kBF16);
}

// Together, because the gradients of a few routing weights are a few sums that may cancel.
TEST(MoeExperts, RealWidths) {
  Random random;
  Errors errors;
  for (Experts c : {Experts{1, 2048, 512, 2, 2}, Experts{20, 2048, 24, 3, 2}, Experts{20, 96, 512, 3, 2}}) {
    c.dtype = c.weight_type = DType::kBF16;
    errors.add(make_experts(random, c));
    c.rank = 8;
    errors.add(make_experts(random, c));
  }
  errors.expect(DType::kBF16, DType::kBF16);
}

// Routing weights that silu(gate) * up, or the gradient of the output, cannot be multiplied by in fp16.
TEST(MoeExperts, RoutingWeightsBeyondHalfPrecision) {
  for (const double weight : {1e4, 1e-6}) {
    Random random;
    for (const std::int64_t rank : {0, 4}) {
      ExpertsCase e = make_experts(random, {300, 64, 96, 4, 2, 0, DType::kF16, DType::kF16, false, {}, -1, 0, rank});
      e.weights.fill(weight);
      const Tensor dout = copied(e.dout);
      e.dout.fill([&](std::int64_t i) { return dout.get(i) * (weight > 1.0 ? 1e-3 : 1e3); });
      const ExpertsGradients g = backward(e);
      const ExpertsGradients exact = backward(wide(e));
      for (const int i : {3, 10, 11}) {  // ddown and its low-rank addition
        double error = 0.0, size = 0.0;
        for (std::int64_t j = 0; g.has(i) && j < g.g[i].view().numel(); ++j) {
          error += std::pow(g.g[i].get(j) - exact.g[i].get(j), 2.0);
          size += std::pow(exact.g[i].get(j), 2.0);
        }
        EXPECT_LE(std::sqrt(error), 1e-3 * std::sqrt(size)) << kGradientNames[i] << " " << weight;
      }
    }
  }
}

// 2I == H: both readings of the weights are possible, and only the flag says which one is meant.
TEST(MoeExperts, AWrongLayoutFlagIsNotRepaired) {
  Random random;
  const ExpertsCase e = make_experts(random, {9, 32, 16, 4, 2});
  MoeExpertsInputs in = e.inputs();
  in.down = exchanged(in.down, 1, 2);  // fits either way only where H == I; gate_up [E,2I,H] is square here
  MoeExpertsOptions wrong = e.c.options;
  wrong.weight_axes = WeightAxes::kKN;
  Tensor out = like(e.x);
  moe_experts_fwd(in, out, wrong);
  const Tensor right = forward(e);
  double largest = 0.0;
  for (std::int64_t i = 0; i < out.view().numel(); ++i) {
    largest = std::max(largest, std::abs(out.get(i) - right.get(i)));
  }
  EXPECT_GT(largest, 0.1);
}

TEST(MoeExperts, ReferenceIsTheDerivative) {
  Random random;
  for (const bool interleaved : {false, true}) {
    Experts c{5, 4, 3, 3, 2, 2};
    c.options.interleaved = interleaved;
    c.rank = 2;
    ExpertsCase e = wide(make_experts(random, c));
    const ExpertsGradients g = backward(e);
    const auto loss = [&] { return dot(forward(e), e.dout); };
    Tensor* inputs[] = {&e.x,           &e.weights,       &e.gate_up, &e.down,    &e.shared_gate, &e.shared_up,
                        &e.shared_down, &e.shared_router, &e.lora[0], &e.lora[1], &e.lora[2],     &e.lora[3]};
    for (int i = 0; i < kGradients; ++i) {
      SCOPED_TRACE(kGradientNames[i]);
      expect_gradient(*inputs[i], g.g[i], loss);
    }
  }
}

// A token has its bits alone and in a batch, in any token block, and for any number of threads.
TEST(MoeExperts, BatchAndThreadsDoNotMatter) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Random random;
    Experts c{150, 70, 140, 5, 3, 20, dtype, dtype};
    c.rank = 6;
    const ExpertsCase all = make_experts(random, c);
    for_each_isa([&] {
      const Tensor out = forward(all);
      const ExpertsGradients g = backward(all);
      for (const std::int64_t t : {0, 66, 149}) {
        ExpertsCase one = all;
        one.c.T = 1;
        one.x = copied(part(all.x, 0, t, t + 1));
        one.dout = copied(part(all.dout, 0, t, t + 1));
        one.ids = copied(part(all.ids, 0, t, t + 1));
        one.weights = copied(part(all.weights, 0, t, t + 1));
        EXPECT_TRUE(same_bits(forward(one), part(out, 0, t, t + 1)));
        EXPECT_TRUE(same_bits(backward(one).g[0], part(g.g[0], 0, t, t + 1)));
      }
      for_each_thread_count([&] {
        EXPECT_TRUE(same_bits(forward(all), out));
        const ExpertsGradients again = backward(all);
        for (int i = 0; i < kGradients; ++i) {
          EXPECT_TRUE(same_bits(again.g[i], g.g[i])) << kGradientNames[i];
        }
      });
    });
  }
}

TEST(MoeExperts, TokenBlocksDoNotMatter) {
  Random random;
  const ExpertsCase all = make_experts(random, {9000, 8, 4, 6, 4, 0, DType::kF32, DType::kF32});
  const Tensor out = forward(all);
  ExpertsCase tail = all;
  tail.c.T = 100;
  for (Tensor* t : {&tail.x, &tail.dout, &tail.ids, &tail.weights}) {
    *t = copied(part(*t, 0, 8900, 9000));
  }
  EXPECT_TRUE(same_bits(forward(tail), part(out, 0, 8900, 9000)));
  EXPECT_TRUE(same_bits(backward(tail).g[0], part(backward(all).g[0], 0, 8900, 9000)));
}

TEST(MoeExperts, OnlyWhatIsNeeded) {
  Random random;
  Experts c{20, 40, 24, 4, 2, 16, DType::kBF16, DType::kBF16};
  c.rank = 4;
  const ExpertsCase e = make_experts(random, c);
  for_each_isa([&] {
    const ExpertsGradients all = backward(e);
    for (int i = 0; i < kGradients; ++i) {
      ExpertsGradients one;
      one.g[i] = empty_gradients(e).g[i];
      moe_experts_bwd(e.dout, e.inputs(), one.views(e), e.c.options);
      EXPECT_TRUE(same_bits(one.g[i], all.g[i])) << kGradientNames[i];
    }
  });
}

TEST(MoeExperts, RowsByPointer) {
  Random random;
  for (const DType dtype : kKernelTypes) {
    const ExpertsCase e = make_experts(random, {.T = 11, .H = 40, .I = 24, .E = 3, .k = 2, .dtype = dtype});
    Tensor want = like(e.x), got = like(e.x);
    moe_experts_fwd(e.inputs(), want);
    std::vector<Tensor> rows;  // each on a page of its own
    std::vector<const void*> pointers;
    for (std::int64_t t = 0; t < e.c.T; ++t) {
      rows.push_back(copied(part(e.x, 0, t, t + 1)));
      pointers.push_back(rows.back().view().data);
    }
    MoeExpertsInputs in = e.inputs();
    in.x.data = nullptr;
    in.x_rows = pointers.data();
    moe_experts_fwd(in, got);
    EXPECT_TRUE(same_bits(got, want));
  }
}

TEST(MoeExperts, PairsThatAreNotRoutedCostAndGiveNothing) {
  Random random;
  ExpertsCase e = make_experts(random, {4, 16, 8, 3, 2, 0});
  std::fill_n(e.ids.view().as<std::int32_t>(), 8, -1);
  e.weights.set(2, std::nan(""));  // ignored
  for_each_isa([&] {
    const Tensor out = forward(e);
    const ExpertsGradients g = backward(e);
    for (std::int64_t i = 0; i < out.view().numel(); ++i) {
      ASSERT_EQ(out.get(i), 0.0);
      ASSERT_EQ(g.g[0].get(i), 0.0);
    }
    EXPECT_EQ(g.g[1].get(2), 0.0);
    EXPECT_EQ(g.g[2].get(5), 0.0);
  });
  std::fill_n(e.ids.view().as<std::int32_t>(), 8, 3);
  e.c.options.ids_convention = ExpertIds::kTransformersEp;
  EXPECT_EQ(forward(e).get(0), 0.0);
}

TEST(MoeExperts, RoundedResultsOfExperts) {
  Random random;
  ExpertsCase e = make_experts(random, {30, 40, 24, 4, 3, 0, DType::kBF16, DType::kBF16});
  for_each_isa([&] {
    e.c.options.round_y = false;
    const Tensor exact = forward(e);
    e.c.options.round_y = true;
    Accuracy a;
    a.add(forward(e), plain_forward(e), forward(wide(e)), stored(DType::kBF16, 0.0));
    a.expect("rounded_y", 1.75 * stored(DType::kBF16, 0.0));
    EXPECT_FALSE(same_bits(forward(e), exact));
  });
}

}  // namespace
}  // namespace tidegate::test
