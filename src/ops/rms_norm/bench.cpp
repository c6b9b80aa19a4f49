// Zero-centred RMSNorm: heads of 128 (query and key norms), and the hidden size of the block norms.
#include <benchmark/benchmark.h>

#include "ops/bench_data.h"
#include "tidegate/norm.h"

namespace tidegate {
namespace {

template <std::int64_t kRows, std::int64_t kWidth>
void forward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor x(DType::kBF16, {kRows, kWidth});
  const BenchTensor weight(DType::kBF16, {kWidth});
  const BenchTensor y(DType::kBF16, {kRows, kWidth});
  const BenchTensor rstd(DType::kF32, {kRows});
  for (auto _ : state) {
    rms_norm_fwd(x, weight, y, rstd);
  }
  state.SetBytesProcessed(state.iterations() * (x.bytes() + y.bytes() + rstd.bytes()));
}

template <std::int64_t kRows, std::int64_t kWidth>
void backward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor x(DType::kBF16, {kRows, kWidth});
  const BenchTensor weight(DType::kBF16, {kWidth});
  const BenchTensor dy(DType::kBF16, {kRows, kWidth});
  const BenchTensor dx(DType::kBF16, {kRows, kWidth});
  const BenchTensor rstd(DType::kF32, {kRows});
  const BenchTensor dweight(DType::kF32, {kWidth});
  for (auto _ : state) {
    rms_norm_bwd(dy, x, weight, rstd, dx, dweight);
  }
  state.SetBytesProcessed(state.iterations() * (x.bytes() + dy.bytes() + dx.bytes() + rstd.bytes()));
}

[[maybe_unused]] const bool registered =
    register_for_every_isa("rms_norm_fwd/131072x128/bf16", forward<131072, 128>) &&
    register_for_every_isa("rms_norm_fwd/4096x4096/bf16", forward<4096, 4096>) &&
    register_for_every_isa("rms_norm_bwd/131072x128/bf16", backward<131072, 128>) &&
    register_for_every_isa("rms_norm_bwd/4096x4096/bf16", backward<4096, 4096>);

}  // namespace
}  // namespace tidegate
