// The experts of a layer: H 2048, I 512, 64 experts, 8 slots, bf16; decode, small batches and prefill.
#include <benchmark/benchmark.h>

#include <cstring>
#include <map>

#include "ops/bench_data.h"
#include "tidegate/moe.h"

namespace tidegate {
namespace {

constexpr std::int64_t kH = 2048, kI = 512, kE = 64, kSlots = 8;

struct Layer {
  BenchTensor x, weights, gate_up, down, out;
  BenchTensor ids;
  explicit Layer(std::int64_t T)
      : x(DType::kBF16, {T, kH}),
        weights(DType::kF32, {T, kSlots}),
        gate_up(DType::kBF16, {kE, 2 * kI, kH}),
        down(DType::kBF16, {kE, kH, kI}),
        out(DType::kBF16, {T, kH}),
        ids(DType::kF32, {T, kSlots}) {  // four bytes as well
    std::uint32_t state = 7;
    for (std::int64_t t = 0; t < T; ++t) {
      bool taken[kE] = {};
      for (std::int64_t s = 0; s < kSlots;) {
        state = state * 1664525u + 1013904223u;
        const auto e = static_cast<std::int32_t>((state >> 8) % kE);
        if (!taken[e]) {
          taken[e] = true;
          static_cast<const TensorView&>(ids).as<std::int32_t>()[t * kSlots + s++] = e;
        }
      }
    }
  }
  MoeExpertsInputs inputs() const {
    TensorView i = ids;
    i.dtype = DType::kI32;
    return {x, i, weights, gate_up, down, {}, {}, {}, {}};
  }
};
const Layer& layer(std::int64_t T) {
  static std::map<std::int64_t, Layer> layers;
  return layers.try_emplace(T, T).first->second;
}

// kKeep: with gate and up of all pairs, for a backward.
template <std::int64_t T, bool kKeep = false>
void forward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const Layer& l = layer(T);
  const BenchTensor hidden(DType::kF32, {kKeep ? T * kSlots : 0, 2, kI});
  for (auto _ : state) {
    moe_experts_fwd(l.inputs(), l.out, {}, kKeep ? static_cast<const TensorView&>(hidden) : TensorView{});
  }
  state.counters["GFLOP/s"] =
      benchmark::Counter(6e-9 * T * kSlots * kH * kI * state.iterations(), benchmark::Counter::kIsRate);
}

template <std::int64_t T, bool kWeights, bool kKept = false>
void backward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const Layer& l = layer(T);
  const BenchTensor dx(DType::kBF16, {T, kH});
  static const BenchTensor dgate_up(DType::kBF16, {kE, 2 * kI, kH});
  static const BenchTensor ddown(DType::kBF16, {kE, kH, kI});
  MoeExpertsGradients g{};
  g.dx = dx;
  if (kWeights) {
    g.dgate_up = dgate_up;
    g.ddown = ddown;
  }
  const BenchTensor hidden(DType::kF32, {kKept ? T * kSlots : 0, 2, kI});
  MoeExpertsInputs in = l.inputs();
  if (kKept) {
    moe_experts_fwd(in, l.out, {}, hidden);
    in.hidden = hidden;
  }
  for (auto _ : state) {
    moe_experts_bwd(l.x, in, g);
  }
  state.counters["GFLOP/s"] = benchmark::Counter(
      ((kWeights ? 16e-9 : 10e-9) - (kKept ? 4e-9 : 0.0)) * T * kSlots * kH * kI * state.iterations(),
      benchmark::Counter::kIsRate);
}

[[maybe_unused]] const bool registered =
    register_for_every_isa("moe_experts_fwd/T1/bf16", forward<1>) &&
    register_for_every_isa("moe_experts_fwd/T16/bf16", forward<16>) &&
    register_for_every_isa("moe_experts_fwd/T256/bf16", forward<256>) &&
    register_for_every_isa("moe_experts_fwd/T2048/bf16", forward<2048>) &&
    register_for_every_isa("moe_experts_fwd/T2048/kept/bf16", forward<2048, true>) &&
    register_for_every_isa("moe_experts_bwd/T512/dx/bf16", backward<512, false>) &&
    register_for_every_isa("moe_experts_bwd/T512/all/bf16", backward<512, true>) &&
    register_for_every_isa("moe_experts_bwd/T512/all/kept/bf16", backward<512, true, true>);

}  // namespace
}  // namespace tidegate
