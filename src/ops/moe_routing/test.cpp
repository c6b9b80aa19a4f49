// moe_init_routing, moe_permute, moe_unpermute_fwd and _bwd.
#include <gtest/gtest.h>

#include <map>

#include "ops/moe_routing/reference.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

Tensor integers(const Sizes& sizes, const std::vector<std::int32_t>& list) {
  Tensor t(DType::kI32, sizes);
  std::copy(list.begin(), list.end(), t.view().as<std::int32_t>());
  return t;
}
std::vector<std::int32_t> list_of(const Tensor& t) {
  std::vector<std::int32_t> list;
  for (const double v : values(t)) {
    list.push_back(static_cast<std::int32_t>(v));
  }
  return list;
}

struct Sorted {
  Tensor counts, src, pos;
};
Sorted sorted(const Tensor& ids, std::int64_t E, ExpertIds convention = ExpertIds::kPlain) {
  Sorted s{Tensor(DType::kI64, {E}), Tensor(DType::kI32, {ids.view().numel()}), Tensor(DType::kI32, ids.sizes())};
  moe_init_routing(ids, s.counts, s.src, s.pos, convention);
  return s;
}

TEST(MoeRouting, SortsPairsByExpert) {
  using List = std::vector<std::int32_t>;
  const Sorted s = sorted(integers({3, 2}, {2, 0, 2, 1, -1, 2}), 4);
  EXPECT_EQ(list_of(s.counts), (List{1, 1, 3, 0}));
  EXPECT_EQ(list_of(s.src), (List{1, 3, 0, 2, 5, -1}));
  EXPECT_EQ(list_of(s.pos), (List{2, 0, 3, 1, -1, 4}));
  const Sorted ep = sorted(integers({3, 2}, {2, 0, 2, 1, 4, 2}), 4, ExpertIds::kTransformersEp);
  EXPECT_EQ(list_of(ep.pos), list_of(s.pos));
  EXPECT_EQ(list_of(sorted(integers({0, 2}, {}), 3).counts), (List{0, 0, 0}));
}

TEST(MoeRouting, ManyBlocksGiveTheStableOrder) {
  Random random;
  const std::int64_t pairs = 40000;
  for (const std::int64_t E : {1, 7, 512}) {
    std::vector<std::int32_t> ids;
    for (std::int64_t i = 0; i < pairs; ++i) {
      ids.push_back(static_cast<std::int32_t>(random.integer(-1, E - 1)));
    }
    const Tensor list = integers({pairs / 8, 8}, ids);
    const Sorted s = sorted(list, E);
    std::vector<std::int32_t> want;
    for (std::int32_t e = 0; e < E; ++e) {
      for (std::int64_t i = 0; i < pairs; ++i) {
        if (ids[static_cast<std::size_t>(i)] == e) {
          want.push_back(static_cast<std::int32_t>(i));
        }
      }
    }
    for (std::size_t j = 0; j < want.size(); ++j) {
      ASSERT_EQ(s.src.get(static_cast<std::int64_t>(j)), want[j]);
      ASSERT_EQ(s.pos.get(want[j]), static_cast<double>(j));
    }
    for_each_thread_count([&] {
      const Sorted again = sorted(list, E);
      EXPECT_TRUE(same_bits(again.src, s.src));
      EXPECT_TRUE(same_bits(again.pos, s.pos));
    });
  }
}

struct Problem {
  Tensor x, y, weights, dout;
  Sorted s;
};
Problem make_problem(Random& random, DType dtype, std::int64_t T, std::int64_t k, std::int64_t H) {
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < T * k; ++i) {
    ids.push_back(static_cast<std::int32_t>(random.integer(-1, 4)));
  }
  return {normal(random, dtype, {T, H}), normal(random, dtype, {T * k, H}), normal(random, DType::kF32, {T, k}),
          normal(random, dtype, {T, H}), sorted(integers({T, k}, ids), 5)};
}
Problem wide(const Problem& p) { return {wide(p.x), wide(p.y), wide(p.weights), wide(p.dout), p.s}; }

Tensor unpermuted(const Problem& p) {
  Tensor out = like(p.x);
  moe_unpermute_fwd(p.y, p.s.pos, p.weights, out);
  return out;
}
struct Gradients {
  Tensor dy, dweights;
};
Gradients backward(const Problem& p) {
  Gradients g{like(p.y), like(p.weights)};
  moe_unpermute_bwd(p.dout, p.y, p.s.pos, p.weights, g.dy, g.dweights);
  return g;
}

TEST(MoeRouting, MatchesFp64) {
  for (const DType dtype : kKernelTypes) {
    std::map<Isa, Accuracy> out, dy, dw;
    Random random;
    for (const std::int64_t H : {1, 17, 64, 130}) {
      const Problem p = make_problem(random, dtype, 23, 3, H);
      const auto pos = list_of(p.s.pos);
      const Tensor truth = unpermuted(wide(p));
      const Gradients truth_g = backward(wide(p));
      Tensor plain = like(p.x);
      moe_routing::reference_unpermute<float>(p.y, pos.data(), 3, p.weights, plain);
      Gradients plain_g{like(p.y).fill(0.0), like(p.weights)};
      moe_routing::reference_bwd<float>(p.dout, p.y, pos.data(), 3, p.weights, plain_g.dy, plain_g.dweights);
      for_each_isa([&] {
        out[active_isa()].add(unpermuted(p), plain, truth, 3e-7);
        const Gradients g = backward(p);
        dy[active_isa()].add(g.dy, plain_g.dy, truth_g.dy, 3e-7);
        dw[active_isa()].add(g.dweights, plain_g.dweights, truth_g.dweights, 3e-7);
        const Tensor one = unpermuted(p);
        for_each_thread_count([&] {
          EXPECT_TRUE(same_bits(unpermuted(p), one));
          EXPECT_TRUE(same_bits(backward(p).dweights, g.dweights));
        });
      });
    }
    for (const auto& [isa, a] : out) {
      a.expect("out", stored(dtype, 3e-7));
      dy.at(isa).expect("dy", stored(dtype, 3e-7));
      dw.at(isa).expect("dweights", 3e-7);
    }
  }
}

TEST(MoeRouting, PermuteCopiesRowsAndUnpermuteIsItsGradient) {
  Random random;
  Problem p = wide(make_problem(random, DType::kF32, 9, 3, 5));
  const auto permuted = [&] {
    Tensor y = like(p.y);
    moe_permute(p.x, p.s.src, y, 3);
    return y;
  };
  const Tensor y = permuted();
  const auto src = list_of(p.s.src);
  for (std::int64_t j = 0; j < 27; ++j) {
    const std::int32_t pair = src[static_cast<std::size_t>(j)];
    for (std::int64_t c = 0; c < 5; ++c) {
      EXPECT_EQ(y.get(j * 5 + c), pair < 0 ? 0.0 : p.x.get(pair / 3 * 5 + c));
    }
  }
  Tensor dx = like(p.x);
  moe_unpermute_fwd(p.y, p.s.pos, {}, dx);
  expect_gradient(p.x, dx, [&] { return dot(permuted(), p.y); });
  const Gradients g = backward(p);
  expect_gradient(p.y, g.dy, [&] { return dot(unpermuted(p), p.dout); });
  expect_gradient(p.weights, g.dweights, [&] { return dot(unpermuted(p), p.dout); });
}

TEST(MoeRouting, Errors) {
  Random random;
  const Problem p = make_problem(random, DType::kF32, 4, 2, 6);
  const Sorted& s = p.s;
  const auto init = [&](const TensorView& ids, const TensorView& counts, const TensorView& src, const TensorView& pos,
                        const std::string& text) {
    expect_error([&] { moe_init_routing(ids, counts, src, pos); }, "moe_init_routing: " + text);
  };
  const Tensor ids = integers({4, 2}, {0, 1, 2, 3, 4, 4, -1, 0});
  init(integers({4, 2}, {0, 1, 2, 5, 4, 4, -1, 0}), s.counts, s.src, s.pos, "ids[1,1]: expected -1 or 0..4, got 5");
  init(integers({4, 2}, {0, 1, 2, -2, 4, 4, -1, 0}), s.counts, s.src, s.pos, "ids[1,1]: expected -1 or 0..4, got -2");
  init(typed(ids, DType::kF32), s.counts, s.src, s.pos, "ids: expected dtype int32 or int64, got dtype float32");
  init(ids, typed(s.counts, DType::kF32), s.src, s.pos, "counts: expected dtype int32 or int64, got dtype float32");
  init(ids, s.counts, sized(s.src, 0, 7), s.pos, "src: expected shape [8], got [7]");
  init(ids, s.counts, s.src, ids, "pos: expected memory of its own, got an overlap with ids");
  const Tensor out = like(p.x);
  const Tensor y = like(p.y);
  expect_error([&] { moe_permute(p.x, s.src, y, 0); }, "moe_permute: k: expected at least 1, got 0");
  expect_error([&] { moe_permute(p.x, s.src, p.x, 2); }, "moe_permute: y: expected shape [8, 6], got [4, 6]");
  expect_error(
      [&] {
        moe_permute(p.x, integers({8}, {8, 0, 0, 0, 0, 0, 0, 0}), y, 2);
      },
      "moe_permute: src[0]: expected -1 or 0..7, got 8");
  const auto fwd = [&](const TensorView& pos, const TensorView& w, const TensorView& o, const std::string& text) {
    expect_error([&] { moe_unpermute_fwd(p.y, pos, w, o); }, "moe_unpermute_fwd: " + text);
  };
  fwd(integers({4, 2}, {0, 1, 2, 3, 4, 5, 6, 8}), p.weights, out, "pos[3,1]: expected -1 or 0..7, got 8");
  fwd(s.pos, sized(p.weights, 1, 1), out, "weights: expected shape [4, 2], got [4, 1]");
  fwd(s.pos, p.weights, typed(out, DType::kBF16), "out: expected dtype float32 (as y), got dtype bfloat16");
  fwd(s.pos, p.weights, part(p.y, 0, 0, 4), "out: expected memory of its own, got an overlap with y");
  const Gradients g{like(p.y), like(p.weights)};
  const auto bwd = [&](const TensorView& pos, const TensorView& dout, const std::string& text) {
    expect_error([&] { moe_unpermute_bwd(dout, p.y, pos, p.weights, g.dy, g.dweights); }, "moe_unpermute_bwd: " + text);
  };
  bwd(integers({4, 2}, {0, 1, 2, 3, 4, 5, 1, 7}), p.dout, "pos[3,0]: expected a place of its own, got 1 again");
  bwd(s.pos, sized(p.dout, 0, 3), "dout: expected shape [4, 6], got [3, 6]");
}

}  // namespace
}  // namespace tidegate::test
