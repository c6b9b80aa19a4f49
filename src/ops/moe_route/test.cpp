// moe_route_fwd and _bwd.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "ops/moe_route/reference.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

struct Routed {
  Tensor ids, weights, probs;
};
Routed route(const Tensor& logits, std::int64_t k, const MoeRouteOptions& options = {}, const Tensor& replay = {},
             DType weights_type = DType::kF32) {
  const std::int64_t T = logits.view().sizes[0];
  const bool fp64 = logits.view().dtype == DType::kF64;
  Routed r{Tensor(DType::kI32, {T, k}), Tensor(fp64 ? DType::kF64 : weights_type, {T, k}),
           Tensor(fp64 ? DType::kF64 : DType::kF32, logits.sizes())};
  moe_route_fwd(logits, replay, r.ids, r.weights, r.probs, options);
  return r;
}
Tensor backward(const Tensor& logits, const Routed& r, const Tensor& dweights, const Tensor& dprobs,
                const MoeRouteOptions& options = {}) {
  Tensor dlogits = like(logits);
  moe_route_bwd(dweights, dprobs, logits, r.ids, dlogits, options);
  return dlogits;
}

// Logits with many equal values and some masked experts.
Tensor tied(Random& random, DType dtype, std::int64_t T, std::int64_t E, std::int64_t open) {
  Tensor z(dtype, {T, E});
  z.fill([&](std::int64_t i) {
    return i % E >= open && random.uniform() < 0.2 ? -INFINITY : std::round(random.normal() * 4.0) / 4.0;
  });
  return z;
}

TEST(MoeRoute, IdsAreRanksWithTheLowestIdFirst) {
  Random random;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    for (const std::int64_t E : {1, 8, 64, 256, 512}) {
      for (const std::int64_t k : {1, 2, 8, 10}) {
        if (k > E) {
          continue;
        }
        const Tensor z = tied(random, dtype, 37, E, k);
        for_each_isa([&] {
          const Routed r = route(z, k);
          for (std::int64_t t = 0; t < 37; ++t) {
            std::vector<std::int64_t> order(static_cast<std::size_t>(E));
            for (std::int64_t e = 0; e < E; ++e) {
              order[static_cast<std::size_t>(e)] = e;
            }
            std::stable_sort(order.begin(), order.end(),
                             [&](std::int64_t a, std::int64_t b) { return z.get(t * E + a) > z.get(t * E + b); });
            for (std::int64_t s = 0; s < k; ++s) {
              ASSERT_EQ(r.ids.get(t * k + s), static_cast<double>(order[static_cast<std::size_t>(s)])) << E << " " << t;
            }
          }
        });
      }
    }
  }
}

TEST(MoeRoute, MatchesFp64) {
  for (const bool renormalise : {true, false}) {
    std::map<Isa, Accuracy> weights, probs;
    std::map<std::pair<Isa, DType>, Accuracy> dlogits;
    Random random;
    for (const DType dtype : kKernelTypes) {
      for (const std::int64_t E : {17, 64, 256, 515}) {
        const std::int64_t k = E == 17 ? 3 : 8;
        const MoeRouteOptions options{renormalise, {}};
        const Tensor z = normal(random, dtype, {57, E});
        const Tensor dw = normal(random, DType::kF32, {57, k});
        const Tensor dp = normal(random, DType::kF32, {57, E});
        const Routed truth = route(wide(z), k, options);
        const Tensor truth_dz = backward(wide(z), truth, wide(dw), wide(dp), options);
        std::vector<std::int32_t> chosen;
        for (const double id : values(truth.ids)) {
          chosen.push_back(static_cast<std::int32_t>(id));
        }
        Routed plain = route(z, k, options);
        moe_route::reference_weigh<float>(z, chosen.data(), plain.weights, plain.probs, options);
        Tensor plain_dz = like(z);
        moe_route::reference_bwd<float>(dw, dp, z, chosen.data(), k, plain_dz, options);
        for_each_isa([&] {
          const Routed got = route(z, k, options);
          EXPECT_TRUE(same_bits(got.ids, truth.ids));
          weights[active_isa()].add(got.weights, plain.weights, truth.weights, 3e-7);
          probs[active_isa()].add(got.probs, plain.probs, truth.probs, 3e-7);
          const Tensor dz = backward(z, got, dw, dp, options);
          dlogits[{active_isa(), dtype}].add(dz, plain_dz, truth_dz, 1e-6);
        });
      }
    }
    for (const auto& [isa, a] : weights) {
      a.expect("weights_" + std::string(isa_name(isa)), 3e-7);
      probs.at(isa).expect("probs_" + std::string(isa_name(isa)), 3e-7);
    }
    for (const auto& [key, a] : dlogits) {
      a.expect("dlogits_" + std::string(isa_name(key.first)), stored(key.second, 1e-6));
    }
  }
}

TEST(MoeRoute, ReferenceIsTheSoftmaxAndItsDerivative) {
  Random random;
  for (const bool renormalise : {true, false}) {
    const MoeRouteOptions options{renormalise, {}};
    Tensor z = normal(random, DType::kF64, {3, 7});
    const Tensor dw = normal(random, DType::kF64, {3, 4});
    const Tensor dp = normal(random, DType::kF64, {3, 7});
    Tensor replay(DType::kI64, {3, 4});
    const double ids[] = {0, 3, 3, 5, -1, 2, 1, 0, 6, 6, -1, 6};  // replayed ids may repeat, or name nobody
    for (std::int64_t i = 0; i < 12; ++i) {
      replay.view().as<std::int64_t>()[i] = static_cast<std::int64_t>(ids[i]);
    }
    const Routed r = route(z, 4, options, replay);
    double all = 0.0;
    double chosen = 0.0;
    for (std::int64_t e = 0; e < 7; ++e) {
      all += std::exp(z.get(e));
    }
    for (const int e : {0, 3, 3, 5}) {
      chosen += std::exp(z.get(e));
    }
    EXPECT_NEAR(r.weights.get(1), std::exp(z.get(3)) / (renormalise ? chosen : all), 1e-14);
    EXPECT_NEAR(r.probs.get(6), std::exp(z.get(6)) / all, 1e-14);
    EXPECT_EQ(r.weights.get(4), 0.0);
    const Tensor dz = backward(z, r, dw, dp, options);
    expect_gradient(z, dz, [&] {
      const Routed now = route(z, 4, options, replay);
      return dot(now.weights, dw) + dot(now.probs, dp);
    });
  }
}

TEST(MoeRoute, BatchThreadsAndMemoryDoNotMatter) {
  Random random;
  const Tensor z = normal(random, DType::kBF16, {640, 256}, padded());
  for_each_isa([&] {
    const Routed all = route(z, 8);
    for_each_thread_count([&] {
      const Routed again = route(z, 8);
      EXPECT_TRUE(same_bits(again.ids, all.ids));
      EXPECT_TRUE(same_bits(again.weights, all.weights));
    });
    for (const std::int64_t t : {0, 17, 639}) {
      const Routed one = route(copied(part(z, 0, t, t + 1)), 8);
      EXPECT_TRUE(same_bits(one.ids, part(all.ids, 0, t, t + 1)));
      EXPECT_TRUE(same_bits(one.weights, part(all.weights, 0, t, t + 1)));
    }
    EXPECT_EQ(route(Tensor(DType::kF32, {0, 8}), 2).ids.view().numel(), 0);
  });
}

TEST(MoeRoute, LogitsAreRoundedOnRequest) {
  Random random;
  const Tensor z = normal(random, DType::kF32, {64, 256});
  const Tensor rounded = converted(z, DType::kBF16);
  for_each_isa([&] {
    const Routed want = route(rounded, 8);
    const Routed got = route(z, 8, {true, DType::kBF16});
    EXPECT_TRUE(same_bits(got.ids, want.ids));
    EXPECT_TRUE(same_bits(got.weights, want.weights));
  });
}

TEST(MoeRoute, Errors) {
  Random random;
  const Tensor z = normal(random, DType::kF32, {3, 8});
  const Tensor ids(DType::kI32, {3, 2}), weights(DType::kF32, {3, 2}), probs(DType::kF32, {3, 8});
  const auto fwd = [&](const TensorView& logits, const TensorView& replay, const TensorView& i, const TensorView& w,
                       const TensorView& p, const std::string& text) {
    expect_error([&] { moe_route_fwd(logits, replay, i, w, p); }, "moe_route_fwd: " + text);
  };
  for_each_isa([&] {
    for (const double bad : {std::nan(""), double(INFINITY)}) {
      for (const std::int64_t e : {8, 15}) {
        const Tensor wrong = Tensor(z).set(e, bad);
        fwd(wrong, {}, ids, weights, probs,
            std::string("logits[1]: expected numbers below +inf, got ") + (bad > 0 ? "inf" : "nan"));
      }
    }
    Tensor masked = z;
    for (std::int64_t e = 1; e < 8; ++e) {
      masked.set(16 + e, -INFINITY);
    }
    fwd(masked, {}, ids, weights, probs, "logits[2]: expected at least 2 above -inf, got 1");
    Tensor replay(DType::kI64, {3, 2});
    std::memset(replay.view().data, 0, 48);
    replay.view().as<std::int64_t>()[4] = 7;
    replay.view().as<std::int64_t>()[5] = -1;
    fwd(masked, replay, ids, weights, probs, "replay_ids[2]: expected an expert above -inf, got none");
    replay.view().as<std::int64_t>()[3] = 300;
    fwd(z, replay, ids, weights, probs, "replay_ids[1,1]: expected -1 or 0..7, got 300");
    replay.view().as<std::int64_t>()[3] = -2;
    fwd(z, replay, ids, weights, probs, "replay_ids[1,1]: expected -1 or 0..7, got -2");
  });
  fwd({}, {}, ids, weights, probs, "logits: expected a tensor, got none");
  fwd(typed(z, DType::kI32), {}, ids, weights, probs,
      "logits: expected dtype float32, bfloat16, float16 or float64, got dtype int32");
  fwd(strided(z, 1, 2), {}, ids, weights, probs, "logits: expected inner stride 1, got 2");
  fwd(z, {}, sized(ids, 1, 1), weights, probs, "ids: expected shape [3, 2], got [3, 1]");
  fwd(z, {}, typed(ids, DType::kF32), weights, probs, "ids: expected dtype int32 or int64, got dtype float32");
  fwd(z, {}, ids, sized(weights, 1, 0), probs, "k: expected 1 to 8 (experts), got 0");
  fwd(z, {}, ids, sized(weights, 1, 9), probs, "k: expected 1 to 8 (experts), got 9");
  fwd(z, {}, ids, typed(weights, DType::kBF16), probs,
      "weights: expected dtype float32 (as logits), got dtype bfloat16");
  fwd(z, {}, ids, weights, sized(probs, 0, 2), "probs: expected shape [3, 8] (as logits), got [2, 8]");
  fwd(z, {}, ids, weights, z, "probs: expected memory of its own, got an overlap with logits");
  fwd(z, sized(ids, 0, 2), ids, weights, probs, "ids: expected memory of its own, got an overlap with replay_ids");
  moe_route_fwd(z, {}, ids, weights, {});
  const Tensor dz = like(z);
  const auto bwd = [&](const TensorView& dw, const TensorView& dp, const TensorView& i, const TensorView& out,
                       const std::string& text) {
    expect_error([&] { moe_route_bwd(dw, dp, z, i, out); }, "moe_route_bwd: " + text);
  };
  bwd(sized(weights, 0, 2), {}, ids, dz, "dweights: expected shape [3, 2], got [2, 2]");
  bwd(weights, sized(probs, 1, 7), ids, dz, "dprobs: expected shape [3, 8] (as logits), got [3, 7]");
  bwd(weights, {}, typed(ids, DType::kF32), dz, "ids: expected dtype int32 or int64, got dtype float32");
  bwd(weights, {}, ids, z, "dlogits: expected memory of its own, got an overlap with logits");
  bwd(weights, {}, ids, {}, "dlogits: expected a tensor, got none");
  ids.view().as<std::int32_t>()[1] = 8;
  bwd(weights, {}, ids, dz, "ids[0,1]: expected -1 or 0..7, got 8");
}

}  // namespace
}  // namespace tidegate::test
