// What recurrent_gated_delta_rule.cpp hands to the kernels.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"
#include "base/heads.h"

namespace tidegate::recurrence {

// Columns of V that are computed together: 128 rows of them are 16 KB, half of a first cache.
inline constexpr int64_t kColumns = 32;
// Tokens that pass over a tile of the state in one go: their keys and queries fill the other half.
inline constexpr int64_t kTokens = 8;

// States [slot][head][rows][inner], inner stride 1. Rows are key channels, or value channels in V-first states.
struct States {
  void* data;  // null: absent
  int64_t slot, head, row;
};

// A gate tensor of any float type; data null: absent.
struct Gate {
  Heads at;
  int type;  // DType as an integer
};

struct Args {
  Heads q, k, v, o;
  Gate g, gk, beta;
  bool beta_per_channel;
  States from, to;
  const float* rate;     // [HV] exp(A_log): g is raw; null: g is the log decay
  const float* dt_bias;  // [HV], read if rate is not null
  int64_t group, K, V;   // value heads per key head, head sizes
  float scale, beta_scale;
  bool use_qk_l2norm, beta_sigmoid, v_first;
};

// One piece of work: some tiles of the states of one key head, over one sequence. Tile c is tile c % tiles of value
// head key_head * group + c / tiles.
struct Unit {
  int64_t row, begin, end;  // tokens
  int64_t key_head, first, last;
  int64_t start;         // slot to read; < 0: start from 0
  const int64_t* slots;  // where the state after token t goes is slots[t * slot_step]; < 0: nowhere
  int64_t slot_step;
  const void* ahead;  // the state that will be read after this unit; null: not known
};

// Indexed by data type, then by the type of the states: fp32, bf16. Workspace: floats that a run needs.
struct Kernels {
  int64_t (*workspace)(const Args&) noexcept;
  void (*run[kDataTypes][2])(const Args&, const Unit&, float* workspace) noexcept;
};

}  // namespace tidegate::recurrence

TIDEGATE_KERNEL_TABLE(recurrence::Kernels, recurrent_gated_delta_rule_kernels)
