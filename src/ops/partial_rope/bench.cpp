// Partial RoPE of 4096 tokens with 16 heads of 256, 64 of them rotated: into other memory and in place.
#include <benchmark/benchmark.h>

#include <vector>

#include "ops/bench_data.h"
#include "tidegate/rope.h"

namespace tidegate {
namespace {

constexpr std::int64_t kHeads = 16;
constexpr std::int64_t kTokens = 4096;
constexpr std::int64_t kWidth = 256;
constexpr std::int64_t kRotary = 64;

template <bool kInPlace>
void forward(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const BenchTensor x(DType::kBF16, {kHeads, kTokens, kWidth});
  const BenchTensor y(DType::kBF16, {kHeads, kTokens, kWidth});
  const BenchTensor cos(DType::kBF16, {kTokens, kRotary});
  const BenchTensor sin(DType::kBF16, {kTokens, kRotary});
  for (auto _ : state) {
    partial_rope_fwd(x, cos, sin, kInPlace ? x : y, {Layout::kNTD, Rounding::kHf});
  }
  const std::int64_t touched = kInPlace ? x.bytes() * kRotary / kWidth : x.bytes();
  state.SetBytesProcessed(state.iterations() * 2 * touched);
}

void tables(benchmark::State& state, Isa isa) {
  set_isa(isa);
  const std::vector<std::int64_t> positions(static_cast<std::size_t>(3 * kTokens), 1000);
  const TensorView ids = contiguous(positions.data(), DType::kI64, {3, 1, kTokens});
  const BenchTensor inv_freq(DType::kF32, {kRotary / 2});
  const BenchTensor cos(DType::kBF16, {1, kTokens, kRotary});
  const BenchTensor sin(DType::kBF16, {1, kTokens, kRotary});
  constexpr std::int64_t section[3] = {11, 11, 10};
  for (auto _ : state) {
    mrope_cos_sin(ids, inv_freq, section, 1.0, cos, sin);
  }
  state.SetBytesProcessed(state.iterations() * (cos.bytes() + sin.bytes()));
}

[[maybe_unused]] const bool registered =
    register_for_every_isa("partial_rope_fwd/16x4096x256/R=64/bf16", forward<false>) &&
    register_for_every_isa("partial_rope_fwd/16x4096x256/R=64/bf16/in_place", forward<true>) &&
    register_for_every_isa("mrope_cos_sin/4096x64/bf16", tables);

}  // namespace
}  // namespace tidegate
