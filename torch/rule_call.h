// The arguments that all forms of the delta rule share, from torch to the library.
#pragma once

#include "adapter.h"

namespace tidegate::adapter {

struct Sizes {
  std::int64_t rows, tokens, heads, width;
};

// Only what is needed to find boundaries and to allocate; the operator itself checks the rest.
inline Sizes sizes_of(std::string_view op, std::string_view name, const TensorView& t, Layout layout) {
  const int rank = has_batch(layout) ? 4 : 3;
  check(t.rank == rank, op, ": ", name, ": expected ", rank, " dimensions, got ", t.rank, " in ", Shape{t});
  const bool head_major = is_head_major(layout);
  return {has_batch(layout) ? t.size(0) : 1, t.size(head_major ? -2 : -3), t.size(head_major ? -3 : -2), t.size(-1)};
}

// The options that every form has, as torch hands them over.
struct Flags {
  bool use_qk_l2norm, beta_sigmoid;
  double beta_scale;
  const std::string& precision;
  const std::string& layout;
};

struct RuleCall {
  std::string_view op;
  TensorView k, v, g, beta;
  Sizes keys, values;
  SeqLens seq;
  ScalarType wide;  // of states
  ChunkGatedDeltaRuleOptions options;
};

inline RuleCall rule_call(std::string_view op, Tensor& k, Tensor& v, const Tensor& g, const Tensor& beta,
                          const Optional& cu_seqlens, const Optional& A_log, const Optional& dt_bias,
                          const Flags& flags) {
  ChunkGatedDeltaRuleOptions o;
  o.layout = parse_layout(op, flags.layout);
  o.precision = parse_precision(op, flags.precision);
  o.use_qk_l2norm = flags.use_qk_l2norm;
  o.beta_sigmoid = flags.beta_sigmoid;
  o.beta_scale = flags.beta_scale;
  o.A_log = view(op, "A_log", A_log);
  o.dt_bias = view(op, "dt_bias", dt_bias);
  const TensorView kv = dense(op, "k", k);
  const TensorView vv = dense(op, "v", v);
  const Sizes keys = sizes_of(op, "k", kv, o.layout);
  return {op,
          kv,
          vv,
          view(op, "g", g),
          view(op, "beta", beta),
          keys,
          sizes_of(op, "v", vv, o.layout),
          boundaries(op, cu_seqlens, keys.rows, keys.tokens),
          kv.dtype == DType::kF64 ? ScalarType::Double : ScalarType::Float,
          o};
}

// The options that speak of o and the states.
inline void add_output_options(RuleCall& c, std::optional<double> scale, bool state_v_first,
                               const std::optional<std::string>& out_layout) {
  c.options.scale = scale;
  c.options.state_v_first = state_v_first;
  if (out_layout.has_value()) {
    check(*out_layout == "BSND" || *out_layout == "TND" || *out_layout == "BNSD" || *out_layout == "NTD", c.op,
          ": out_layout: expected BSND, TND, BNSD or NTD, got ", *out_layout);
    c.options.out_layout = parse_layout(c.op, *out_layout);
  }
}

inline Tensor empty_output(const RuleCall& c) {
  const Layout layout = c.options.out_layout.value_or(c.options.layout);
  std::vector<std::int64_t> sizes = {c.keys.tokens, c.values.heads, c.values.width};
  if (is_head_major(layout)) {
    std::swap(sizes[0], sizes[1]);
  }
  if (has_batch(layout)) {
    sizes.insert(sizes.begin(), c.keys.rows);
  }
  return empty(sizes, scalar_type(c.k.dtype));
}

inline Tensor empty_states(const RuleCall& c, std::int64_t count) {
  const bool v_first = c.options.state_v_first;
  return empty(
      {count, c.values.heads, v_first ? c.values.width : c.keys.width, v_first ? c.keys.width : c.values.width},
      c.wide);
}

}  // namespace tidegate::adapter
