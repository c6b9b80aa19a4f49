// Sorting the pairs of 2048 tokens, and the sum over their slots.
#include <benchmark/benchmark.h>

#include "ops/bench_data.h"
#include "tidegate/moe.h"

namespace tidegate {
namespace {

constexpr std::int64_t kTokens = 2048, kExperts = 256, kSlots = 8, kWidth = 2048;

TensorView as_ids(const BenchTensor& room) {
  TensorView ids = room;
  ids.dtype = DType::kI32;
  for (std::int64_t i = 0; i < ids.numel(); ++i) {
    ids.as<std::int32_t>()[i] = static_cast<std::int32_t>(i * 2654435761u % kExperts);
  }
  return ids;
}

void sort(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor ids(DType::kF32, {kTokens, kSlots}), counts(DType::kF64, {kExperts}),
      src(DType::kF32, {kTokens * kSlots}), pos(DType::kF32, {kTokens, kSlots});
  TensorView c = counts;
  c.dtype = DType::kI64;
  const TensorView i = as_ids(ids);
  const TensorView s = as_ids(src);
  const TensorView p = as_ids(pos);
  for (auto _ : state) {
    moe_init_routing(i, c, s, p);
  }
}

void unpermute(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor y(DType::kBF16, {kTokens * kSlots, kWidth}), out(DType::kBF16, {kTokens, kWidth}),
      weights(DType::kF32, {kTokens, kSlots}), room(DType::kF32, {kTokens, kSlots});
  TensorView pos = as_ids(room);
  for (std::int64_t i = 0; i < pos.numel(); ++i) {
    pos.as<std::int32_t>()[i] = static_cast<std::int32_t>(i * 5 % (kTokens * kSlots));
  }
  for (auto _ : state) {
    moe_unpermute_fwd(y, pos, weights, out);
  }
  state.SetBytesProcessed(state.iterations() * (y.bytes() + out.bytes()));
}

[[maybe_unused]] const bool registered = register_for_every_isa("moe_init_routing/2048x8", sort) &&
                                         register_for_every_isa("moe_unpermute_fwd/2048x8x2048/bf16", unpermute);

}  // namespace
}  // namespace tidegate
