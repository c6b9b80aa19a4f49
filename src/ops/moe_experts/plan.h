// The experts of a call as sets of groups: the routed ones, and the shared one, to which every token goes.
#pragma once

#include "base/expert_ids.h"
#include "ops/grouped_matmul/tasks.h"
#include "ops/moe_experts/kernel.h"

namespace tidegate::moe_experts {

using grouped_matmul::Weights;

// Columns of a task that collects the results of many experts: a row of floats for every pair stays small.
inline constexpr std::int64_t kCollectColumns = 128;
// Pairs whose rows are collected at a time: 8 MB of floats.
inline constexpr std::int64_t kCollectPairs = 16384;

// A low-rank addition to weights. u is what the input rows become on its narrow side, in fp32.
struct LowRank {
  std::int64_t rank;  // 0: there is none
  Weights a;          // [rank, K]
  Weights b[2];       // [N, rank]: gate and up, or down alone
  float scale;
  float* u;  // [places][rank]: scale * a times the row
};

struct Set {
  Weights gate, up, down;
  LowRank hidden_lora, down_lora;
  std::int64_t groups, places, slots;  // slots: of a token
  const std::int64_t* offsets;         // [groups + 1] of places
  const std::int32_t* src;             // [places]: the pair; pair / slots is the token
  const std::int32_t* pos;             // [T * slots]: the place, or -1
  const std::int32_t* ids;             // [T * slots]: the group
  const float* pair_weights;           // [T * slots]
  const float* place_weights;          // [places]
  const void** x_rows;                 // [places]
  char* a;                             // [places][width] of x's type
  // gate and up that a forward keeps for the backward, fp32: of place j at hidden + j * hidden_row, and hidden_up
  // behind it. Absent: they live as long as their block.
  float* hidden;
  std::int64_t hidden_row, hidden_up;
  std::int64_t width() const { return gate.N; }
};

struct Plan {
  std::int64_t T, H;
  int type;   // of x
  int bytes;  // of an element of it
  Set routed, shared;
  bool has_shared;
  float* shared_gate;   // [T]: sigmoid(<router, x>)
  const float* router;  // [H]
  bool round_y;
  int set_count() const { return has_shared ? 2 : 1; }
};

// Gate and up rows of a tensor that holds both.
struct GateUp {
  Weights gate, up;
};
inline GateUp gate_up_of(const TensorView& t, WeightAxes axes, bool interleaved) {
  Weights gate = grouped_matmul::weights_of(t, axes);
  gate.N /= 2;
  Weights up = gate;
  up.data += (interleaved ? gate.row : gate.N * gate.row) * gate.bytes;
  if (interleaved) {
    gate.row *= 2;
    up.row *= 2;
  }
  return {gate, up};
}
// A matrix [N,K] as the weights of one group.
inline Weights matrix_of(const TensorView& t) {
  return {static_cast<char*>(t.data), t.sizes[0],          t.sizes[1], 0, t.strides[0], t.strides[1],
          data_type_index(t.dtype),   dtype_bytes(t.dtype)};
}

// hidden: what is kept of the routed experts, or absent.
Plan make_plan(const MoeExpertsInputs& in, const std::int32_t* ids, const MoeExpertsOptions& options,
               const TensorView& hidden, Scratch& scratch);

void forward(const Plan& p, const TensorView& out, Scratch& scratch);
void backward(const Plan& p, const TensorView& dout, const MoeExpertsGradients& out, const MoeExpertsOptions& options,
              Scratch& scratch);

// sigmoid(<router, x>) of the tokens of one task; tasks: how many there are.
std::int64_t gate_tasks(const Plan& p);
void run_gate_task(const Plan& p, std::int64_t task);

// A product of at most kBlockRows rows. `transposed`: rows times W instead of rows times W^T. later: what a product of
// the same kind will read next, or null.
struct Factor {
  const Weights& w;
  std::int64_t group, first, columns;
  bool transposed;
  const void* later = nullptr;
  bool same_rows = false;  // as in the product before, whose weight had the same type and strides, with the same room
};
void multiply(const Factor& f, const void* const* rows, int row_type, std::int64_t count, float* out,
              std::int64_t pitch, bool accumulate, float* room);

}  // namespace tidegate::moe_experts
