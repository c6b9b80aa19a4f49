// What chunk_gated_delta_rule.cpp hands to the kernels.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"
#include "base/heads.h"

namespace tidegate::chunk_gated_delta_rule {

// A gate at or below this resets the state: e^-104 is 0 in fp32.
inline constexpr float kReset = -104.0f;

// States [slot][head][K][V] of any float type and any strides.
struct States {
  void* data;  // null: absent
  int type;    // DType as an integer
  int64_t slot, head, key, value;
};

// A state to be written after `token` tokens of a sequence, to entry `index` of the snapshots.
struct Snapshot {
  int64_t token, index;
};

struct Args {
  Heads q, k, v, o;       // o null: only the state is wanted, q is null then too; v null: values are 0
  Heads g, beta;          // element strides; types below
  int g_type, beta_type;  // DType as an integer
  States initial, final_state, snapshots;
  const float* rate;     // [HV] exp(A_log): g is raw; null: g is the log decay
  const float* dt_bias;  // [HV], read if rate is not null
  int64_t group, K, V;   // value heads per key head, head sizes
  float scale, beta_scale;
  bool use_qk_l2norm, beta_sigmoid;
};

// One piece of work: some columns of the states of one key head, over one sequence. Columns are counted in panels over
// the value heads of the key head: column c is panel c % panels of value head key_head * group + c / panels.
struct Unit {
  int64_t row, begin, end;        // tokens
  int64_t read_slot, write_slot;  // of initial and final states; read_slot < 0: start from 0
  int64_t key_head, first, last;
  const Snapshot* snapshots;  // ascending by token
  int64_t snapshot_count;
};

// One way of multiplying. Indexed by data type, null where it does not exist. Workspace: floats that a run needs for
// `columns` columns.
struct Path {
  int64_t (*workspace)(const Args&, int64_t columns) noexcept;
  void (*run[kDataTypes])(const Args&, const Unit&, float* workspace) noexcept;
};
struct Kernels {
  int64_t chunk;  // tokens of a chunk
  int64_t panel;  // columns of V in a panel
  Path fp32, bf16;
};

}  // namespace tidegate::chunk_gated_delta_rule

TIDEGATE_KERNEL_TABLE(chunk_gated_delta_rule::Kernels, chunk_gated_delta_rule_kernels)
