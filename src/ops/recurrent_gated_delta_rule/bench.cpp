// One token for every sequence, D1's shape; GB/s count the state read and written.
#include <numeric>
#include <vector>

#include "ops/bench_data.h"
#include "tidegate/recurrent.h"

namespace tidegate {
namespace {

void recurrent_gated_delta_rule_step(benchmark::State& state) {
  const std::int64_t B = state.range(0), HK = 16, HV = 32, K = 128, V = 128;
  const BenchTensor q(DType::kBF16, {B, HK, K}), k(DType::kBF16, {B, HK, K}), v(DType::kBF16, {B, HV, V});
  const BenchTensor a(DType::kBF16, {B, HV}), b(DType::kBF16, {B, HV}), A_log(DType::kF32, {HV});
  const BenchTensor o(DType::kBF16, {B, HV, V}), pool(DType::kF32, {B, HV, K, V});
  std::vector<std::int64_t> slots(static_cast<std::size_t>(B));
  std::iota(slots.begin(), slots.end(), 0);
  RecurrentGatedDeltaRuleOptions options;
  options.state_indices = slots;
  options.use_qk_l2norm = true;
  options.A_log = A_log;
  options.beta_sigmoid = true;
  options.state_v_first = state.range(1) != 0;
  const SeqLens seq = SeqLens::from_lengths(std::vector<std::int64_t>(static_cast<std::size_t>(B), 1));
  for (auto _ : state) {
    recurrent_gated_delta_rule(q, k, v, a, {}, b, pool, o, seq, options);
  }
  state.counters["GB/s"] =
      benchmark::Counter(2e-9 * static_cast<double>(pool.bytes()), benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(recurrent_gated_delta_rule_step)
    ->ArgNames({"B", "v_first"})
    ->ArgsProduct({{1, 16, 64}, {0, 1}})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace tidegate
