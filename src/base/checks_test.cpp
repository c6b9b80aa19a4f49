#include "base/checks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

namespace tidegate {
namespace {

float buffer[4096];

// A view into `buffer`, offset and strides in elements of the type.
TensorView view(std::int64_t offset, const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides,
                DType dtype = DType::kF32) {
  TensorView t;
  t.data = reinterpret_cast<char*>(buffer) + offset * dtype_bytes(dtype);
  t.dtype = dtype;
  t.rank = static_cast<int>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), t.sizes);
  std::copy(strides.begin(), strides.end(), t.strides);
  return t;
}

template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

// Both orders must say the same.
bool overlap(const TensorView& a, const TensorView& b) {
  EXPECT_EQ(may_overlap(a, b), may_overlap(b, a));
  return may_overlap(a, b);
}

TEST(MayOverlap, DisjointRanges) {
  EXPECT_FALSE(overlap(view(0, {4, 8}, {8, 1}), view(32, {4, 8}, {8, 1})));
  EXPECT_TRUE(overlap(view(0, {4, 8}, {8, 1}), view(31, {4, 8}, {8, 1})));
  EXPECT_TRUE(overlap(view(0, {4, 8}, {8, 1}), view(0, {4, 8}, {8, 1})));
}

TEST(MayOverlap, AbsentAndEmptyOverlapNothing) {
  const TensorView all = view(0, {64}, {1});
  EXPECT_FALSE(overlap(all, TensorView{}));
  EXPECT_FALSE(overlap(all, view(0, {0, 8}, {8, 1})));
  EXPECT_FALSE(overlap(TensorView{}, TensorView{}));
  EXPECT_TRUE(overlap(all, view(5, {}, {})));  // a scalar
}

TEST(MayOverlap, ColumnSlicesOfOneBuffer) {
  const TensorView q = view(0, {6, 4}, {12, 1});
  const TensorView k = view(4, {6, 4}, {12, 1});
  const TensorView v = view(8, {6, 4}, {12, 1});
  EXPECT_FALSE(overlap(q, k));
  EXPECT_FALSE(overlap(k, v));
  EXPECT_FALSE(overlap(q, v));
  EXPECT_TRUE(overlap(q, view(3, {6, 4}, {12, 1})));   // one column shared
  EXPECT_TRUE(overlap(q, view(10, {6, 4}, {12, 1})));  // runs into the next row
  EXPECT_TRUE(overlap(q, view(4, {6, 4}, {11, 1})));   // another pitch
}

TEST(MayOverlap, ASingleRowAgainstASlice) {
  EXPECT_FALSE(overlap(view(28, {1, 4}, {99, 1}), view(0, {6, 4}, {12, 1})));
  EXPECT_TRUE(overlap(view(24, {1, 4}, {99, 1}), view(0, {6, 4}, {12, 1})));
}

TEST(MayOverlap, InterleavedHeads) {
  // [T=3, H=2, 2, D=4]: the even and the odd blocks of every head.
  EXPECT_FALSE(overlap(view(0, {3, 2, 4}, {16, 8, 1}), view(4, {3, 2, 4}, {16, 8, 1})));
  EXPECT_TRUE(overlap(view(0, {3, 2, 4}, {16, 8, 1}), view(8, {3, 2, 4}, {16, 8, 1})));
}

TEST(MayOverlap, TransposedViewsOfOneBuffer) {
  EXPECT_TRUE(overlap(view(0, {8, 8}, {8, 1}), view(0, {8, 8}, {1, 8})));
  EXPECT_TRUE(overlap(view(0, {4, 8}, {8, 1}), view(7, {8, 4}, {1, 8})));
  EXPECT_FALSE(overlap(view(0, {4, 6}, {12, 1}), view(6, {6, 4}, {1, 12})));  // columns apart, one of them transposed
}

TEST(MayOverlap, NegativeStrides) {
  EXPECT_TRUE(overlap(view(56, {8, 8}, {-8, 1}), view(0, {8, 8}, {8, 1})));
  EXPECT_FALSE(overlap(view(56, {8, 8}, {-8, 1}), view(64, {8, 8}, {8, 1})));
  EXPECT_FALSE(overlap(view(60, {6, 4}, {-12, 1}), view(4, {6, 4}, {12, 1})));  // rows upwards, columns apart
  EXPECT_TRUE(overlap(view(60, {6, 4}, {-12, 1}), view(3, {6, 4}, {12, 1})));
  EXPECT_FALSE(overlap(view(3, {6, 4}, {12, -1}), view(4, {6, 4}, {12, 1})));  // columns backwards
}

TEST(MayOverlap, CountsBytesNotElements) {
  EXPECT_FALSE(overlap(view(0, {4, 8}, {8, 1}, DType::kBF16), view(16, {4, 8}, {8, 1}, DType::kF32)));
  EXPECT_TRUE(overlap(view(0, {4, 8}, {8, 1}, DType::kF32), view(32, {4, 8}, {8, 1}, DType::kBF16)));
  EXPECT_FALSE(overlap(view(0, {4, 4}, {8, 1}, DType::kF32), view(8, {4, 8}, {16, 1}, DType::kBF16)));
  EXPECT_TRUE(overlap(view(0, {4, 5}, {8, 1}, DType::kF32), view(8, {4, 8}, {16, 1}, DType::kBF16)));
}

// Every small pair of views: "no overlap" is only ever said where no element is shared.
TEST(MayOverlap, NeverMissesASharedElement) {
  std::vector<TensorView> views;
  for (const std::int64_t offset : {20, 21, 23, 26}) {
    for (const std::int64_t n : {1, 2, 3}) {
      for (const std::int64_t outer : {-6, -1, 0, 2, 4, 6}) {
        for (const std::int64_t inner : {-2, 1, 3, 6}) {
          views.push_back(view(offset, {n, 3}, {outer, inner}));
        }
      }
    }
  }
  const auto elements = [](const TensorView& t) {
    std::set<const float*> set;
    for (std::int64_t i = 0; i < t.sizes[0] * t.sizes[1]; ++i) {
      set.insert(t.as<float>() + i / t.sizes[1] * t.strides[0] + i % t.sizes[1] * t.strides[1]);
    }
    return set;
  };
  std::vector<std::set<const float*>> sets;
  for (const TensorView& t : views) {
    sets.push_back(elements(t));
  }
  for (std::size_t i = 0; i < views.size(); ++i) {
    for (std::size_t j = 0; j < views.size(); ++j) {
      bool shared = false;
      for (const float* p : sets[i]) {
        shared |= sets[j].count(p) > 0;
      }
      ASSERT_TRUE(!shared || may_overlap(views[i], views[j])) << i << " " << j;
    }
  }
}

TEST(CheckOutputs, AcceptsMemoryOfTheirOwn) {
  const TensorView x = view(0, {6, 4}, {12, 1});
  const TensorView y = view(4, {6, 4}, {12, 1});
  const TensorView z = view(68, {4, 6}, {-1, 12});
  const TensorView w = view(0, {5, 4}, {0, 1});  // an input may repeat
  EXPECT_NO_THROW(check_outputs("op", {{"y", y}, {"z", view(200, {4, 6}, {1, 4})}, {"s", TensorView{}}}, {{"x", x}}));
  EXPECT_NO_THROW(check_outputs("op", {{"y", y}, {"one", view(300, {1, 4}, {0, 1})}}, {{"w", w}, {"x", x}}));
  EXPECT_NO_THROW(check_outputs("op", {{"z", z}}, {{"y", view(200, {3}, {1})}}));
  EXPECT_NO_THROW(check_outputs("op", {{"none", view(0, {0, 4}, {0, 1})}}, {{"x", x}}));
}

TEST(CheckOutputs, Violations) {
  const TensorView x = view(0, {6, 4}, {12, 1});
  const auto outputs_error = [&](const TensorView& y, const TensorView& z) {
    return error_of([&] { check_outputs("op", {{"y", y}, {"z", z}}, {{"x", x}}); });
  };
  EXPECT_EQ(outputs_error(view(2, {6, 4}, {12, 1}), TensorView{}),
            "op: y: expected memory of its own, got an overlap with x");
  EXPECT_EQ(outputs_error(view(100, {6, 4}, {4, 1}), view(110, {2}, {1})),
            "op: z: expected memory of its own, got an overlap with y");
  EXPECT_EQ(outputs_error(view(100, {3, 6, 4}, {24, 0, 1}), TensorView{}),
            "op: y: expected an output without repeated elements, got stride 0 in dimension 1");
  EXPECT_EQ(outputs_error(view(100, {6, 4}, {3, 1}), TensorView{}),
            "op: y: expected an output without repeated elements, got stride 3 in dimension 0");
  EXPECT_EQ(outputs_error(view(100, {3, 3}, {1, 1}), TensorView{}),
            "op: y: expected an output without repeated elements, got stride 1 in dimension 1");
  EXPECT_EQ(outputs_error(view(100, {4, 6}, {1, -2}), TensorView{}),
            "op: y: expected an output without repeated elements, got stride -2 in dimension 1");
}

TEST(Checks, TypesShapesAndStrides) {
  const TensorView x = view(0, {2, 3}, {3, 1});
  const TensorView h = view(0, {2, 3}, {3, 1}, DType::kBF16);
  const TensorView i = view(0, {2, 3}, {3, 1}, DType::kI32);
  const TensorView t = view(0, {3, 2}, {1, 3});
  EXPECT_NO_THROW(check_data_type("op", {"h", h}));
  EXPECT_EQ(error_of([&] {
              check_data_type("op", {"i", i});
            }),
            "op: i: expected dtype float32, bfloat16, float16 or float64, got dtype int32");
  EXPECT_THROW(check_float("op", {"i", i}), Error);
  EXPECT_EQ(error_of([&] {
              check_dtype("op", {"h", h}, DType::kF32);
            }),
            "op: h: expected dtype float32, got dtype bfloat16");
  EXPECT_EQ(error_of([&] {
              check_same_dtype("op", {"h", h}, {"x", x});
            }),
            "op: h: expected dtype float32 (as x), got dtype bfloat16");
  EXPECT_EQ(error_of([&] { check_present("op", {"x", TensorView{}}); }), "op: x: expected a tensor, got none");
  EXPECT_EQ(error_of([&] { check_rank("op", {"x", x}, 3); }), "op: x: expected 3 dimensions, got 2 in [2, 3]");
  EXPECT_EQ(error_of([&] { check_rank("op", {"x", TensorView{}}, 0); }), "op: x: expected a tensor, got none");
  EXPECT_NO_THROW(check_shape("op", {"x", x}, {2, 3}));
  EXPECT_EQ(error_of([&] { check_shape("op", {"x", x}, {2, 4}); }), "op: x: expected shape [2, 4], got [2, 3]");
  EXPECT_EQ(error_of([&] { check_shape("op", {"x", x}, {2}); }), "op: x: expected shape [2], got [2, 3]");
  EXPECT_NO_THROW(check_same_shape("op", {"h", h}, {"x", x}));
  EXPECT_EQ(error_of([&] {
              check_same_shape("op", {"t", t}, {"x", x});
            }),
            "op: t: expected shape [2, 3] (as x), got [3, 2]");
}

TEST(Checks, InnerStride) {
  EXPECT_EQ(error_of([&] {
              check_inner_stride("op", {"t", view(0, {3, 2}, {1, 3})});
            }),
            "op: t: expected inner stride 1, got 3");
  EXPECT_NO_THROW(check_inner_stride("op", {"x", view(0, {3, 2}, {-2, 1})}));
  EXPECT_NO_THROW(check_inner_stride("op", {"column", view(0, {3, 1}, {5, 5})}));
  EXPECT_NO_THROW(check_inner_stride("op", {"empty", view(0, {0, 2}, {1, 3})}));
  EXPECT_NO_THROW(check_inner_stride("op", {"scalar", view(0, {}, {})}));
  EXPECT_NO_THROW(check_inner_stride("op", {"absent", TensorView{}}));
}

}  // namespace
}  // namespace tidegate
