// Layers, and their decode step written out as separate operators.
#pragma once

#include <vector>

#include "guarded.h"
#include "tidegate/conv.h"
#include "tidegate/decode.h"
#include "tidegate/gating.h"
#include "tidegate/recurrent.h"

namespace tidegate::test {

struct LayerCase {
  std::vector<std::int64_t> lengths;
  std::int64_t HK = 2, G = 2, K = 24, V = 40, W = 4;
  DType dtype = DType::kBF16, storage = DType::kF32;
  std::int64_t S = 3, slots = 6;
  bool bias = true, v_first = false;
  Projection projection = Projection::kQkv;
  std::int64_t HV() const { return HK * G; }
  std::int64_t D() const { return 2 * HK * K + HV() * V; }
  std::int64_t tokens() const {
    std::int64_t sum = 0;
    for (const std::int64_t n : lengths) {
      sum += n;
    }
    return sum;
  }
};

struct Layer {
  LayerCase c;
  Tensor q, k, v, z, a, b;  // [T, heads * width], as the convolution and the norm want them
  Tensor conv_weight, conv_bias, A_log, dt_bias, norm_weight, conv_state, state;
  GdnPackedDecodeOptions options;
};

inline Layer make_layer(Random& random, const LayerCase& c) {
  const std::int64_t T = c.tokens();
  Layer l;
  l.c = c;
  l.q = normal(random, c.dtype, {T, c.HK * c.K});
  l.k = normal(random, c.dtype, {T, c.HK * c.K});
  l.v = normal(random, c.dtype, {T, c.HV() * c.V});
  l.z = normal(random, c.dtype, {T, c.HV() * c.V});
  l.a = normal(random, c.dtype, {T, c.HV()});
  l.b = normal(random, c.dtype, {T, c.HV()});
  l.conv_weight = normal(random, c.dtype, {c.D(), c.W}, {}, 0.5);
  l.conv_bias = c.bias ? normal(random, c.dtype, {c.D()}) : Tensor();
  l.A_log = normal(random, DType::kF32, {c.HV()});
  l.dt_bias = normal(random, DType::kF32, {c.HV()});
  l.norm_weight = normal(random, c.dtype, {c.V});
  l.conv_state = normal(random, c.dtype, {c.slots, c.D(), c.S}, permuted({0, 2, 1}));
  l.state = normal(random, c.storage, c.v_first ? Sizes{c.slots, c.HV(), c.V, c.K} : Sizes{c.slots, c.HV(), c.K, c.V});
  l.options.HK = c.HK;
  l.options.HV = c.HV();
  l.options.K = c.K;
  l.options.V = c.V;
  l.options.projection = c.projection;
  l.options.state_v_first = c.v_first;
  return l;
}

// Columns [begin, end) of `from` to columns of `to` from `first` on, every row.
inline void copy_columns(const Tensor& from, std::int64_t begin, std::int64_t end, Tensor& to, std::int64_t first) {
  const std::int64_t wide = from.view().size(1), width = to.view().size(1);
  for (std::int64_t t = 0; t < to.view().size(0); ++t) {
    for (std::int64_t c = begin; c < end; ++c) {
      to.set(t * width + first + c - begin, from.get(t * wide + c));
    }
  }
}

// The convolution's input: q, k, v side by side.
inline Tensor side_by_side(const Layer& l) {
  Tensor x(l.c.dtype, {l.c.tokens(), l.c.D()});
  const std::int64_t keys = l.c.HK * l.c.K;
  copy_columns(l.q, 0, keys, x, 0);
  copy_columns(l.k, 0, keys, x, keys);
  copy_columns(l.v, 0, l.c.HV() * l.c.V, x, 2 * keys);
  return x;
}

// What the projections hand over.
struct Projected {
  Tensor mixed, z, a, b;
};
inline Projected project(const Layer& l) {
  const LayerCase& c = l.c;
  if (c.projection == Projection::kQkv) {
    return {side_by_side(l), l.z, l.a, l.b};
  }
  const std::int64_t values = c.G * c.V, row = 2 * c.K + 2 * values;
  Tensor mixed(c.dtype, {c.tokens(), c.HK * row}), ba(c.dtype, {c.tokens(), 2 * c.HV()});
  for (std::int64_t h = 0; h < c.HK; ++h) {
    copy_columns(l.q, h * c.K, (h + 1) * c.K, mixed, h * row);
    copy_columns(l.k, h * c.K, (h + 1) * c.K, mixed, h * row + c.K);
    copy_columns(l.v, h * values, (h + 1) * values, mixed, h * row + 2 * c.K);
    copy_columns(l.z, h * values, (h + 1) * values, mixed, h * row + 2 * c.K + values);
    copy_columns(l.b, h * c.G, (h + 1) * c.G, ba, h * 2 * c.G);
    copy_columns(l.a, h * c.G, (h + 1) * c.G, ba, h * 2 * c.G + c.G);
  }
  return {mixed, {}, {}, ba};
}

// y of the operator; the pools of the layer are changed.
inline Tensor decode(const Layer& l, const SeqLens& seq) {
  const Projected in = project(l);
  Tensor y(l.c.dtype, {l.c.tokens(), l.c.HV() * l.c.V});
  gdn_packed_decode(in.mixed, in.z, in.a, in.b, l.conv_state, l.conv_weight, l.conv_bias, l.A_log, l.dt_bias, l.state,
                    l.norm_weight, y, seq, l.options);
  return y;
}

inline TensorView heads_view(const Tensor& t, std::int64_t first, std::int64_t heads, std::int64_t width) {
  TensorView v = part(t, 1, first, first + heads * width);
  v.rank = 3;
  v.sizes[1] = heads;
  v.sizes[2] = width;
  v.strides[1] = width;
  v.strides[2] = 1;
  return v;
}

// The same by separate operators.
inline Tensor decode_separately(const Layer& l, const SeqLens& seq) {
  const LayerCase& c = l.c;
  const std::int64_t T = c.tokens();
  std::vector<std::int64_t> rows(l.options.conv_indices.begin(), l.options.conv_indices.end());
  const auto M = static_cast<std::size_t>(std::max<std::int64_t>(l.options.states_per_sequence, 1));
  for (std::size_t n = 0; rows.size() < static_cast<std::size_t>(seq.count()); ++n) {
    rows.push_back(l.options.state_indices[n * M]);
  }
  Tensor mixed = side_by_side(l), x(c.dtype, {T, c.D()});
  CausalConv1dUpdateOptions conv;
  conv.activation = Activation::kSilu;
  conv.cache_indices = rows;
  conv.num_accepted_tokens = l.options.num_accepted_tokens;
  conv.pad_slot_id = l.options.null_slot;
  causal_conv1d_update(mixed, l.conv_state, l.conv_weight, l.conv_bias, x, seq, conv);
  Tensor g(DType::kF32, {T, c.HV()}), beta(c.dtype, {T, c.HV()}), o(c.dtype, {T, c.HV(), c.V});
  gdn_gating_fwd(l.a, l.b, l.A_log, l.dt_bias, g, beta, {.layout = Layout::kTND});
  RecurrentGatedDeltaRuleOptions rule;
  rule.use_qk_l2norm = true;
  rule.scale = l.options.scale;
  rule.state_v_first = c.v_first;
  rule.state_indices = l.options.state_indices;
  rule.states_per_sequence = l.options.states_per_sequence;
  rule.num_accepted_tokens = l.options.num_accepted_tokens;
  rule.null_slot = l.options.null_slot;
  const std::int64_t keys = c.HK * c.K;
  recurrent_gated_delta_rule(heads_view(x, 0, c.HK, c.K), heads_view(x, keys, c.HK, c.K),
                             heads_view(x, 2 * keys, c.HV(), c.V), g, {}, beta, l.state, o, seq, rule);
  Tensor y(c.dtype, {T, c.HV() * c.V}), rstd(DType::kF32, {T, c.HV()});
  rms_norm_gated_fwd(o, heads_view(l.z, 0, c.HV(), c.V), l.norm_weight, heads_view(y, 0, c.HV(), c.V), rstd,
                     l.options.norm);
  // The norm of a skipped sequence's zeros may be -0.
  for (std::int64_t n = 0; n < seq.count(); ++n) {
    const std::size_t a =
        l.options.num_accepted_tokens.empty()
            ? 0
            : static_cast<std::size_t>(l.options.num_accepted_tokens[static_cast<std::size_t>(n)] - 1);
    const bool skipped = l.options.state_indices[static_cast<std::size_t>(n) * M + a] == l.options.null_slot;
    for (std::int64_t i = seq[n].begin * c.HV() * c.V; skipped && i < seq[n].end * c.HV() * c.V; ++i) {
      y.set(i, 0.0);
    }
  }
  return y;
}

}  // namespace tidegate::test
