// The arguments of the recurrence, checked and put into one shape. Shared with the reference.
#pragma once

#include <string_view>

#include "base/arena.h"
#include "base/delta_checks.h"
#include "tidegate/delta_rule.h"
#include "tidegate/recurrent.h"

namespace tidegate::recurrence {

using Options = RecurrentGatedDeltaRuleOptions;

inline constexpr std::int64_t kFromZero = -1;  // a start: the state begins as 0
inline constexpr std::int64_t kSkipped = -2;   // a start: nothing happens to the sequence, its o is 0
inline constexpr std::int64_t kDropped = -1;   // a slot: the state is not stored

// Longer sequences take chunks. That is faster from 4 tokens on (2.2 times at 16, AVX2); but what a speculative step
// verifies, up to 16 tokens, is to have the bits of plain decoding.
inline constexpr std::int64_t kTokenByToken = 16;

struct Tensors {
  TensorView q, k, v, g, gk, beta, from, to, o;
};

struct Problem {
  DeltaSizes sizes;
  Layout layout;
  double scale;
  bool beta_per_channel;
  const std::int64_t* start;  // [N] slot of `from`, kFromZero or kSkipped
  const std::int64_t* slots;  // [N][width] slots of `to`: after every token, or (width 1) after the last one
  std::int64_t width;
  bool per_token;
  const std::int64_t* slots_of(std::int64_t n) const { return slots + n * width; }
};

// Start and slots of every sequence, from the options of the pool form. A slot that a sequence reads or writes is
// written by no other one.
void check_indices(std::string_view op, Problem& p, const SeqLens& seq, const Options& options, std::int64_t slots,
                   Scratch& scratch);

// Lists live in the scratch memory: a decode step allocates nothing.
Problem check_pool(std::string_view op, const Tensors& t, const SeqLens& seq, const Options& options, Scratch& scratch);
Problem check_fwd(std::string_view op, const Tensors& t, const SeqLens& seq, const Options& options, Scratch& scratch);

// What both forms share with the chunk form.
ChunkGatedDeltaRuleOptions chunk_options(const Options& options);

// Checked arguments to the kernels, or to the reference for fp64.
void run(const Problem& p, const Tensors& t, const SeqLens& seq, const Options& options, Scratch& scratch);

// The definition in plain loops; the arguments are checked already.
template <class Acc>
void reference(const Problem& p, const Tensors& t, const SeqLens& seq, const Options& options);

}  // namespace tidegate::recurrence
