#include <gtest/gtest.h>

#include "base/row_checks.h"
#include "base/row_views.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

// The merged leading dimensions.
Sizes merged(const TensorView& t, int leading) {
  const Rows rows = rows_of(t, leading);
  Sizes out;
  for (int d = 0; d < rows.rank; ++d) {
    out.push_back(rows.sizes[d]);
    out.push_back(rows.strides[d]);
  }
  return out;
}

// Every row of t at its place.
void expect_places(const TensorView& t) {
  const Rows rows = rows_of(t);
  for (std::int64_t r = 0; r < row_count(t); ++r) {
    ASSERT_EQ(row_offset(rows, r), offset_at(t, r * t.size(-1))) << r;
  }
}

TEST(Rows, NeighboursThatStepEvenlyAreOne) {
  const Tensor dense(DType::kF32, {2, 3, 4, 5});
  EXPECT_EQ(merged(dense, 3), (Sizes{24, 5}));
  const Tensor ragged(DType::kF32, {2, 3, 4, 5}, padded(1));
  EXPECT_EQ(merged(ragged, 3), (Sizes{2, 76, 3, 25, 4, 6}));
  const Tensor heads(DType::kF32, {2, 3, 4, 5}, permuted({0, 2, 1, 3}));
  EXPECT_EQ(merged(heads, 3), (Sizes{2, 60, 3, 5, 4, 15}));
  const Tensor swapped(DType::kF32, {2, 3, 4, 5}, permuted({2, 0, 1, 3}));
  EXPECT_EQ(merged(swapped, 3), (Sizes{6, 5, 4, 30}));
  const Tensor backwards(DType::kF32, {2, 3, 5}, reversed(0));
  EXPECT_EQ(merged(backwards, 2), (Sizes{6, -5}));
  const Tensor ones(DType::kF32, {1, 3, 1, 5}, padded(7));  // dimensions of one element do not stand in the way
  EXPECT_EQ(merged(ones, 3), (Sizes{3, 19}));
  EXPECT_EQ(merged(Tensor(DType::kF32, {5}), 0), Sizes{});
  EXPECT_EQ(merged(strided(dense, 1, 0), 3), (Sizes{2, 60, 3, 0, 4, 5}));
  EXPECT_EQ(rows_of(TensorView{}).data, nullptr);
}

TEST(Rows, EveryRowIsAtItsPlace) {
  for (const Form& form : {Form{}, padded(1), reversed(), permuted({2, 1, 0, 3}), permuted({1, 0, 2, 3}, 2)}) {
    expect_places(Tensor(DType::kF32, {2, 3, 4, 5}, form));
    expect_places(Tensor(DType::kF32, {1, 3, 1, 5}, form));
  }
  expect_places(Tensor(DType::kF32, {5}));
  expect_places(strided(Tensor(DType::kF32, {4, 5}), 0, 0));
}

TEST(Rows, Counts) {
  EXPECT_EQ(row_count(Tensor(DType::kF32, {2, 3, 4, 5})), 24);
  EXPECT_EQ(row_count(Tensor(DType::kF32, {5})), 1);
  EXPECT_EQ(row_count(Tensor(DType::kF32, {2, 0, 5})), 0);
}

// About 32 Ki elements a task, whatever the number of rows or threads.
TEST(Rows, TasksDependOnTheWidthOnly) {
  EXPECT_EQ(rows_per_task(128), 256);
  EXPECT_EQ(rows_per_task(0), 1024);
  EXPECT_EQ(rows_per_task(1), 1024);
  EXPECT_EQ(rows_per_task(33), 992);
  EXPECT_EQ(rows_per_task(32768), 1);
  EXPECT_EQ(rows_per_task(1000000), 1);
  EXPECT_EQ(task_count(0, 256), 0);
  EXPECT_EQ(task_count(256, 256), 1);
  EXPECT_EQ(task_count(257, 256), 2);
}

TEST(Rows, OnlyLargeAlignedOutputsAreStreamed) {
  const auto streams = [](std::uintptr_t address, std::int64_t rows, std::int64_t width, std::int64_t pitch) {
    return should_stream_rows(
        strided(contiguous(reinterpret_cast<const void*>(address), DType::kBF16, {rows, width}), 0, pitch));
  };
  EXPECT_TRUE(streams(4096, 131072, 128, 128));
  EXPECT_FALSE(streams(4096, 65536, 128, 128));  // 16 MB: may stay in the cache
  EXPECT_TRUE(streams(4096, 65537, 128, 128));
  EXPECT_TRUE(streams(4096, 131072, 128, -160));
  EXPECT_FALSE(streams(4096 + 32, 131072, 128, 128));
  EXPECT_FALSE(streams(4096, 131072, 120, 128));
  EXPECT_FALSE(streams(4096, 131072, 128, 136));
}

}  // namespace
}  // namespace tidegate::test
