// gdn_gating at 4096 tokens and 32 heads.
#include <benchmark/benchmark.h>

#include "ops/bench_data.h"
#include "tidegate/gating.h"

namespace tidegate {
namespace {

constexpr std::int64_t kTokens = 4096;
constexpr std::int64_t kHeads = 32;

void forward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor a(DType::kBF16, {kTokens, kHeads});
  const BenchTensor b(DType::kBF16, {kTokens, kHeads});
  const BenchTensor A_log(DType::kF32, {kHeads});
  const BenchTensor g(DType::kF32, {kTokens, kHeads});
  const BenchTensor beta(DType::kBF16, {kTokens, kHeads});
  for (auto _ : state) {
    gdn_gating_fwd(a, b, A_log, A_log, g, beta, {1.0, Layout::kTND});
  }
  state.SetBytesProcessed(state.iterations() * (a.bytes() + b.bytes() + g.bytes() + beta.bytes()));
}

void backward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor a(DType::kBF16, {kTokens, kHeads});
  const BenchTensor b(DType::kBF16, {kTokens, kHeads});
  const BenchTensor A_log(DType::kF32, {kHeads});
  const BenchTensor dg(DType::kF32, {kTokens, kHeads});
  const BenchTensor dbeta(DType::kBF16, {kTokens, kHeads});
  const BenchTensor da(DType::kBF16, {kTokens, kHeads});
  const BenchTensor db(DType::kBF16, {kTokens, kHeads});
  const BenchTensor dA_log(DType::kF32, {kHeads});
  const BenchTensor ddt_bias(DType::kF32, {kHeads});
  for (auto _ : state) {
    gdn_gating_bwd(dg, dbeta, a, b, A_log, A_log, da, db, dA_log, ddt_bias, {1.0, Layout::kTND});
  }
  state.SetBytesProcessed(state.iterations() *
                          (a.bytes() + b.bytes() + dg.bytes() + dbeta.bytes() + da.bytes() + db.bytes()));
}

[[maybe_unused]] const bool registered = register_for_every_isa("gdn_gating_fwd/4096x32/bf16", forward) &&
                                         register_for_every_isa("gdn_gating_bwd/4096x32/bf16", backward);

}  // namespace
}  // namespace tidegate
