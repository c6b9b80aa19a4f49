// Tasks of the forward that have several blocks of columns, whose rows are packed once, give the bits of tasks with
// one.
#include "ops/grouped_matmul/tasks.h"

#include "ops/moe_experts/test_case.h"

namespace tidegate::test {
namespace {

struct Threads {
  int before = num_threads();
  explicit Threads(int n) { set_num_threads(n); }
  ~Threads() { set_num_threads(before); }
};

// One thread takes as many blocks as a task may have, 16 threads leave one to each task (tasks_test.cpp of
// grouped_matmul).
void expect_same_bits(const Experts& c) {
  Random random;
  const ExpertsCase e = make_experts(random, c);
  const auto run = [&](int threads) {
    const Threads some(threads);
    return forward(e);
  };
  EXPECT_TRUE(same_bits(run(1), run(16)))
      << dtype_name(c.dtype) << " " << dtype_name(c.weight_type) << " rank " << c.rank << " turned " << c.turned;
}

TEST(MoeExpertsTasks, WideTasksHaveTheBitsOfNarrowOnes) {
  ASSERT_GT(grouped_matmul::blocks_per_task(20, 3, 1), 1);
  ASSERT_EQ(grouped_matmul::blocks_per_task(20, 3, 16), 1);
  for_each_isa([] {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const DType weight_type : {DType::kF32, DType::kBF16}) {
        for (const std::int64_t rank : {0, 3}) {
          expect_same_bits({90, 70, 300, 20, 2, 0, dtype, weight_type, false, {}, -1, 1, rank});
        }
      }
      expect_same_bits({90, 70, 300, 20, 2, 0, dtype, dtype, true, {}});
    }
    // Rows longer than what is packed at a time, and a shared expert with enough rows for wide tasks.
    expect_same_bits({40, 2100, 140, 20, 2, 0, DType::kBF16, DType::kBF16});
    expect_same_bits({2060, 24, 140, 20, 1, 140, DType::kBF16, DType::kBF16});
  });
}

}  // namespace
}  // namespace tidegate::test
