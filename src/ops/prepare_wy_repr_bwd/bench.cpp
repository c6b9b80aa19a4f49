// prepare_wy_repr_bwd and its halves at 4096 tokens, 16 key heads, 32 value heads of 128, chunks of 64, bf16,
// head-major. Items are the floating-point operations below the diagonals.
#include <benchmark/benchmark.h>

#include "ops/bench_data.h"
#include "tidegate/chunk_backward.h"

namespace tidegate {
namespace {

constexpr std::int64_t kTokens = 4096;
constexpr std::int64_t kKeyHeads = 16;
constexpr std::int64_t kHeads = 32;
constexpr std::int64_t kSize = 128;
constexpr std::int64_t kChunk = 64;
constexpr std::int64_t kProduct = kHeads * kTokens * kChunk * kSize;           // one of a triangle with rows of k or v
constexpr std::int64_t kSquares = 2 * kHeads * kTokens * kChunk * kChunk / 3;  // A^T X A^T

struct Tensors {
  BenchTensor k{DType::kBF16, {kKeyHeads, kTokens, kSize}};
  BenchTensor v{DType::kBF16, {kHeads, kTokens, kSize}};
  BenchTensor beta{DType::kF32, {kHeads, kTokens}};
  BenchTensor A{DType::kF32, {kHeads, kTokens, kChunk}};
  BenchTensor dw{DType::kF32, {kHeads, kTokens, kSize}};
  BenchTensor du{DType::kF32, {kHeads, kTokens, kSize}};
  BenchTensor gc{DType::kF32, {kHeads, kTokens}};
  BenchTensor dA{DType::kF32, {kHeads, kTokens, kChunk}};
  BenchTensor dk{DType::kF32, {kKeyHeads, kTokens, kSize}};
  BenchTensor dv{DType::kF32, {kHeads, kTokens, kSize}};
  BenchTensor dbeta{DType::kF32, {kHeads, kTokens}};
  BenchTensor dg{DType::kF32, {kHeads, kTokens}};
  SeqLens seq = SeqLens::dense(1, kTokens);
};

template <class F>
void measure(benchmark::State& state, Isa isa, std::int64_t items, F f) {
  set_isa(isa);
  const Tensors t;
  for (auto _ : state) {
    f(t);
  }
  state.SetItemsProcessed(state.iterations() * items);
}

void da(benchmark::State& state, Isa isa) {
  measure(state, isa, 2 * kProduct + kSquares, [](const Tensors& t) {
    prepare_wy_repr_bwd_da(t.k, t.v, t.beta, t.A, t.dw, t.du, t.gc, t.dA, t.seq, Layout::kNTD);
  });
}
void full(benchmark::State& state, Isa isa) {
  measure(state, isa, 4 * kProduct, [](const Tensors& t) {
    prepare_wy_repr_bwd_full(t.k, t.v, t.beta, t.A, t.dA, t.dw, t.du, t.gc, t.dk, t.dv, t.dbeta, t.dg, t.seq,
                             Layout::kNTD);
  });
}
void both(benchmark::State& state, Isa isa) {
  measure(state, isa, 6 * kProduct + kSquares, [](const Tensors& t) {
    prepare_wy_repr_bwd(t.k, t.v, t.beta, t.A, t.dw, t.du, t.gc, t.dk, t.dv, t.dbeta, t.dg, t.seq, Layout::kNTD);
  });
}

[[maybe_unused]] const bool registered[] = {
    register_for_every_isa("prepare_wy_repr_bwd_da/4096x32x128/bf16", da),
    register_for_every_isa("prepare_wy_repr_bwd_full/4096x32x128/bf16", full),
    register_for_every_isa("prepare_wy_repr_bwd/4096x32x128/bf16", both),
};

}  // namespace
}  // namespace tidegate
