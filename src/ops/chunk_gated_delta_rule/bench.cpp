// P1's shape by tokens; GFLOP/s count the recurrence, 6KV a token and value head.
#include <benchmark/benchmark.h>

#include <vector>

#include "tidegate/delta_rule.h"

namespace tidegate {
namespace {

void chunk_gated_delta_rule(benchmark::State& state) {
  const std::int64_t T = state.range(0), HK = 16, HV = 32, K = 128, V = 128;
  const auto tensor = [](std::vector<float>& data, float scale, std::initializer_list<std::int64_t> sizes) {
    std::int64_t n = 1;
    for (const std::int64_t size : sizes) {
      n *= size;
    }
    data.resize(static_cast<std::size_t>(n));
    std::uint32_t seed = 1;
    for (float& x : data) {
      seed = seed * 1664525u + 1013904223u;
      x = scale * (static_cast<float>(seed >> 8) / 16777216.0f - 0.5f);
    }
    return contiguous(data.data(), DType::kF32, sizes);
  };
  std::vector<float> q, k, v, g, beta, o, h;
  const TensorView qv = tensor(q, 0.3f, {T, HK, K});
  const TensorView kv = tensor(k, 0.3f, {T, HK, K});
  const TensorView vv = tensor(v, 2.0f, {T, HV, V});
  const TensorView gv = tensor(g, 0.0f, {T, HV});
  const TensorView bv = tensor(beta, 0.5f, {T, HV});
  const TensorView ov = tensor(o, 0.0f, {T, HV, V});
  const TensorView hv = tensor(h, 0.0f, {1, HV, K, V});
  const SeqLens seq = SeqLens::dense(1, T);
  ChunkGatedDeltaRuleOptions options;
  options.layout = Layout::kTND;
  options.use_qk_l2norm = true;
  for (auto _ : state) {
    chunk_gated_delta_rule_fwd(qv, kv, vv, gv, bv, {}, ov, hv, {}, seq, options);
  }
  state.counters["GFLOP/s"] =
      benchmark::Counter(6e-9 * static_cast<double>(K * V * HV * T), benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(chunk_gated_delta_rule)->Arg(256)->Arg(4096)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace tidegate
