// int8 experts of a layer: H 2048, I 512, 64 experts, 8 slots; decode, small batches and prefill. Compare moe_experts.
#include <benchmark/benchmark.h>

#include "ops/bench_data.h"
#include "tidegate/quant.h"

namespace tidegate {
namespace {

constexpr std::int64_t kH = 2048, kI = 512, kE = 64, kSlots = 8;

struct Weights {
  BenchTensor gate_up{DType::kI8, {kE, 2 * kI, kH}}, down{DType::kI8, {kE, kH, kI}};
  BenchTensor gate_up_scale{DType::kF32, {kE, 2 * kI}}, down_scale{DType::kF32, {kE, kH}};
  Weights() {
    const BenchTensor rows(DType::kBF16, {kE, 2 * kI, kH});
    const BenchTensor columns(DType::kBF16, {kE, kH, kI});
    quantize(rows, gate_up, gate_up_scale);
    quantize(columns, down, down_scale);
  }
};

template <std::int64_t T>
void forward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  static const Weights w;
  const BenchTensor x(DType::kBF16, {T, kH});
  const BenchTensor out(DType::kBF16, {T, kH});
  const BenchTensor weights(DType::kF32, {T, kSlots});
  const BenchTensor ids(DType::kI32, {T, kSlots});
  for (std::int64_t i = 0; i < T * kSlots; ++i) {  // slots of a token are different experts
    static_cast<const TensorView&>(ids).as<std::int32_t>()[i] =
        static_cast<std::int32_t>((i / kSlots * 37 + i % kSlots * 5) % kE);
  }
  for (auto _ : state) {
    moe_experts_quant({x, ids, weights, w.gate_up, w.gate_up_scale, w.down, w.down_scale}, out);
  }
  state.counters["GMAC/s"] =
      benchmark::Counter(3e-9 * T * kSlots * kH * kI * state.iterations(), benchmark::Counter::kIsRate);
}

[[maybe_unused]] const bool registered = register_for_every_isa("moe_experts_quant/T1", forward<1>) &&
                                         register_for_every_isa("moe_experts_quant/T16", forward<16>) &&
                                         register_for_every_isa("moe_experts_quant/T256", forward<256>) &&
                                         register_for_every_isa("moe_experts_quant/T2048", forward<2048>);

}  // namespace
}  // namespace tidegate
