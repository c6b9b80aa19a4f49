// moe_experts_quant: against the definition, ids that are not routed, threads and batches, bad input.
#include <gtest/gtest.h>

#include <cmath>

#include "ops/moe_experts_quant/reference.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

struct Experts {
  Tensor x, ids, weights, gate_up, gate_up_scale, down, down_scale;
  MoeExpertsQuantOptions options;
  MoeExpertsQuantInputs inputs() const { return {x, ids, weights, gate_up, gate_up_scale, down, down_scale}; }
};

struct Quantised {
  Tensor q, scale;
};
Quantised quantised(const Tensor& w) {
  Quantised r{Tensor(DType::kI8, w.sizes()), Tensor(DType::kF32, {w.view().sizes[0], w.view().sizes[1]})};
  quantize(w, r.q, r.scale);
  return r;
}

Experts make_experts(std::int64_t T, std::int64_t H, std::int64_t I, std::int64_t E, std::int64_t k,
                     DType dtype = DType::kBF16) {
  Random random(static_cast<std::uint64_t>(T + H));
  Experts e;
  e.x = normal(random, dtype, {T, H}, padded());
  e.ids = Tensor(DType::kI32, {T, k});
  for (std::int64_t i = 0; i < T * k; ++i) {
    e.ids.view().as<std::int32_t>()[i] = static_cast<std::int32_t>(random.integer(-1, E - 1));
  }
  e.weights = uniform(random, DType::kF32, {T, k}, 0.0, 1.0);
  const Quantised gate_up = quantised(normal(random, DType::kBF16, {E, 2 * I, H}, {}, 0.2));
  const Quantised down = quantised(normal(random, DType::kBF16, {E, H, I}, {}, 0.2));
  e.gate_up = gate_up.q;
  e.gate_up_scale = gate_up.scale;
  e.down = down.q;
  e.down_scale = down.scale;
  return e;
}

Tensor run(const Experts& e) {
  Tensor out(e.x.view().dtype, e.x.sizes(), padded());
  moe_experts_quant(e.inputs(), out, e.options);
  return out;
}

// A value that is on the edge between two integers may go either way, which moves a result by a step of one factor.
TEST(MoeExpertsQuant, MatchesTheDefinition) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      double error = 0.0;
      double size = 0.0;
      for (const std::int64_t T : {0, 1, 9, 60}) {
        const Experts e = make_experts(T, 96, 40, 4, 2, dtype);
        std::vector<double> want(static_cast<std::size_t>(T * 96));
        quant_experts::reference(e.inputs(), e.options.weight_axes, want.data());
        const Tensor out = run(e);
        double most = 0.0;
        for (const double v : want) {
          most = std::max(most, std::abs(v));
        }
        for (std::int64_t i = 0; i < T * 96; ++i) {
          const double v = want[static_cast<std::size_t>(i)];
          const double d = out.get(i) - v;
          ASSERT_LE(std::abs(d), rounding_of(dtype) * std::abs(v) + 2e-5 * most) << T << " " << i;
          error += d * d;
          size += v * v;
        }
        EXPECT_TRUE(out.gaps_untouched());
      }
      EXPECT_LE(std::sqrt(error), stored(dtype, 2e-6) * std::sqrt(size)) << dtype_name(dtype);
    }
  });
}

TEST(MoeExpertsQuant, BitsDoNotDependOnThreadsOrBatch) {
  for_each_isa([] {
    const Experts e = make_experts(300, 200, 48, 3, 2);
    const Tensor want = run(e);
    for_each_thread_count([&] { EXPECT_TRUE(same_bits(run(e), want)); });
    Experts one = e;
    one.x = copied(part(e.x, 0, 250, 251));
    one.ids = copied(part(e.ids, 0, 250, 251));
    one.weights = copied(part(e.weights, 0, 250, 251));
    EXPECT_TRUE(same_bits(run(one), part(want, 0, 250, 251)));
  });
}

TEST(MoeExpertsQuant, BrokenTokensStayAlone) {
  for_each_isa([] {
    Experts e = make_experts(9, 64, 32, 2, 2);
    for (std::int64_t i = 0; i < 18; ++i) {
      e.ids.view().as<std::int32_t>()[i] = static_cast<std::int32_t>(i % 2);
    }
    const Tensor want = run(e);
    e.x.set(4 * 64 + 3, std::nan(""));
    const Tensor got = run(e);
    for (std::int64_t t = 0; t < 9; ++t) {
      EXPECT_EQ(t != 4, bool(same_bits(part(got, 0, t, t + 1), part(want, 0, t, t + 1)))) << t;
    }
    EXPECT_TRUE(std::isnan(got.get(4 * 64)));
  });
}

TEST(MoeExpertsQuant, ForeignIdsOfTransformers) {
  Experts e = make_experts(7, 32, 16, 4, 2);
  const Tensor want = run(e);
  e.options.ids_convention = ExpertIds::kTransformersEp;
  for (std::int64_t i = 0; i < 14; ++i) {
    std::int32_t& id = e.ids.view().as<std::int32_t>()[i];
    id = id < 0 ? 4 : id;
  }
  EXPECT_TRUE(same_bits(run(e), want));
}

TEST(MoeExpertsQuant, Errors) {
  const Experts e = make_experts(5, 32, 16, 4, 2);
  const Tensor out(DType::kBF16, {5, 32});
  using Change = std::function<void(MoeExpertsQuantInputs&)>;
  const auto bad = [&](const Change& change, const std::string& text) {
    MoeExpertsQuantInputs in = e.inputs();
    change(in);
    expect_error([&] { moe_experts_quant(in, out); }, "moe_experts_quant: " + text);
  };
  bad([](auto& in) { in.x = {}; }, "x: expected a tensor, got none");
  bad([](auto& in) { in.x.dtype = DType::kF64; }, "x: expected dtype float32, bfloat16 or float16, got dtype float64");
  bad([](auto& in) { in.ids.sizes[0] = 4; }, "ids: expected shape [5, 2], got [4, 2]");
  bad([](auto& in) { in.ids.dtype = DType::kF32; }, "ids: expected dtype int32 or int64, got dtype float32");
  bad([](auto& in) { in.weights.sizes[1] = 1; }, "weights: expected shape [5, 2], got [5, 1]");
  bad([](auto& in) { in.gate_up.dtype = DType::kBF16; }, "gate_up: expected dtype int8, got dtype bfloat16");
  bad([](auto& in) { in.gate_up.sizes[1] = 16; }, "gate_up: expected shape [4, 32, 32], got [4, 16, 32]");
  bad([](auto& in) { in.gate_up_scale.rank = 1; }, "gate_up_scale: expected shape [4, 32], got [4]");
  bad([](auto& in) { in.down.rank = 2; }, "down: expected 3 dimensions, got 2 in [4, 32]");
  bad([](auto& in) { in.down_scale.dtype = DType::kF16; }, "down_scale: expected dtype float32, got dtype float16");
  Tensor ids = e.ids;
  ids.view().as<std::int32_t>()[7] = 300;
  bad([&](auto& in) { in.ids = ids; }, "ids[3,1]: expected -1 or 0..3, got 300");
  expect_error([&] { moe_experts_quant(e.inputs(), sized(out, 1, 31)); },
               "moe_experts_quant: out: expected shape [5, 32], got [5, 31]");
  expect_error([&] { moe_experts_quant(e.inputs(), typed(out, DType::kF32)); },
               "moe_experts_quant: out: expected dtype bfloat16 (as x), got dtype float32");
  expect_error([&] { moe_experts_quant(e.inputs(), e.x); },
               "moe_experts_quant: out: expected memory of its own, got an overlap with x");
}

}  // namespace
}  // namespace tidegate::test
