// The gated delta rule over whole sequences (training and prefill).
//
// Per value head, state S [K,V], one token:
//   S <- e^g S      d = beta (v - S^T k)      S <- S + k d^T      o = scale S^T q
// Letters: B rows, T tokens, HK key heads, HV value heads (HV % HK == 0; value head h reads key head h / (HV/HK)),
// K and V head sizes (any size >= 1), N sequences.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tidegate/seqlens.h"
#include "tidegate/tensor.h"

namespace tidegate {

// kFp32: every product in fp32. kBf16: q, k, v of type bf16 may be multiplied with bf16 dot products (fp32 sums and
// state) on CPUs that have them; everywhere else it is kFp32.
enum class Precision : std::uint8_t { kFp32, kBf16 };
Precision parse_precision(std::string_view op, std::string_view name);  // "fp32", "bf16"

// The state of a sequence after its first `tokens` tokens.
struct SnapshotPoint {
  std::int64_t sequence;
  std::int64_t tokens;
};

struct ChunkGatedDeltaRuleOptions {
  std::optional<double> scale;  // K^-0.5 if absent
  bool use_qk_l2norm = false;   // rows of q and k are divided by their length, eps 1e-6 inside the root
  bool zero_row_safe = false;   // backward: a row of q or k that is 0 gets the gradient 0, not 1000 times what came in
  TensorView A_log, dt_bias;    // [HV]; with A_log, g holds the raw a: g = -exp(A_log) softplus(a + dt_bias)
  bool beta_sigmoid = false;    // beta holds the raw b: beta = beta_scale sigmoid(b)
  double beta_scale = 1.0;
  bool state_v_first = false;  // states are [.., V, K] instead of [.., K, V]
  std::span<const SnapshotPoint> snapshot_at;
  Precision precision = Precision::kFp32;
  Layout layout = Layout::kBSND;
  std::optional<Layout> out_layout;  // of o; as layout if absent
  // More than 1: every sequence is cut into so many segments that run at the same time, for machines with more cores
  // than columns of state. It takes 2.3 times the operations and 4 (K + V) K HV bytes a segment, and it changes the
  // last bits; a reset does not stop a NaN of an earlier segment. One row only, no snapshots, no pool.
  std::int64_t time_segments = 1;
  // State pools: with state_indices [N], initial_state and final_state (which may be the same memory) have one state
  // per slot instead of one per sequence. A sequence whose slot is null_slot is skipped, its o is 0.
  std::span<const std::int64_t> state_indices;
  std::int64_t null_slot = -1;
  std::span<const std::uint8_t> has_initial_state;  // [N]; 0: that sequence starts from 0; empty = all 1
};

//   q, k           [B,T,HK,K] | [T,HK,K] | [B,HK,T,K] | [HK,T,K] by layout; fp32, bf16, fp16 (fp64: reference path)
//   v, o           the same with HV, V, same type as q;  o may be absent (only the state is wanted)
//   g, beta        [B,T,HV] | [T,HV] | [B,HV,T] | [HV,T]; any float type. g <= -104 is a reset: it forgets everything
//   initial_state  [N,HV,K,V] any float type, or absent = 0
//   final_state    [N,HV,K,V] fp32 or bf16, or absent
//   snapshots      [M,HV,K,V] fp32, one for every entry of snapshot_at, or absent
// fp64 goes with fp64 and only with it. The bits of a sequence do not depend on the batch, the packing or the threads.
void chunk_gated_delta_rule_fwd(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& g,
                                const TensorView& beta, const TensorView& initial_state, const TensorView& o,
                                const TensorView& final_state, const TensorView& snapshots, const SeqLens& seq,
                                const ChunkGatedDeltaRuleOptions& options = {});

// The same on a pool of states, in place. state [slots,HV,K,V] fp32 or bf16; options.state_indices [N] names the slot
// of every sequence. Snapshots must be unset.
void chunk_gated_delta_rule_pool(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& g,
                                 const TensorView& beta, const TensorView& state, const TensorView& o,
                                 const SeqLens& seq, const ChunkGatedDeltaRuleOptions& options);

// The gradients of the inputs; an absent one is not wanted and costs nothing.
struct ChunkGatedDeltaRuleGradients {
  TensorView dq, dk, dv;        // like the inputs
  TensorView dg, dbeta;         // sizes of g and beta, any float type; of the raw a and b where these are given
  TensorView dh0;               // sizes of initial_state, fp32 or bf16
  TensorView dA_log, ddt_bias;  // [HV] fp32
};

//   d_o            gradient of o, in its type and layout, or absent = 0
//   dfinal_state   gradient of the final state, any float type, or absent = 0
//   states         [M,HV,K,V] fp32, always K-first: the snapshots at saved_states(seq), in that order, of the forward
//   on the
//                  same inputs; absent: they are computed again
// Options as in the forward; states of a pool and snapshots have no gradient. precision is that of the forward:
// gradients are computed in fp32. Memory: K V HV / 64 bytes of `states` for every token, and a workspace for each
// thread that does not grow with the tokens.
void chunk_gated_delta_rule_bwd(const TensorView& d_o, const TensorView& dfinal_state, const TensorView& q,
                                const TensorView& k, const TensorView& v, const TensorView& g, const TensorView& beta,
                                const TensorView& initial_state, const TensorView& states,
                                const ChunkGatedDeltaRuleGradients& gradients, const SeqLens& seq,
                                const ChunkGatedDeltaRuleOptions& options = {});

// Where the backward wants to find states: after every kSavedStateTokens tokens of a sequence, but not at its end.
inline constexpr std::int64_t kSavedStateTokens = 256;
std::vector<SnapshotPoint> saved_states(const SeqLens& seq);

// Tokens that one step of the fused operator takes in. Snapshots at its multiples (and anywhere else) cost one more
// product of the state's size.
std::int64_t chunk_size();

// The map S_out = phi S_in + s that the tokens of every sequence are to the state in front of them.
//   phi [N,HV,K,K], s [N,HV,K,V] fp32 (fp64 for fp64). Options that speak of states, o or snapshots must be unset.
void gdn_segment_map(const TensorView& k, const TensorView& v, const TensorView& g, const TensorView& beta,
                     const TensorView& phi, const TensorView& s, const SeqLens& seq,
                     const ChunkGatedDeltaRuleOptions& options = {});

// The map of two segments, the first one first: phi = phi2 phi1, s = phi2 s1 + s2. phi [..,K,K], s [..,K,V] fp32.
// Without phi1 and phi only s: the state s1 carried over a segment.
void gdn_segment_combine(const TensorView& phi1, const TensorView& s1, const TensorView& phi2, const TensorView& s2,
                         const TensorView& phi, const TensorView& s);

}  // namespace tidegate
