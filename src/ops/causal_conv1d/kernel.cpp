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

// kCount outputs of 2 * kLanes channels at c from kCount + W - 1 rows; taps are added oldest first, after the bias.
template <int W, int kCount, bool kSilu, class T>
TIDEGATE_INLINE void conv_group(const T* const* rows, const float* w, int64_t pitch, T* const* out, int64_t c) {
  constexpr int kSets = (kCount + 1) / 2;  // the gate works on two tokens at a time
  constexpr int kVectors = 2 * kCount / kSets;
  F32 p[kSets][kVectors];
  const float* bias = w + W * pitch + c;
  for (int i = 0; i < kCount; ++i) {
    p[i / 2][i % 2 * 2] = load(bias);
    p[i / 2][i % 2 * 2 + 1] = load(bias + kLanes);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kCount + W - 1; ++r) {
    const F32x2 x = load2(rows[r] + c);
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      if (r - i >= 0 && r - i < W) {
        const float* tap = w + (r - i) * pitch + c;
        p[i / 2][i % 2 * 2] = fma(load(tap), x.a, p[i / 2][i % 2 * 2]);
        p[i / 2][i % 2 * 2 + 1] = fma(load(tap + kLanes), x.b, p[i / 2][i % 2 * 2 + 1]);
      }
    }
  }
#pragma GCC unroll 2
  for (int s = 0; s < kSets; ++s) {
    if (kSilu) {
      gate_group<true>(p[s], out[0]);
    }
    for (int i = 0; i < kVectors / 2; ++i) {
      const F32x2 y = {p[s][2 * i], p[s][2 * i + 1]};
      store2(out[2 * s + i] + c, y);
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

template <int W, int kCount, bool kSilu, class T>
void conv_rows(const T* const* rows, const float* w, int64_t pitch, T* const* out, int64_t n, Order order) {
  int64_t c = 0;
  for (; order == Order::kPaired && c + 2 * kLanes <= n; c += 2 * kLanes) {
    conv_group<W, kCount, kSilu>(rows, w, pitch, out, c);
  }
  for_lanes(n - c, [&](int64_t i, auto lanes) { conv_vector<W, kCount, kSilu>(rows, w, pitch, out, c + i, lanes); });
}

// A row on its way past the caches: whole vectors, then the rest as usual.
template <class T>
void stream_row(T* to, const T* from, int64_t n) {
  constexpr int64_t kFloats = sizeof(float) / sizeof(T) * kLanes;  // elements of T in a vector of floats
  int64_t c = 0;
  for (; c + kFloats <= n; c += kFloats) {
    stream(reinterpret_cast<float*>(to + c), load(reinterpret_cast<const float*>(from + c)));
  }
  memcpy(to + c, from + c, static_cast<size_t>(n - c) * sizeof(T));
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
  alignas(64) T staged[kTokens][kChannelBlock];
  const auto source = [&](int64_t t) {
    return t >= tile.begin ? at<const T>(x, tile.row, channel, t) : history[t - tile.begin + W - 1];
  };
  int64_t t = tile.first;
  for (; t + kTokens <= tile.last; t += kTokens) {
    for (int r = 0; r < kTokens + W - 1; ++r) {
      rows[r] = source(t + r - (W - 1));
    }
    // Rows of a wide tensor often lie a multiple of 4096 bytes apart; writing four of them at once makes the caches and
    // the store buffer collide. A large result is therefore put together here and leaves row by row.
    for (int i = 0; i < kTokens; ++i) {
      out[i] = streamed ? staged[i] : at<T>(y, tile.row, channel, t + i);
    }
    conv_rows<W, kTokens, kSilu, T>(rows, w, pitch, out, n, order);
    for (int i = 0; i < kTokens && streamed; ++i) {
      stream_row(at<T>(y, tile.row, channel, t + i), staged[i], n);
    }
  }
  for (; t < tile.last; ++t) {
    for (int r = 0; r < W; ++r) {
      rows[r] = source(t + r - (W - 1));
    }
    out[0] = at<T>(y, tile.row, channel, t);
    conv_rows<W, 1, kSilu, T>(rows, w, pitch, out, n, order);
  }
}

template <class T, int W>
void conv_tile(const Grid& x, const Grid& y, const Tile& tile, const T history[][kChannelBlock], const float* w,
               Order order, bool with_silu, bool streamed) {
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
  T history[W - 1][kChannelBlock];
  if (tile.first - tile.begin < W - 1) {  // the first tokens of a sequence look back beyond it
    const int64_t n = tile.channel_end - tile.channel;
    for (int i = 0; i < W - 1; ++i) {
      if (a.initial.data != nullptr) {
        get_sample(a.initial, tile.sequence, tile.channel, a.initial.length - (W - 1) + i, history[i], n);
      } else {
        memset(history[i], 0, static_cast<size_t>(n) * sizeof(T));
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
  T history[W - 1][kChannelBlock];
  T buffer[kChannelBlock] = {};
  if (row.fresh) {  // the old row counts as zeros
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
    get_sample(a.pool, row.slot, tile.channel, column, history[i], n);
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
