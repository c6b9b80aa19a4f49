// Gated RMSNorm of 4096 tokens with 32 heads of 128, in both rounding modes.
#include <benchmark/benchmark.h>

#include "ops/bench_data.h"
#include "tidegate/norm.h"

namespace tidegate {
namespace {

constexpr std::int64_t kRows = 4096 * 32;
constexpr std::int64_t kWidth = 128;

template <Rounding kRounding>
void forward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor x(DType::kBF16, {kRows, kWidth});
  const BenchTensor z(DType::kBF16, {kRows, kWidth});
  const BenchTensor weight(DType::kBF16, {kWidth});
  const BenchTensor y(DType::kBF16, {kRows, kWidth});
  const BenchTensor rstd(DType::kF32, {kRows});
  for (auto _ : state) {
    rms_norm_gated_fwd(x, z, weight, y, rstd, {1e-6, Activation::kSilu, kRounding});
  }
  state.SetBytesProcessed(state.iterations() * (x.bytes() + z.bytes() + y.bytes() + rstd.bytes()));
}

void backward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor x(DType::kBF16, {kRows, kWidth});
  const BenchTensor z(DType::kBF16, {kRows, kWidth});
  const BenchTensor weight(DType::kBF16, {kWidth});
  const BenchTensor dy(DType::kBF16, {kRows, kWidth});
  const BenchTensor dx(DType::kBF16, {kRows, kWidth});
  const BenchTensor dz(DType::kBF16, {kRows, kWidth});
  const BenchTensor rstd(DType::kF32, {kRows});
  const BenchTensor dweight(DType::kF32, {kWidth});
  for (auto _ : state) {
    rms_norm_gated_bwd(dy, x, z, weight, rstd, dx, dz, dweight);
  }
  state.SetBytesProcessed(state.iterations() *
                          (dy.bytes() + x.bytes() + z.bytes() + dx.bytes() + dz.bytes() + rstd.bytes()));
}

[[maybe_unused]] const bool registered =
    register_for_every_isa("rms_norm_gated_fwd/131072x128/bf16/hf", forward<Rounding::kHf>) &&
    register_for_every_isa("rms_norm_gated_fwd/131072x128/bf16/fp32", forward<Rounding::kFp32>) &&
    register_for_every_isa("rms_norm_gated_bwd/131072x128/bf16", backward);

}  // namespace
}  // namespace tidegate
