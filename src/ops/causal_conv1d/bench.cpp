// causal_conv1d at the shapes of a 397B layer: a prompt of 4096 tokens, and a decode step of 64 sequences; D = 8192, W
// = 4.
#include <benchmark/benchmark.h>

#include "ops/bench_data.h"
#include "tidegate/conv.h"

namespace tidegate {
namespace {

constexpr std::int64_t kTokens = 4096;
constexpr std::int64_t kSequences = 64;
constexpr std::int64_t kChannels = 8192;

void forward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor x(DType::kBF16, {kTokens, kChannels});
  const BenchTensor weight(DType::kBF16, {kChannels, 4});
  const BenchTensor y(DType::kBF16, {kTokens, kChannels});
  const SeqLens seq = SeqLens::dense(1, kTokens);
  for (auto _ : state) {
    causal_conv1d_fwd(x, weight, {}, {}, y, {}, seq, {Activation::kSilu, 0, Layout::kTND});
  }
  state.SetBytesProcessed(state.iterations() * (x.bytes() + y.bytes()));
}

void backward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor x(DType::kBF16, {kTokens, kChannels});
  const BenchTensor weight(DType::kBF16, {kChannels, 4});
  const BenchTensor dy(DType::kBF16, {kTokens, kChannels});
  const BenchTensor dx(DType::kBF16, {kTokens, kChannels});
  const BenchTensor dweight(DType::kF32, {kChannels, 4});
  const SeqLens seq = SeqLens::dense(1, kTokens);
  for (auto _ : state) {
    causal_conv1d_bwd(dy, x, weight, {}, {}, {}, dx, dweight, {}, {}, seq, {Activation::kSilu, 0, Layout::kTND});
  }
  state.SetBytesProcessed(state.iterations() * (x.bytes() + dy.bytes() + dx.bytes()));
}

void update(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor x(DType::kBF16, {kSequences, 1, kChannels});
  const BenchTensor pool(DType::kBF16, {kSequences, kChannels, 4});
  const BenchTensor weight(DType::kBF16, {kChannels, 4});
  const BenchTensor y(DType::kBF16, {kSequences, 1, kChannels});
  const SeqLens seq = SeqLens::dense(kSequences, 1);
  CausalConv1dUpdateOptions options;
  options.activation = Activation::kSilu;
  options.layout = Layout::kBSND;
  for (auto _ : state) {
    causal_conv1d_update(x, pool, weight, {}, y, seq, options);
  }
  state.SetBytesProcessed(state.iterations() * (x.bytes() + 2 * pool.bytes() + weight.bytes() + y.bytes()));
}

[[maybe_unused]] const bool registered = register_for_every_isa("causal_conv1d_fwd/T=4096/D=8192/bf16", forward) &&
                                         register_for_every_isa("causal_conv1d_bwd/T=4096/D=8192/bf16", backward) &&
                                         register_for_every_isa("causal_conv1d_update/B=64/D=8192/bf16", update);

}  // namespace
}  // namespace tidegate
