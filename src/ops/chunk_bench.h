// The benchmark problem of the chunk operators: 4096 tokens, 16 key heads, 32 value heads of 128, chunks of 64,
// head-major, bf16 data with fp32 between the stages.
#pragma once

#include "ops/bench_data.h"
#include "tidegate/chunk.h"

namespace tidegate::chunk_bench {

inline constexpr std::int64_t kTokens = 4096;
inline constexpr std::int64_t kKeyHeads = 16;
inline constexpr std::int64_t kHeads = 32;
inline constexpr std::int64_t kSize = 128;
inline constexpr std::int64_t kChunk = 64;
inline constexpr Layout kLayout = Layout::kNTD;

inline BenchTensor keys() { return {DType::kBF16, {kKeyHeads, kTokens, kSize}}; }                 // q or k
inline BenchTensor values(DType type = DType::kF32) { return {type, {kHeads, kTokens, kSize}}; }  // v, w, u, v_new, o
inline BenchTensor gates() { return {DType::kF32, {kHeads, kTokens}}; }                           // g, gc or beta
inline BenchTensor triangles() { return {DType::kF32, {kHeads, kTokens, kChunk}}; }               // A0 or A
inline BenchTensor chunk_states() { return {DType::kF32, {kHeads, kTokens / kChunk, kSize, kSize}}; }

// run(seq) once an iteration. Items are the floating-point operations, of triangles those that are not zero.
template <class Run>
void measure(benchmark::State& state, Isa isa, std::int64_t operations, Run run) {
  set_isa(isa);
  const SeqLens seq = SeqLens::dense(1, kTokens);
  for (auto _ : state) {
    run(seq);
  }
  state.SetItemsProcessed(state.iterations() * operations);
}

}  // namespace tidegate::chunk_bench
