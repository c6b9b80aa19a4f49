// Causal convolution: forward and update. Four tokens at a time share the loads of the seven rows they need:
//   p[t] = bias + w0 x[t-3] + w1 x[t-2] + w2 x[t-1] + w3 x[t],  y[t] = act(p[t])
// Rows are pointers, so history (from a state, or zeros) and tokens look the same to the arithmetic.
#include "ops/causal_conv1d/kernel.h"

#include "simd/lanes.h"
#include "simd/simd.h"

namespace tidegate::TIDEGATE_ISA {
namespace {

using namespace causal_conv1d;

constexpr int kTokens = 4;

// kCount outputs of kGroups * 2 * kLanes channels at c from kCount + W - 1 rows; taps are added oldest first, after the
// bias. The gate works on four vectors at a time.
template <int W, int kCount, int kGroups, bool kSilu, class T>
TIDEGATE_INLINE void conv_group(const T* const* rows, const float* w, int64_t pitch, T* const* out, int64_t c,
                                bool streamed) {
  constexpr int kVectors = 2 * kCount * kGroups;
  constexpr int kSet = kVectors < 4 ? kVectors : 4;
  F32 p[kVectors / kSet][kSet];
  const auto sum_at = [&](int i, int v) -> F32& {
    const int at = 2 * kGroups * i + v;
    return p[at / kSet][at % kSet];
  };
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kGroups; ++v) {
      sum_at(i, v) = load(w + W * pitch + c + v * kLanes);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kCount + W - 1; ++r) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      const F32x2 x = load2(rows[r] + c + g * 2 * kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        if (r - i >= 0 && r - i < W) {
          const float* tap = w + (r - i) * pitch + c + g * 2 * kLanes;
          sum_at(i, 2 * g) = fma(load(tap), x.a, sum_at(i, 2 * g));
          sum_at(i, 2 * g + 1) = fma(load(tap + kLanes), x.b, sum_at(i, 2 * g + 1));
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int s = 0; s < kVectors / kSet; ++s) {
    if (kSilu) {
      gate_group<true>(p[s], out[0]);
    }
#pragma GCC unroll 2
    for (int v = 0; v < kSet; v += 2) {
      const int at = s * kSet + v;
      const F32x2 y = {p[s][v], p[s][v + 1]};
      T* to = out[at / (2 * kGroups)] + c + at % (2 * kGroups) * kLanes;
      streamed ? stream2(to, y) : store2(to, y);
    }
  }
}

// The same for the channels of one vector or its first lanes, in natural order.
template <int W, int kCount, bool kSilu, class T, class Lanes>
TIDEGATE_INLINE void conv_vector(const T* const* rows, const float* w, int64_t pitch, T* const* out, int64_t c,
                                 Lanes lanes) {
  for (int i = 0; i < kCount; ++i) {
    F32 p[1] = {lanes.get(w + W * pitch + c)};
    for (int j = 0; j < W; ++j) {
      p[0] = fma(lanes.get(w + j * pitch + c), lanes.get(rows[i + j] + c), p[0]);
    }
    if (kSilu) {
      gate_group<true>(p, out[0]);
    }
    lanes.put(out[i] + c, p[0]);
  }
}

// Asks for what comes `ahead` elements after the rows that are new to these tokens: the next tokens, or the next
// channels of a single one. Pieces of rows are too short for the caches to foresee that.
template <int W, int kCount, bool kSilu, class T>
void conv_rows(const T* const* rows, const float* w, int64_t pitch, T* const* out, int64_t n, Order order,
               int64_t ahead, bool streamed) {
  constexpr int kGroups = kTokens / kCount;  // a single token takes several groups, for as many chains at a time
  constexpr int64_t kChannels = kGroups * 2 * kLanes;
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  int64_t c = 0;
  for (; order == Order::kPaired && c + kChannels <= n; c += kChannels) {
    for (int r = kCount == 1 ? 0 : W - 1; r < kCount + W - 1; ++r) {
      for (int64_t e = 0; e < kChannels; e += kLine) {
        prefetch(rows[r] + ahead + c + e);
      }
    }
    conv_group<W, kCount, kGroups, kSilu>(rows, w, pitch, out, c, streamed);
  }
  for (; order == Order::kPaired && c + 2 * kLanes <= n; c += 2 * kLanes) {
    conv_group<W, kCount, 1, kSilu>(rows, w, pitch, out, c, streamed);
  }
  for_lanes(n - c, [&](int64_t i, auto lanes) { conv_vector<W, kCount, kSilu>(rows, w, pitch, out, c + i, lanes); });
}

template <class T>
TIDEGATE_INLINE T* at(const Grid& g, int64_t row, int64_t channel, int64_t token) {
  const int64_t head = channel / g.width;
  return static_cast<T*>(g.data) + row * g.batch + head * g.head + token * g.token + (channel - head * g.width);
}

template <class T>
TIDEGATE_INLINE T* at(const State& s, int64_t row, int64_t channel, int64_t sample) {
  return static_cast<T*>(s.data) + row * s.row + channel * s.channel + sample * s.sample;
}

// One state sample of n channels, to and from a dense row.
template <class T>
void get_sample(const State& s, int64_t row, int64_t channel, int64_t sample, T* out, int64_t n) {
  const T* p = at<const T>(s, row, channel, sample);
  if (s.channel == 1) {
    memcpy(out, p, static_cast<size_t>(n) * sizeof(T));
    return;
  }
  for (int64_t c = 0; c < n; ++c) {
    out[c] = p[c * s.channel];
  }
}
template <class T>
void put_sample(const State& s, int64_t row, int64_t channel, int64_t sample, const T* in, int64_t n) {
  T* p = at<T>(s, row, channel, sample);
  if (s.channel == 1) {
    memcpy(p, in, static_cast<size_t>(n) * sizeof(T));
    return;
  }
  for (int64_t c = 0; c < n; ++c) {
    p[c * s.channel] = in[c];
  }
}

// Channels of a tile that are contiguous in both tensors, from `channel` on.
TIDEGATE_INLINE int64_t segment_end(const Grid& x, const Grid& y, int64_t channel, int64_t end) {
  const int64_t x_end = (channel / x.width + 1) * x.width;
  const int64_t y_end = (channel / y.width + 1) * y.width;
  const int64_t nearest = x_end < y_end ? x_end : y_end;
  return nearest < end ? nearest : end;
}

// All tokens of a tile for the channels [channel, channel + n); history[i] is the row W-1-i samples before `begin`.
template <int W, bool kSilu, class T>
void conv_segment(const Grid& x, const Grid& y, const Tile& tile, const T* const* history, int64_t channel, int64_t n,
                  const float* w, int64_t pitch, Order order, bool streamed) {
  const T* rows[kTokens + W - 1];
  T* out[kTokens];
  const auto source = [&](int64_t t) {
    return t >= tile.begin ? at<const T>(x, tile.row, channel, t) : history[t - tile.begin + W - 1];
  };
  int64_t t = tile.first;
  for (; t + kTokens <= tile.last; t += kTokens) {
    for (int r = 0; r < kTokens + W - 1; ++r) {
      rows[r] = source(t + r - (W - 1));
    }
    for (int i = 0; i < kTokens; ++i) {
      out[i] = at<T>(y, tile.row, channel, t + i);
    }
    conv_rows<W, kTokens, kSilu, T>(rows, w, pitch, out, n, order, kTokens * x.token, streamed);
  }
  for (; t < tile.last; ++t) {
    for (int r = 0; r < W; ++r) {
      rows[r] = source(t + r - (W - 1));
    }
    out[0] = at<T>(y, tile.row, channel, t);
    conv_rows<W, 1, kSilu, T>(rows, w, pitch, out, n, order, kChannelBlock, false);
  }
}

template <class T, int W>
void conv_tile(const Grid& x, const Grid& y, const Tile& tile, const T* const* history, const float* w, Order order,
               bool with_silu, bool streamed) {
  const int64_t pitch = tile.channel_end - tile.channel;
  for (int64_t channel = tile.channel; channel < tile.channel_end;) {
    const int64_t end = segment_end(x, y, channel, tile.channel_end);
    const int64_t skip = channel - tile.channel;
    const T* past[W - 1];
    for (int i = 0; i < W - 1; ++i) {
      past[i] = history[i] + skip;
    }
    const auto run = with_silu ? conv_segment<W, true, T> : conv_segment<W, false, T>;
    run(x, y, tile, past, channel, end - channel, w + skip, pitch, order, streamed);
    channel = end;
  }
}

template <class T, int W>
void fwd(const FwdArgs& a, const Tile& tile, const float* weights) noexcept {
  T past[W - 1][kChannelBlock];
  const T* history[W - 1];
  for (int i = 0; i < W - 1; ++i) {
    history[i] = past[i];
  }
  if (tile.first - tile.begin < W - 1) {  // the first tokens of a sequence look back beyond it
    const int64_t n = tile.channel_end - tile.channel;
    for (int i = 0; i < W - 1; ++i) {
      if (a.initial.data != nullptr) {
        get_sample(a.initial, tile.sequence, tile.channel, a.initial.length - (W - 1) + i, past[i], n);
      } else {
        memset(past[i], 0, static_cast<size_t>(n) * sizeof(T));
      }
    }
  }
  conv_tile<T, W>(a.x, a.y, tile, history, weights, a.order, a.silu, a.stream);
  if (a.stream) {
    stream_fence();
  }
}

template <class T, int W>
void update(const UpdateArgs& a, const Tile& tile, const UpdateRow& row, const float* weights) noexcept {
  const int64_t n = tile.channel_end - tile.channel;
  const int64_t S = a.pool.length;
  const int64_t L = tile.end - tile.begin;
  T past[W - 1][kChannelBlock];
  const T* history[W - 1];
  T buffer[kChannelBlock];
  if (row.fresh) {  // the old row counts as zeros
    memset(buffer, 0, sizeof buffer);
    for (int64_t column = 0; column < S; ++column) {
      put_sample(a.pool, row.slot, tile.channel, column, buffer, n);
    }
  }
  for (int i = 0; i < W - 1; ++i) {
    int64_t column = S - (W - 1) + i;
    if (a.mode == StateMode::kHead) {
      column = i;
    } else if (a.mode == StateMode::kSpeculative) {
      column = row.count - 1 + i;
    } else if (a.mode == StateMode::kCircular) {
      column = ((row.count - (W - 1) + i) % S + S) % S;
    }
    // Samples whose channels are neighbours are used where they stand: below, a column is written only after all
    // samples that it and the columns before it take.
    if (a.pool.channel == 1) {
      history[i] = at<const T>(a.pool, row.slot, tile.channel, column);
    } else {
      get_sample(a.pool, row.slot, tile.channel, column, past[i], n);
      history[i] = past[i];
    }
  }
  conv_tile<T, W>(a.x, a.y, tile, history, weights, a.order, a.silu, false);

  // The row takes in the new samples. sample(i), i < 0: history, i >= 0: token i of the call.
  const auto put = [&](int64_t column, int64_t i) {
    if (i < 0) {
      put_sample(a.pool, row.slot, tile.channel, column, history[i + W - 1], n);
      return;
    }
    for (int64_t channel = tile.channel; channel < tile.channel_end;) {
      const int64_t end = segment_end(a.x, a.x, channel, tile.channel_end);
      put_sample(a.pool, row.slot, channel, column, at<const T>(a.x, tile.row, channel, tile.begin + i), end - channel);
      channel = end;
    }
  };
  if (a.mode == StateMode::kSpeculative) {
    for (int64_t column = 0; column < W - 2 + L; ++column) {
      put(column, column - (W - 2));
    }
  } else if (a.mode == StateMode::kCircular) {
    for (int64_t i = L > S ? L - S : 0; i < L; ++i) {
      put((row.count + i) % S, i);
    }
  } else if (a.mode == StateMode::kHead) {
    for (int64_t column = 0; column < W - 1; ++column) {
      put(column, L + column - (W - 1));
    }
  } else {
    for (int64_t column = 0; column < S; ++column) {
      const int64_t i = column + L - S;  // sample that moves here
      if (i >= -(W - 1)) {
        put(column, i);
      } else {
        get_sample(a.pool, row.slot, tile.channel, column + L, buffer, n);
        put_sample(a.pool, row.slot, tile.channel, column, buffer, n);
      }
    }
  }
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA

#include "ops/causal_conv1d/backward.kernel.h"
#include "ops/causal_conv1d/pack.kernel.h"

namespace tidegate::TIDEGATE_ISA {

#define TIDEGATE_WIDTHS(fn, T) \
  { fn<T, 2>, fn<T, 3>, fn<T, 4> }
#define TIDEGATE_ENTRY(fn) \
  { TIDEGATE_WIDTHS(fn, float), TIDEGATE_WIDTHS(fn, bf16), TIDEGATE_WIDTHS(fn, f16) }
extern const causal_conv1d::Kernels causal_conv1d_kernels = {TIDEGATE_ENTRY(fwd), TIDEGATE_ENTRY(update),
                                                             TIDEGATE_ENTRY(bwd), TIDEGATE_ENTRY(pack), 2 * kLanes};

}  // namespace tidegate::TIDEGATE_ISA
