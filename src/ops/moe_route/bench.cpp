// The router of 2048 tokens: 8 of 256 experts.
#include <benchmark/benchmark.h>

#include "ops/bench_data.h"
#include "tidegate/moe.h"

namespace tidegate {
namespace {

constexpr std::int64_t kTokens = 2048, kExperts = 256, kSlots = 8;

void forward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor logits(DType::kBF16, {kTokens, kExperts});
  const BenchTensor weights(DType::kBF16, {kTokens, kSlots});
  const BenchTensor room(DType::kF32, {kTokens, kSlots});
  TensorView ids = room;
  ids.dtype = DType::kI32;
  for (auto _ : state) {
    moe_route_fwd(logits, {}, ids, weights, {});
  }
  state.SetItemsProcessed(state.iterations() * kTokens);
}

[[maybe_unused]] const bool registered = register_for_every_isa("moe_route_fwd/2048x256/bf16", forward);

}  // namespace
}  // namespace tidegate
