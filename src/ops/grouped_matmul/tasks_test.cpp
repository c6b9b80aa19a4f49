// How products are cut into tasks, and that the cut changes nothing.
#include "ops/grouped_matmul/tasks.h"

#include <gtest/gtest.h>

#include <vector>

#include "toolkit.h"

namespace tidegate::test {
namespace {

using grouped_matmul::blocks_per_task;
using grouped_matmul::BlockTasks;
using grouped_matmul::kBlockColumns;

TEST(GroupedMatmulTasks, ColumnBlocksOfATask) {
  EXPECT_EQ(blocks_per_task(8, 64, 2), 8);
  EXPECT_EQ(blocks_per_task(8, 28, 2), 8);
  EXPECT_EQ(blocks_per_task(8, 8, 2), 2);  // 32 tasks for two threads
  EXPECT_EQ(blocks_per_task(8, 64, 16), 2);
  EXPECT_EQ(blocks_per_task(1, 48, 2), 1);  // few rows: nothing to pack, every block is needed
  EXPECT_EQ(blocks_per_task(0, 0, 2), 1);
}

// One thread: tasks of several blocks are formed whatever the machine has.
struct OneThread {
  int before = num_threads();
  OneThread() { set_num_threads(1); }
  ~OneThread() { set_num_threads(before); }
};

TEST(GroupedMatmulTasks, EveryElementOnce) {
  const OneThread one;
  const std::int64_t offsets[] = {0, 300, 300, 301, 1000};
  constexpr std::int64_t kColumns = 1100;
  for (const bool runs : {false, true}) {
    Scratch scratch;
    const BlockTasks tasks(offsets, 4, kColumns, scratch, runs);
    std::vector<int> seen(1000 * kColumns, 0);
    bool wide = false;
    for (std::int64_t i = 0; i < tasks.count(); ++i) {
      const BlockTasks::Task t = tasks[i];
      wide = wide || t.columns > kBlockColumns;
      EXPECT_TRUE(t.row >= offsets[t.group] && t.row + t.rows <= offsets[t.group + 1]);
      for (std::int64_t r = t.row; r < t.row + t.rows; ++r) {
        for (std::int64_t c = t.column; c < t.column + t.columns; ++c) {
          ++seen[static_cast<std::size_t>(r * kColumns + c)];
        }
      }
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), 1000 * kColumns);
    EXPECT_EQ(wide, runs);
  }
}

// Rows that stay packed for the next columns give the bits of a call for these columns alone.
TEST(GroupedMatmulTasks, ColumnsDoNotKnowOfEachOther) {
  const OneThread one;
  ASSERT_GT(blocks_per_task(5, 9, parallel_threads()), 1);
  for_each_isa([] {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const std::int64_t K : {70, 2100}) {  // one stretch of packed rows, and several
        constexpr std::int64_t M = 640, N = 1030;
        Random random;
        const Tensor x = normal(random, dtype, {M, K}), weight = normal(random, dtype, {1, N, K});
        const Tensor bias = normal(random, dtype, {1, N}), y(dtype, {M, N});
        Tensor groups(DType::kI64, {1});
        groups.view().as<std::int64_t>()[0] = M;
        grouped_matmul_fwd(x, weight, groups, bias, y);
        for (const std::int64_t first : {0, 128, 256, 896, 1024}) {
          const std::int64_t last = std::min(first + kBlockColumns, N);
          const Tensor alone(dtype, {M, last - first});
          grouped_matmul_fwd(x, part(weight, 1, first, last), groups, part(bias, 1, first, last), alone);
          EXPECT_TRUE(same_bits(alone, part(y, 1, first, last))) << first;
        }
      }
    }
  });
}

}  // namespace
}  // namespace tidegate::test
