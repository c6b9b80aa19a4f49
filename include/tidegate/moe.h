// Mixture of experts: the router, the order of (token, slot) pairs by expert, products with the experts' weights.
//
// T tokens, H channels, E experts, k slots a token, I channels inside an expert. Pair t * k + s is slot s of token t.
// An expert id is 0 .. E-1 or -1: not routed, which costs nothing and contributes nothing. Any other id is an error.
#pragma once

#include <optional>

#include "tidegate/tensor.h"

namespace tidegate {

// Transformers marks pairs of other ranks with the number of experts; kTransformersEp reads that as -1.
enum class ExpertIds : std::uint8_t { kPlain, kTransformersEp };
ExpertIds parse_expert_ids(std::string_view op, std::string_view name);  // "plain", "transformers_ep"

struct MoeRouteOptions {
  bool renormalise = true;                 // weights are those of the chosen experts alone and sum to 1
  std::optional<DType> logits_rounding{};  // logits are first rounded to this type
};

// ids int32 [T,k]: the k largest logits [T,E] of a token, the lowest id first among equal ones, in this order.
// weights [T,k]: their softmax, over all experts or (renormalise) the chosen ones. probs fp32 [T,E]: the whole softmax,
// may be absent. -inf marks an expert that must not be chosen; NaN, +inf and too few experts to choose are errors.
// replay_ids [T,k], if given, is the choice: ids repeats it, the weights are those of the present logits.
void moe_route_fwd(const TensorView& logits, const TensorView& replay_ids, const TensorView& ids,
                   const TensorView& weights, const TensorView& probs, const MoeRouteOptions& options = {});

// dlogits from dweights [T,k] and dprobs [T,E], either of which may be absent.
void moe_route_bwd(const TensorView& dweights, const TensorView& dprobs, const TensorView& logits,
                   const TensorView& ids, const TensorView& dlogits, const MoeRouteOptions& options = {});

// Pairs sorted by expert, ascending inside an expert: counts int64 [E]; src int32 [T*k], the pair of every sorted
// place, -1 behind the last one; pos int32 [T,k], the place of every pair, -1 if it is not routed.
void moe_init_routing(const TensorView& ids, const TensorView& counts, const TensorView& src, const TensorView& pos,
                      ExpertIds convention = ExpertIds::kPlain);

// y[j] = x[src[j] / k], 0 where src[j] is -1. x [T,H], src [S], y [S,H].
void moe_permute(const TensorView& x, const TensorView& src, const TensorView& y, std::int64_t k);

// out[t] = sum over the slots of weights[t,s] * y[pos[t,s]], in their order, in fp32; weights may be absent: 1.
// Its gradients: dy[pos[t,s]] = weights[t,s] dout[t], 0 in rows that no pair names; dweights[t,s] = <dout[t], y[pos]>.
void moe_unpermute_fwd(const TensorView& y, const TensorView& pos, const TensorView& weights, const TensorView& out);
void moe_unpermute_bwd(const TensorView& dout, const TensorView& y, const TensorView& pos, const TensorView& weights,
                       const TensorView& dy, const TensorView& dweights);

// Which axis of a weight [G,.,.] is which: kNK [G,N,K] as models store them, kKN [G,K,N]. Always said by the caller,
// never guessed from sizes. Of the strides of N and K one must be 1; a transposed view is used as it is.
enum class WeightAxes : std::uint8_t { kNK, kKN };
WeightAxes parse_weight_axes(std::string_view op, std::string_view name);  // "nk", "kn"

// groups [G], int32 or int64: how many rows each group has (kCounts), or where each one ends (kCumsum). The first group
// starts at row 0.
enum class GroupList : std::uint8_t { kCounts, kCumsum };
GroupList parse_group_list(std::string_view op, std::string_view name);  // "counts", "cumsum"

struct GroupedMatmulOptions {
  WeightAxes weight_axes = WeightAxes::kNK;
  GroupList group_list = GroupList::kCounts;
  bool accumulate = false;  // backward: dweight and dbias are added to
  // Forward: row j of x is at x_rows[j], and x says only sizes and type. Rows that lie anywhere, as those of ep.h.
  const void* const* x_rows = nullptr;
};

// y[j] = W_g x[j] + bias_g for the rows j of group g. x [M,K], y [M,N] of x's type or fp32, bias [G,N] may be absent.
// Weights may have another float type than x; they are converted as they are used, never as a whole. Rows outside all
// groups are left alone.
void grouped_matmul_fwd(const TensorView& x, const TensorView& weight, const TensorView& groups, const TensorView& bias,
                        const TensorView& y, const GroupedMatmulOptions& options = {});

// dx[j] = W_g^T dy[j]; dW_g = sum over the rows j of group g of dy[j] x[j]^T, dbias_g = sum of dy[j]. Any output may be
// absent and then costs nothing; weight may be absent without dx, x without dweight. dweight and dbias: any float type.
void grouped_matmul_bwd(const TensorView& dy, const TensorView& x, const TensorView& weight, const TensorView& groups,
                        const TensorView& dx, const TensorView& dweight, const TensorView& dbias,
                        const GroupedMatmulOptions& options = {});

// The experts of a layer: y_e(x) = down_e (silu(gate_e x) * (up_e x)), out = sum over slots of weights y_e, and if
// there is a shared expert + sigmoid(<shared_router, x>) y_shared. gate_up [E,2I,H] holds gate rows, then up rows
// (interleaved: they take turns), down [E,H,I]; with kKN [E,H,2I] and [E,I,H]. The shared tensors are all present or
// all absent: gate and up [J,H], down [H,J], router [H].
//
// LoRA: an expert's weight W [N,K] with a low-rank addition is W + scale b a, a [E,r,K] and b [E,N,r] whatever
// weight_axes says. It is never formed: b (scale a x) is added to W x. a and b are both present or both absent.
struct MoeExpertsInputs {
  TensorView x, ids, weights, gate_up, down;
  TensorView shared_gate, shared_up, shared_down, shared_router;
  TensorView gate_up_lora_a{}, gate_up_lora_b{}, down_lora_a{}, down_lora_b{};
  // Row t of x is at x_rows[t], and x says only sizes and type. Rows that lie anywhere, as those of ep.h.
  const void* const* x_rows = nullptr;
  // Backward: what a forward of the same inputs left in its `hidden`. Without it gate and up are computed again; the
  // gradients have the same bits.
  TensorView hidden{};
};
struct MoeExpertsOptions {
  WeightAxes weight_axes = WeightAxes::kNK;
  bool interleaved = false;
  ExpertIds ids_convention = ExpertIds::kPlain;
  // Rounds every y_e to the type of x, as processes that exchange them do. Else y_e stays fp32.
  bool round_y = false;
  double gate_up_lora_scale = 1.0;
  double down_lora_scale = 1.0;
};

// out [T,H] of x's type. silu(gate) * up is rounded to x's type, everything else is fp32; experts are added in order of
// their ids (fp64: of slots), then the shared one.
// hidden fp32 [T*k,2,I], may be absent, as it must with fp64: gate and up of every routed pair with their low-rank
// additions, for a backward. Rows are the places of moe_init_routing, those behind the last one 0.
void moe_experts_fwd(const MoeExpertsInputs& in, const TensorView& out, const MoeExpertsOptions& options = {},
                     const TensorView& hidden = {});

// Gradients; those that are absent cost nothing. dweights and the gradients of parameters have any float type.
struct MoeExpertsGradients {
  TensorView dx, dweights, dgate_up, ddown;
  TensorView dshared_gate, dshared_up, dshared_down, dshared_router;
  TensorView dgate_up_lora_a{}, dgate_up_lora_b{}, ddown_lora_a{}, ddown_lora_b{};
};
void moe_experts_bwd(const TensorView& dout, const MoeExpertsInputs& in, const MoeExpertsGradients& out,
                     const MoeExpertsOptions& options = {});

}  // namespace tidegate
