// The experts of a call as sets of groups: the routed ones, and the shared one, to which every token goes.
#pragma once

#include "base/expert_ids.h"
#include "ops/grouped_matmul/tasks.h"
#include "ops/moe_experts/kernel.h"

namespace tidegate::moe_experts {

using grouped_matmul::Weights;

// Tokens whose sums a task has at a time: of kBlockColumns columns they are a megabyte of floats.
inline constexpr std::int64_t kTokenBlock = 2048;
// Or more columns of fewer tokens, so that weights are read in longer stretches: up to 512 while there are four tasks
// for every thread.
inline std::int64_t collect_columns(std::int64_t tokens, std::int64_t token_blocks, std::int64_t H,
                                    std::int64_t threads) {
  std::int64_t columns = grouped_matmul::kBlockColumns;
  while (columns < 512 && 2 * columns * tokens <= grouped_matmul::kBlockColumns * kTokenBlock &&
         token_blocks * ((H + 2 * columns - 1) / (2 * columns)) >= 4 * threads) {
    columns *= 2;
  }
  return columns;
}

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
  const std::int64_t* cuts;            // [groups * token_blocks + 1] of places: those of a group by blocks of tokens
  const std::int32_t* src;             // [places]: the pair; pair / slots is the token
  const std::int32_t* pos;             // [T * slots]: the place, or -1
  const float* place_weights;          // [places]
  const void** x_rows;                 // [places]
  char* a;                             // [places][width] of x's type; a forward may have packed them
  // gate and up that a forward keeps for the backward, fp32: of place j at hidden + j * hidden_row, and hidden_up
  // behind it. Absent: they live as long as their block.
  float* hidden;
  std::int64_t hidden_row, hidden_up;
  std::int64_t width() const { return gate.N; }
};

struct Plan {
  std::int64_t T, H;
  std::int64_t token_block, token_blocks;  // tokens whose results are collected at a time
  int type;                                // of x
  int bytes;                               // of an element of it
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

void forward(Plan p, const TensorView& out, Scratch& scratch);
void backward(Plan p, const TensorView& dout, const MoeExpertsGradients& out, const MoeExpertsOptions& options,
              Scratch& scratch);

inline char* take_hidden(const Plan& p, const Set& s, Scratch& scratch) {
  return take<char>(scratch, s.places * s.width() * p.bytes);
}

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
  // As in the product before, whose weight had the same type and strides, with the same room.
  bool same_rows = false, same_weight = false;
  const void* packed = nullptr;
};
grouped_matmul::Block block_of(const Factor& f, const void* const* rows, int row_type, std::int64_t count);
void multiply(const Factor& f, const void* const* rows, int row_type, std::int64_t count, float* out,
              std::int64_t pitch, bool accumulate, float* room);

}  // namespace tidegate::moe_experts
