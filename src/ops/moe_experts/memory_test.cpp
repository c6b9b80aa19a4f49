// No path copies a weight: what a call takes besides its tensors is less than one matrix of one expert.
#include <thread>

#include "base/arena.h"
#include "ops/moe_experts/test_case.h"

namespace tidegate::test {
namespace {

constexpr std::size_t kMatrix = std::size_t{2048} * 1024 * 2;  // the smaller matrix of an expert below, bf16
constexpr std::size_t kPage = std::size_t{1} << 21;            // the arena grows in huge pages

// What the arena of a thread that does all the work holds afterwards.
std::size_t arena_after(const std::function<void()>& call) {
  std::size_t bytes = 0;
  const int threads = num_threads();
  set_num_threads(1);
  std::thread([&] {
    call();
    bytes = arena_capacity();
  }).join();
  set_num_threads(threads);
  return bytes;
}

TEST(MoeExperts, NoPathCopiesAWeight) {
  Random random;
  for (const bool turned : {false, true}) {
    for (const WeightAxes axes : {WeightAxes::kNK, WeightAxes::kKN}) {
      if (turned && axes == WeightAxes::kNK) {
        continue;
      }
      Experts c{40, 2048, 1024, 2, 2, 0, DType::kBF16, DType::kBF16, turned};
      c.options.weight_axes = axes;
      const ExpertsCase e = make_experts(random, c);
      EXPECT_LE(arena_after([&] { forward(e); }), kMatrix / 2 + kPage);
      ExpertsGradients g = empty_gradients(e);
      EXPECT_LE(arena_after([&] { moe_experts_bwd(e.dout, e.inputs(), g.views(e), c.options); }), kMatrix / 2 + kPage);
    }
  }
}

// Weights of another type are converted a tile at a time.
TEST(MoeExperts, NoPathConvertsAWeight) {
  Random random;
  const ExpertsCase e = make_experts(random, {8, 2048, 1024, 2, 1, 0, DType::kBF16, DType::kF32});
  EXPECT_LE(arena_after([&] { forward(e); }), kMatrix / 2 + kPage);
  EXPECT_LE(arena_after([&] { backward(e); }), kMatrix / 2 + kPage);
}

}  // namespace
}  // namespace tidegate::test
