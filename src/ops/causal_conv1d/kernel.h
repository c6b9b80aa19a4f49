// What the checks hand to the kernels. Plain data: this header is compiled into every instruction set.
#pragma once

#include <stdint.h>

#include "base/dispatch.h"

namespace tidegate::causal_conv1d {

// Channels are cut into blocks of at most this many: 7 input rows, 4 taps and 4 output rows of a block stay in a 32 KB
// first-level cache.
inline constexpr int64_t kChannelBlock = 512;
// A task of the forward covers this many tokens, so that packing the block's weights is paid off.
inline constexpr int64_t kTokenBlock = 128;
// The backward sums this many tokens in fp32, then adds the block to an fp64 sum of the sequence.
inline constexpr int64_t kSumBlock = 64;

// A [B,T,D] or [B,n,T,D/n] tensor. Channel c of token t in row b stands at b*batch + (c / width)*head + t*token + c %
// width.
struct Grid {
  void* data;
  int64_t batch, head, token;
  int64_t width;
};

// Conv state [N,D,S]: element strides of the three dimensions. data is null when there is none.
struct State {
  void* data;
  int64_t row, channel, sample;
  int64_t length;
};

struct Weights {
  const void* data;  // [D,W], the type is part of the kernel's choice
  int64_t channel, tap;
  const float* bias;  // [D]
};

// How the channels of a block stand in its packed weights: as in memory, or each full group of 2 * kLanes channels as
// the data type's F32x2 has them (only bf16 differs). Then whole groups are computed at once.
enum class Order : uint8_t { kNatural, kPaired };

// Tokens [first, last) of a sequence that owns [begin, end) of row `row`; channels [channel, channel_end).
struct Tile {
  int64_t sequence, row, begin, end;
  int64_t first, last;
  int64_t channel, channel_end;
};

struct FwdArgs {
  Grid x, y;
  State initial;
  Order order;
  bool silu;
  bool stream;  // y is larger than the caches and aligned: write past them
};

enum class StateMode : uint8_t { kTail, kHead, kCircular, kSpeculative };

struct UpdateArgs {
  Grid x, y;
  State pool;
  StateMode mode;
  Order order;
  bool silu;
};
// One sequence of an update: its pool row, whether the row counts, and the mode's count (accepted or written samples).
struct UpdateRow {
  int64_t slot;
  bool fresh;
  int64_t count;
};

struct BwdArgs {
  Grid x, dy, dx;  // dx.data may be null
  State initial, dinitial, dfinal;
  float* dweight;  // [W][D] and
  float* dbias;    // [D], both may be null together
  int64_t channels;
  bool silu;
};
struct Span {
  int64_t row, begin, end;
};

// Indexed by data type and by W-2. `weights` is the block's packed part: [W+1][channels of the block], the bias last.
struct Kernels {
  void (*fwd[kDataTypes][3])(const FwdArgs&, const Tile&, const float* weights) noexcept;
  void (*update[kDataTypes][3])(const UpdateArgs&, const Tile&, const UpdateRow&, const float* weights) noexcept;
  void (*bwd[kDataTypes][3])(const BwdArgs&, const Span* sequences, int64_t count, int64_t channel, int64_t channel_end,
                             const float* weights, float* scratch, double* sums) noexcept;
  // Packs channels [channel, channel_end); indexed by the type of the weights. pair_odd: the order is kPaired for bf16
  // data.
  void (*pack[kDataTypes][3])(const Weights&, int64_t channel, int64_t channel_end, bool pair_odd, float* out) noexcept;
  int64_t group;  // 2 * kLanes
};

// fp32 numbers of scratch a backward task needs for W taps and a block of `channels`, and doubles for its sums.
inline constexpr int64_t bwd_scratch(int64_t W, int64_t channels) { return (2 * W + 4) * channels; }
inline constexpr int64_t bwd_sums(int64_t W, int64_t channels) { return (W + 1) * channels; }

}  // namespace tidegate::causal_conv1d

TIDEGATE_KERNEL_TABLE(causal_conv1d::Kernels, causal_conv1d_kernels)
