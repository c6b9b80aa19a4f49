// grouped_matmul_fwd and _bwd.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>

#include "ops/grouped_matmul/reference.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

using Counts = std::vector<std::int64_t>;

// How a weight lies in memory, and what the caller calls its axes.
enum class Lies { kAsStored, kTransposedView, kTurned };
constexpr Lies kAllWays[] = {Lies::kAsStored, Lies::kTransposedView, Lies::kTurned};

struct Case {
  Tensor x, weight, bias, dy;
  Tensor groups;
  Lies lies;
  GroupedMatmulOptions options;
  std::int64_t M, N, K, G;
};
Tensor integers(const Counts& list, DType dtype = DType::kI64) {
  Tensor t(dtype, {static_cast<std::int64_t>(list.size())});
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (dtype == DType::kI64) {
      t.view().as<std::int64_t>()[i] = list[i];
    } else {
      t.view().as<std::int32_t>()[i] = static_cast<std::int32_t>(list[i]);
    }
  }
  return t;
}
// The view that the operator gets. Values are those of [G,N,K] in every case.
TensorView weight_view(const Case& c, const Tensor& w) {
  return c.lies == Lies::kAsStored ? w.view() : exchanged(w, 1, 2);
}
Form weight_form(Lies lies, std::int64_t gap = 0) {
  return lies == Lies::kTurned ? permuted({0, 2, 1}, gap) : padded(gap);
}
Case make_case(Random& random, const Counts& counts, std::int64_t N, std::int64_t K, Lies lies, DType dtype,
               DType weight_type, std::int64_t gap = 0) {
  Case c;
  c.G = static_cast<std::int64_t>(counts.size());
  c.M = std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) + 2;  // two rows of nobody
  c.N = N;
  c.K = K;
  c.lies = lies;
  c.options.weight_axes = lies == Lies::kAsStored ? WeightAxes::kNK : WeightAxes::kKN;
  c.x = normal(random, dtype, {c.M, K}, padded(gap));
  c.weight = normal(random, weight_type, {c.G, N, K}, weight_form(lies, gap), 0.1);
  c.bias = normal(random, weight_type, {c.G, N});
  c.dy = normal(random, dtype, {c.M, N}, padded(gap));
  c.groups = integers(counts);
  return c;
}
Case wide(const Case& c) {
  Case w = c;
  for (Tensor* t : {&w.x, &w.weight, &w.bias, &w.dy}) {
    *t = wide(*t);
  }
  w.lies = c.lies == Lies::kTurned ? Lies::kTransposedView : c.lies;
  return w;
}
Tensor forward(const Case& c, DType y_type) {
  Tensor y(y_type, {c.M, c.N});
  grouped_matmul_fwd(c.x, weight_view(c, c.weight), c.groups, c.bias, y, c.options);
  return y;
}
Tensor forward(const Case& c) { return forward(c, c.x.view().dtype); }
struct Gradients {
  Tensor dx, dweight, dbias;
};
Gradients empty_gradients(const Case& c) {
  return {like(c.x), Tensor(c.weight.view().dtype, {c.G, c.N, c.K}, weight_form(c.lies)), like(c.bias)};
}
Gradients backward(const Case& c) {
  Gradients g = empty_gradients(c);
  grouped_matmul_bwd(c.dy, c.x, weight_view(c, c.weight), c.groups, g.dx, weight_view(c, g.dweight), g.dbias,
                     c.options);
  return g;
}
std::vector<std::int64_t> offsets_of(const Case& c) {
  std::vector<std::int64_t> offsets{0};
  for (const double count : values(c.groups)) {
    offsets.push_back(offsets.back() + static_cast<std::int64_t>(count));
  }
  return offsets;
}
TensorView used(const Case& c, const Tensor& t) { return part(t, 0, 0, c.M - 2); }

void expect_accurate(const std::vector<Case>& cases, DType dtype, DType weight_type) {
  std::map<Isa, Accuracy> y, dx, dw, db;
  for (const Case& c : cases) {
    const Case w = wide(c);
    const Tensor truth = forward(w);
    const Gradients truth_g = backward(w);
    Tensor plain = like(c.dy);
    Gradients plain_g = empty_gradients(c);
    const auto offsets = offsets_of(c);
    grouped_matmul::reference_fwd<float>(c.x, weight_view(c, c.weight), offsets.data(), c.bias, plain,
                                         c.options.weight_axes);
    grouped_matmul::reference_bwd<float>(c.dy, c.x, weight_view(c, c.weight), offsets.data(), c.G, plain_g.dx,
                                         weight_view(c, plain_g.dweight), plain_g.dbias, c.options);
    for_each_isa([&] {
      const Tensor got = forward(c);
      y[active_isa()].add(used(c, got), used(c, plain), used(c, truth), 5e-7);
      EXPECT_TRUE(std::isnan(got.get((c.M - 1) * c.N))) << "a row outside all groups was written";
      const Gradients g = backward(c);
      dx[active_isa()].add(used(c, g.dx), used(c, plain_g.dx), used(c, truth_g.dx), 5e-7);
      dw[active_isa()].add(g.dweight, plain_g.dweight, truth_g.dweight, 5e-7);
      db[active_isa()].add(g.dbias, plain_g.dbias, truth_g.dbias, 5e-7);
    });
  }
  for (const auto& [isa, a] : y) {
    a.expect("y", stored(dtype, 5e-7));
    dx.at(isa).expect("dx", stored(dtype, 5e-7));
    dw.at(isa).expect("dweight", stored(weight_type, 5e-7));
    db.at(isa).expect("dbias", stored(weight_type, 5e-7));
  }
}

TEST(GroupedMatmul, MatchesFp64) {
  const Counts counts = {3, 0, 1, 70, 14, 2, 0};
  for (const DType dtype : kKernelTypes) {
    for (const DType weight_type : {dtype, DType::kF32}) {
      Random random;
      std::vector<Case> cases;
      for (const Lies lies : kAllWays) {
        cases.push_back(make_case(random, counts, 37, 83, lies, dtype, weight_type, 1));
        cases.push_back(make_case(random, {5, 20}, 130, 517, lies, dtype, weight_type));
        cases.push_back(make_case(random, {1, 33}, 1, 16, lies, dtype, weight_type));
        cases.push_back(make_case(random, {2, 13}, 48, 1, lies, dtype, weight_type));
      }
      expect_accurate(cases, dtype, weight_type);
    }
  }
}

TEST(GroupedMatmul, ReferenceIsTheDefinitionAndItsDerivative) {
  Random random;
  for (const Lies lies : {Lies::kAsStored, Lies::kTransposedView}) {
    Case c = wide(make_case(random, {2, 0, 3}, 4, 3, lies, DType::kF32, DType::kF32));
    const Tensor y = forward(c);
    double want = c.bias.get(2 * 4 + 1);
    for (std::int64_t k = 0; k < 3; ++k) {
      want += c.x.get(4 * 3 + k) * c.weight.get((2 * 4 + 1) * 3 + k);
    }
    EXPECT_NEAR(y.get(4 * 4 + 1), want, 1e-13);
    const Gradients g = backward(c);
    const auto loss = [&] { return dot(copied(used(c, forward(c))), copied(used(c, c.dy))); };
    Tensor dx = g.dx;
    for (std::int64_t i = 5 * 3; i < 7 * 3; ++i) {
      dx.set(i, 0.0);  // rows of nobody
    }
    expect_gradient(c.x, dx, loss);
    expect_gradient(c.weight, g.dweight, loss);
    expect_gradient(c.bias, g.dbias, loss);
  }
}

// A row has its bits alone, among others, for any number of threads and in either memory order of the weight.
TEST(GroupedMatmul, RowsAndThreadsDoNotMatter) {
  for (const DType dtype : kKernelTypes) {
    for (const Lies lies : kAllWays) {
      Random random;
      const Case all = make_case(random, {70}, 150, 300, lies, dtype, dtype);
      for_each_isa([&] {
        const Tensor y = forward(all);
        const Gradients g = backward(all);
        for (const std::int64_t rows : {1, 2, 3, 4, 5, 6, 7, 13, 64, 65}) {
          for (const std::int64_t first : {std::int64_t{0}, 70 - rows}) {
            Case some = all;
            some.M = rows;
            some.x = copied(part(all.x, 0, first, first + rows));
            some.dy = copied(part(all.dy, 0, first, first + rows));
            some.groups = integers({rows});
            EXPECT_TRUE(same_bits(forward(some), part(y, 0, first, first + rows))) << rows;
            EXPECT_TRUE(same_bits(backward(some).dx, part(g.dx, 0, first, first + rows))) << rows;
          }
        }
        for_each_thread_count([&] {
          EXPECT_TRUE(same_bits(used(all, forward(all)), used(all, y)));
          const Gradients again = backward(all);
          EXPECT_TRUE(same_bits(used(all, again.dx), used(all, g.dx)));
          EXPECT_TRUE(same_bits(again.dweight, g.dweight));
        });
      });
    }
  }
}

// Sums so long that they are taken in stretches, and columns that are no whole tile.
void expect_rows_do_not_matter(std::int64_t inner) {
  Random random;
  const Case all = make_case(random, {20}, 43, inner, Lies::kAsStored, DType::kBF16, DType::kBF16);
  const Tensor truth = forward(wide(all));
  Tensor plain = like(all.dy);
  grouped_matmul::reference_fwd<float>(all.x, all.weight, offsets_of(all).data(), all.bias, plain,
                                       all.options.weight_axes);
  for_each_isa([&] {
    const Tensor y = forward(all);
    Accuracy a;
    a.add(used(all, y), used(all, plain), used(all, truth), 5e-7);
    a.expect("y", stored(DType::kBF16, 5e-7));
    for (const std::int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 19}) {
      Case some = all;
      some.M = rows;
      some.x = copied(part(all.x, 0, 0, rows));
      some.groups = integers({rows});
      EXPECT_TRUE(same_bits(forward(some), part(y, 0, 0, rows))) << rows << " rows, " << inner;
    }
  });
}

// In stretches of 2048, up to four of them a column after the other.
TEST(GroupedMatmul, RowsDoNotMatterToLongSums) {
  for (const std::int64_t stretches : {2, 5}) {
    expect_rows_do_not_matter(stretches * 2048 + 37);
  }
}

TEST(GroupedMatmul, OptionsAndNeeds) {
  Random random;
  const Case c = make_case(random, {4, 0, 9}, 20, 40, Lies::kTurned, DType::kBF16, DType::kF32);
  for_each_isa([&] {
    const Tensor y = forward(c);
    Case sums = c;
    sums.groups = integers({4, 4, 13});
    sums.options.group_list = GroupList::kCumsum;
    EXPECT_TRUE(same_bits(used(c, forward(sums)), used(c, y)));
    const Tensor exact = forward(c, DType::kF32);
    EXPECT_TRUE(same_bits(converted(copied(used(c, exact)), DType::kBF16), used(c, y)));
    const Gradients g = backward(c);
    Gradients one = empty_gradients(c);
    grouped_matmul_bwd(c.dy, {}, weight_view(c, c.weight), c.groups, one.dx, {}, {}, c.options);
    EXPECT_TRUE(same_bits(used(c, one.dx), used(c, g.dx)));
    grouped_matmul_bwd(c.dy, c.x, {}, c.groups, {}, weight_view(c, one.dweight), {}, c.options);
    EXPECT_TRUE(same_bits(one.dweight, g.dweight));
    for (std::int64_t i = 0; i < c.N * c.K; ++i) {
      ASSERT_EQ(g.dweight.get(c.N * c.K + i), 0.0);  // the empty group
    }
    GroupedMatmulOptions adding = c.options;
    adding.accumulate = true;
    grouped_matmul_bwd(c.dy, c.x, {}, c.groups, {}, weight_view(c, one.dweight), {}, adding);
    for (std::int64_t i = 0; i < one.dweight.view().numel(); ++i) {
      ASSERT_EQ(one.dweight.get(i), 2.0 * g.dweight.get(i));
    }
  });
}

TEST(GroupedMatmul, RowsByPointer) {
  Random random;
  const Case c = make_case(random, {3, 0, 14}, 20, 36, Lies::kAsStored, DType::kBF16, DType::kBF16);
  Tensor want = like(c.dy).fill(0.0);
  Tensor got = like(c.dy).fill(0.0);
  grouped_matmul_fwd(c.x, c.weight, c.groups, c.bias, want, c.options);
  std::vector<Tensor> rows;  // each on a page of its own
  std::vector<const void*> pointers;
  for (std::int64_t j = 0; j < c.M; ++j) {
    rows.push_back(copied(part(c.x, 0, j, j + 1)));
    pointers.push_back(rows.back().view().data);
  }
  GroupedMatmulOptions options = c.options;
  options.x_rows = pointers.data();
  TensorView nowhere = c.x;
  nowhere.data = nullptr;
  grouped_matmul_fwd(nowhere, c.weight, c.groups, c.bias, got, options);
  EXPECT_TRUE(same_bits(got, want));
}

TEST(GroupedMatmul, NaNStaysInItsRow) {
  Random random;
  Case c = make_case(random, {20}, 24, 50, Lies::kAsStored, DType::kBF16, DType::kBF16);
  for_each_isa([&] {
    const Tensor clean = forward(c);
    Case bad = c;
    bad.x.set(7 * 50 + 49, std::nan(""));
    const Tensor y = forward(bad);
    for (std::int64_t j = 0; j < 20; ++j) {
      EXPECT_EQ(j != 7, bool(same_bits(part(y, 0, j, j + 1), part(clean, 0, j, j + 1))));
    }
  });
}

TEST(GroupedMatmul, Errors) {
  Random random;
  const Case c = make_case(random, {2, 1}, 4, 8, Lies::kAsStored, DType::kF32, DType::kF32);
  const Tensor y(DType::kF32, {5, 4});
  const auto fwd = [&](const TensorView& x, const TensorView& w, const TensorView& groups, const TensorView& bias,
                       const TensorView& out, const std::string& text, GroupedMatmulOptions o = {}) {
    expect_error([&] { grouped_matmul_fwd(x, w, groups, bias, out, o); }, "grouped_matmul_fwd: " + text);
  };
  fwd(ranked(c.x, 1), c.weight, c.groups, c.bias, y, "x: expected 2 dimensions, got 1 in [5]");
  fwd(c.x, c.weight, c.groups, c.bias, y, "weight: expected shape [2, 8, 8], got [2, 4, 8]", {WeightAxes::kKN});
  fwd(c.x, strided(strided(c.weight, 2, 2), 1, 16), c.groups, c.bias, y,
      "weight: expected stride 1 in one of the last two dimensions, got 16 and 2");
  fwd(c.x, typed(c.weight, DType::kF64), c.groups, c.bias, y,
      "weight: expected dtype float32, bfloat16 or float16, got dtype float64");
  fwd(c.x, c.weight, integers({2, -1}), c.bias, y, "groups[1]: expected >= 0, got -1");
  fwd(c.x, c.weight, integers({2, 4}), c.bias, y, "groups[1]: expected <= 3 (of 5 rows), got 4");
  fwd(c.x, c.weight, integers({3, 2}), c.bias, y, "groups[1]: expected >= 3, got 2",
      {WeightAxes::kNK, GroupList::kCumsum});
  fwd(c.x, c.weight, integers({3, 6}, DType::kI32), c.bias, y, "groups[1]: expected <= 5 (of 5 rows), got 6",
      {WeightAxes::kNK, GroupList::kCumsum});
  fwd(c.x, c.weight, integers({3}), c.bias, y, "groups: expected shape [2], got [1]");
  fwd(c.x, c.weight, typed(c.groups, DType::kF32), c.bias, y,
      "groups: expected dtype int32 or int64, got dtype float32");
  fwd(c.x, c.weight, c.groups, sized(c.bias, 1, 3), y, "bias: expected shape [2, 4], got [2, 3]");
  fwd(c.x, c.weight, c.groups, c.bias, typed(y, DType::kBF16), "y: expected dtype float32 (as x), got dtype bfloat16");
  fwd(c.x, c.weight, c.groups, c.bias, part(c.x, 1, 0, 4), "y: expected memory of its own, got an overlap with x");
  const Gradients g = empty_gradients(c);
  const auto bwd = [&](const TensorView& dy, const TensorView& x, const TensorView& w, const TensorView& dx,
                       const TensorView& dw, const std::string& text) {
    expect_error([&] { grouped_matmul_bwd(dy, x, w, c.groups, dx, dw, {}); }, "grouped_matmul_bwd: " + text);
  };
  bwd(c.dy, c.x, {}, g.dx, g.dweight, "weight: expected a tensor, got none");
  bwd(c.dy, {}, c.weight, g.dx, g.dweight, "x: expected a tensor, got none");
  bwd(c.dy, sized(c.x, 0, 4), c.weight, g.dx, g.dweight, "x: expected shape [5, 8], got [4, 8]");
  bwd(c.dy, c.x, c.weight, g.dx, sized(g.dweight, 1, 3), "dweight: expected shape [2, 4, 8], got [2, 3, 8]");
  bwd(c.dy, c.x, c.weight, g.dx, c.weight, "dweight: expected memory of its own, got an overlap with weight");
}

}  // namespace
}  // namespace tidegate::test
