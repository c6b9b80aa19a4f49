// Decisions of the convolution that do not depend on its data: how channels are cut, where stores go, packed weights.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/arena.h"
#include "base/element.h"
#include "ops/causal_conv1d/problem.h"

namespace tidegate::causal_conv1d {

inline std::int64_t channel_blocks(std::int64_t channels) { return (channels + kChannelBlock - 1) / kChannelBlock; }

// Channel blocks of a task of the update, which is one sequence. Rows of states are best read from end to end; only few
// sequences are cut, into about 64 tasks.
inline std::int64_t update_blocks(std::int64_t sequences, std::int64_t blocks) {
  return std::clamp<std::int64_t>(sequences * blocks / 64, 1, std::max<std::int64_t>(blocks, 1));
}

// Outputs beyond this size will not be found in a cache by their reader; writing past the caches saves reading the
// lines first. 16 MB: half of a 32 MB last-level cache, the other half holds what the reader needs besides.
inline constexpr std::int64_t kStreamBytes = std::int64_t{16} << 20;

// Streaming stores need aligned addresses: every run of channels that x and y share must start at a cache line of y.
inline bool should_stream(const TensorView& y, const Grid& g, const Grid& x) {
  const std::int64_t bytes = dtype_bytes(y.dtype);
  const auto base = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(y.data));
  const std::int64_t steps = base | (g.batch * bytes) | (g.head * bytes) | (g.token * bytes) | (kChannelBlock * bytes);
  const bool rows_aligned = steps % 64 == 0 && (g.width * bytes) % 64 == 0 && (x.width * bytes) % 64 == 0;
  return rows_aligned && y.numel() * bytes > kStreamBytes;
}

// Whole groups can be used where every run of channels that x and y share is made of them (a run that ends with the
// last channel may have a rest).
inline Order order_of(const Grid& x, const Grid& y, std::int64_t channels, std::int64_t group) {
  const auto whole = [&](const Grid& g) { return g.width == channels || g.width % group == 0; };
  return whole(x) && whole(y) ? Order::kPaired : Order::kNatural;
}

// Weights and bias as fp32 [W+1][n] for each channel block of n channels, the bias (or zeros) last.
struct PackedWeights {
  const float* weights;
  std::int64_t taps;
  const float* block(std::int64_t channel) const { return weights + channel * (taps + 1); }
};

inline PackedWeights pack_weights(const TensorView& weight, const TensorView& bias, const Problem& p,
                                  const Kernels& kernels, bool pair_odd, Scratch& scratch) {
  float* packed = scratch.floats(p.channels * (p.taps + 1));
  float* wide_bias = scratch.floats(p.channels);
  std::fill(wide_bias, wide_bias + p.channels, 0.0f);
  if (bias.defined()) {
    copy_parameter(bias, wide_bias);
  }
  Weights source{weight.data, weight.strides[0], weight.strides[1], wide_bias};
  DType type = weight.dtype;
  if (type == DType::kF64) {
    float* narrow = scratch.floats(p.channels * p.taps);
    for (std::int64_t c = 0; c < p.channels; ++c) {
      for (std::int64_t j = 0; j < p.taps; ++j) {
        narrow[c * p.taps + j] = static_cast<float>(read_element(weight, offset_of(weight, c, j)));
      }
    }
    source = {narrow, p.taps, 1, wide_bias};
    type = DType::kF32;
  }
  const auto pack = kernels.pack[data_type_index(type)][static_cast<std::size_t>(p.taps - 2)];
  for (std::int64_t c = 0; c < p.channels; c += kChannelBlock) {
    pack(source, c, std::min(c + kChannelBlock, p.channels), pair_odd, packed + c * (p.taps + 1));
  }
  return {packed, p.taps};
}

}  // namespace tidegate::causal_conv1d
