// Causal convolution, backward. One task owns a block of channels and walks all sequences in order:
//   e[t] = dy[t] act'(p[t])    dweight_j += e[t] x[t-(W-1)+j]    dbias += e[t]    dx[u] = sum_i w[W-1-i] e[u+i]
// After step t the value dx[u], u = t-(W-1), is complete; u < 0 is the history, whose gradient goes to the initial
// state. Four steps at a time inside a sequence, single ones at its ends; both do the same operations in the same
// order.
#pragma once

namespace tidegate::TIDEGATE_ISA {
namespace {

// Scratch rows of a task, each `pitch` floats: W-1 old e rows and kTokens new ones, W+1 block sums.
template <int W>
struct BackwardRows {
  float* e;     // [W-1 + kTokens][pitch], row W-1+i is step i of the current tile
  float* sums;  // [W+1][pitch]: dweight taps, then dbias
  int64_t pitch;
};

template <int W, int kCount, bool kSilu, class T, class Lanes>
TIDEGATE_INLINE void bwd_vector(const T* const* rows, const T* const* dy, const float* w, const BackwardRows<W>& s,
                                T* const* dx, float* const* dx_float, int64_t c, Lanes lanes) {
  const int64_t pitch = s.pitch;
  F32 tap[W];
  F32 x[kCount + W - 1];
  F32 e[kCount + W - 1];
  for (int j = 0; j < W; ++j) {
    tap[j] = lanes.get(w + j * pitch + c);
  }
  for (int r = 0; r < kCount + W - 1; ++r) {
    x[r] = lanes.get(rows[r] + c);
  }
  for (int r = 0; r < W - 1; ++r) {
    e[r] = lanes.get(s.e + r * pitch + c);
  }
  F32 bias_sum = lanes.get(s.sums + W * pitch + c);
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) {
    F32 slope = set1(1.0f);
    if (kSilu) {
      F32 p = lanes.get(w + W * pitch + c);
#pragma GCC unroll 4
      for (int j = 0; j < W; ++j) {
        p = fma(tap[j], x[i + j], p);
      }
      slope = silu_slope(p, sigmoid(p));
    }
    e[W - 1 + i] = lanes.get(dy[i] + c) * slope;
    bias_sum = bias_sum + e[W - 1 + i];
    lanes.put(s.e + (W - 1 + i) * pitch + c, e[W - 1 + i]);
  }
  lanes.put(s.sums + W * pitch + c, bias_sum);
#pragma GCC unroll 4
  for (int j = 0; j < W; ++j) {
    F32 sum = lanes.get(s.sums + j * pitch + c);
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      sum = fma(e[W - 1 + i], x[i + j], sum);
    }
    lanes.put(s.sums + j * pitch + c, sum);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) {
    F32 d = tap[W - 1] * e[i];
#pragma GCC unroll 4
    for (int k = 1; k < W; ++k) {
      d = fma(tap[W - 1 - k], e[i + k], d);
    }
    if (dx_float[i] != nullptr) {
      lanes.put(dx_float[i] + c, d);
    } else if (dx[i] != nullptr) {
      lanes.put(dx[i] + c, d);
    }
  }
}

template <int W, int kCount, bool kSilu, class T>
void bwd_rows(const T* const* rows, const T* const* dy, const float* w, const BackwardRows<W>& s, T* const* dx,
              float* const* dx_float, int64_t n) {
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) {
    bwd_vector<W, kCount, kSilu>(rows, dy, w, s, dx, dx_float, c, AllLanes{});
  }
  if (c < n) {
    bwd_vector<W, kCount, kSilu>(rows, dy, w, s, dx, dx_float, c, FirstLanes{n - c});
  }
  for (int r = 0; r < W - 1; ++r) {  // the last W-1 e rows become the old ones
    memcpy(s.e + r * s.pitch, s.e + (r + kCount) * s.pitch, static_cast<size_t>(n) * sizeof(float));
  }
}

// dx of one sample: add the final state's gradient where it reaches, round, store.
template <class T>
void emit(const BwdArgs& a, int64_t sequence, const Span& span, int64_t u, const float* value, int64_t channel,
          int64_t n) {
  const int64_t L = span.end - span.begin;
  T* out = nullptr;
  int64_t step = 1;
  if (u >= 0) {
    out = a.dx.data != nullptr ? at<T>(a.dx, span.row, channel, span.begin + u) : nullptr;
  } else if (a.dinitial.data != nullptr && u >= -a.dinitial.length) {
    out = at<T>(a.dinitial, sequence, channel, a.dinitial.length + u);
    step = a.dinitial.channel;
  }
  if (out == nullptr) {
    return;
  }
  const int64_t column = a.dfinal.data != nullptr ? u - L + a.dfinal.length : -1;
  const T* extra = column >= 0 ? at<const T>(a.dfinal, sequence, channel, column) : nullptr;
  for (int64_t c = 0; c < n; ++c) {
    const float sum =
        (value != nullptr ? value[c] : 0.0f) + (extra != nullptr ? widen(extra[c * a.dfinal.channel]) : 0.0f);
    narrow(sum, out + c * step);
  }
}

// One sequence and the channels [channel, channel + n), contiguous in all three tensors.
template <int W, bool kSilu, class T>
void bwd_sequence(const BwdArgs& a, int64_t sequence, const Span& span, int64_t channel, int64_t n, const float* w,
                  const BackwardRows<W>& s, double* total) {
  const int64_t L = span.end - span.begin;
  T history[W - 1][kChannelBlock];
  const T* rows[kTokens + W - 1];
  const T* dy[kTokens];
  T* dx[kTokens] = {};
  float* dx_float[kTokens] = {};
  float value[kChannelBlock];
  for (int i = 0; i < W - 1; ++i) {
    if (a.initial.data != nullptr) {
      get_sample(a.initial, sequence, channel, a.initial.length - (W - 1) + i, history[i], n);
    } else {
      memset(history[i], 0, static_cast<size_t>(n) * sizeof(T));
    }
    memset(s.e + i * s.pitch, 0, static_cast<size_t>(n) * sizeof(float));
  }
  const auto source = [&](int64_t t) {
    return t >= 0 ? at<const T>(a.x, span.row, channel, span.begin + t) : history[t + W - 1];
  };
  for (int j = 0; j <= W; ++j) {
    memset(s.sums + j * s.pitch, 0, static_cast<size_t>(n) * sizeof(float));
    memset(total + j * s.pitch, 0, static_cast<size_t>(n) * sizeof(double));
  }

  // Samples from `special` on also receive the gradient of the final state, one at a time.
  const int64_t special = a.dfinal.data != nullptr ? L - a.dfinal.length : L;
  for (int64_t u = -a.dinitial.length; u < -(W - 1); ++u) {  // older than the window: only the final state reaches them
    emit<T>(a, sequence, span, u, nullptr, channel, n);
  }
  for (int64_t t = 0; t < L;) {
    const bool tile = t >= kTokens && t + kTokens <= L && t + kTokens - (W - 1) <= special && t % kTokens == 0;
    const int count = tile ? kTokens : 1;
    for (int r = 0; r < count + W - 1; ++r) {
      rows[r] = source(t + r - (W - 1));
    }
    for (int i = 0; i < count; ++i) {
      dy[i] = at<const T>(a.dy, span.row, channel, span.begin + t + i);
    }
    if (tile) {
      for (int i = 0; i < kTokens && a.dx.data != nullptr; ++i) {
        dx[i] = at<T>(a.dx, span.row, channel, span.begin + t + i - (W - 1));
      }
      dx_float[0] = nullptr;
      bwd_rows<W, kTokens, kSilu, T>(rows, dy, w, s, dx, dx_float, n);
    } else {
      dx_float[0] = value;
      bwd_rows<W, 1, kSilu, T>(rows, dy, w, s, dx, dx_float, n);
      emit<T>(a, sequence, span, t - (W - 1), value, channel, n);
    }
    t += count;
    if (t % kSumBlock == 0 || t == L) {  // a block of tokens is complete
      for (int j = 0; j <= W; ++j) {
        for (int64_t c = 0; c < n; ++c) {
          total[j * s.pitch + c] += static_cast<double>(s.sums[j * s.pitch + c]);
        }
        memset(s.sums + j * s.pitch, 0, static_cast<size_t>(n) * sizeof(float));
      }
    }
  }
  for (int64_t u = L - (W - 1); u < L; ++u) {  // the last samples have fewer than W tokens after them
    for (int64_t c = 0; c < n; ++c) {
      float d = 0.0f;
      for (int k = 0; k < W - 1 - (u - (L - (W - 1))); ++k) {
        d += w[(W - 1 - k) * s.pitch + c] * s.e[(u - (L - (W - 1)) + k) * s.pitch + c];
      }
      value[c] = d;
    }
    emit<T>(a, sequence, span, u, value, channel, n);
  }
}

template <class T, int W>
void bwd(const BwdArgs& a, const Span* sequences, int64_t count, int64_t first, int64_t last, const float* weights,
         float* scratch, double* sums) noexcept {
  const int64_t pitch = last - first;
  for (int64_t channel = first; channel < last;) {
    int64_t end = segment_end(a.x, a.dy, channel, last);
    end = a.dx.data != nullptr ? segment_end(a.dx, a.dx, channel, end) : end;
    const int64_t n = end - channel;
    const int64_t skip = channel - first;
    const BackwardRows<W> rows = {scratch + skip, scratch + (W - 1 + kTokens) * pitch + skip, pitch};
    for (int64_t i = 0; i < count; ++i) {
      const auto run = a.silu ? bwd_sequence<W, true, T> : bwd_sequence<W, false, T>;
      run(a, i, sequences[i], channel, n, weights + skip, rows, sums + skip);
      if (a.dweight == nullptr) {
        continue;
      }
      for (int j = 0; j <= W; ++j) {  // sequence by sequence in fp32: the same bits as separate calls added up
        float* out = j < W ? a.dweight + j * a.channels + channel : a.dbias + channel;
        for (int64_t c = 0; c < n; ++c) {
          out[c] += static_cast<float>(sums[j * pitch + skip + c]);
        }
      }
    }
    channel = end;
  }
}

}  // namespace
}  // namespace tidegate::TIDEGATE_ISA
