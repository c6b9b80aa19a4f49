// One token of a Qwen3.5-9B layer for every sequence.
#include <numeric>
#include <vector>

#include "ops/bench_data.h"
#include "tidegate/decode.h"

namespace tidegate {
namespace {

void gdn_packed_decode_step(benchmark::State& state) {
  const std::int64_t B = state.range(0), HK = 16, HV = 32, K = 128, V = 128, D = 2 * HK * K + HV * V;
  const BenchTensor mixed(DType::kBF16, {B, D}), z(DType::kBF16, {B, HV * V}), a(DType::kBF16, {B, HV}),
      b(DType::kBF16, {B, HV}), rows(DType::kBF16, {B, D, 3}), weight(DType::kBF16, {D, 4}), A_log(DType::kF32, {HV}),
      dt_bias(DType::kF32, {HV}), pool(DType::kF32, {B, HV, K, V}), norm(DType::kBF16, {V}),
      y(DType::kBF16, {B, HV * V});
  std::vector<std::int64_t> slots(static_cast<std::size_t>(B));
  std::iota(slots.begin(), slots.end(), 0);
  GdnPackedDecodeOptions options;
  options.HK = HK;
  options.HV = HV;
  options.K = K;
  options.V = V;
  options.state_indices = slots;
  const SeqLens seq = SeqLens::from_lengths(std::vector<std::int64_t>(static_cast<std::size_t>(B), 1));
  for (auto _ : state) {
    gdn_packed_decode(mixed, z, a, b, rows, weight, {}, A_log, dt_bias, pool, norm, y, seq, options);
  }
  state.counters["GB/s of state"] =
      benchmark::Counter(2e-9 * static_cast<double>(pool.bytes()), benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(gdn_packed_decode_step)->Arg(1)->Arg(16)->Arg(64)->UseRealTime()->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace tidegate
