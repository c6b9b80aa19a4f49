#include "base/delta_checks.h"

namespace tidegate {
namespace {

// Dimension numbers of batch (-1 if none), token and head.
struct Order {
  int row, token, head;
};
Order order_of(Layout layout) {
  const int first = has_batch(layout) ? 1 : 0;
  return {first - 1, is_head_major(layout) ? first + 1 : first, is_head_major(layout) ? first : first + 1};
}

int tensor_rank(Layout layout, bool gate) { return (has_batch(layout) ? 4 : 3) - (gate ? 1 : 0); }

Heads strides_of(const TensorView& t, Layout layout) {
  if (!t.defined()) {
    return {};
  }
  const Order o = order_of(layout);
  return {t.data, o.row < 0 ? 0 : t.strides[o.row], t.strides[o.token], t.strides[o.head]};
}

}  // namespace

Heads heads_of(const TensorView& t, Layout layout) { return strides_of(t, layout); }
Heads gates_of(const TensorView& t, Layout layout) { return strides_of(t, layout); }

void check_tokens_heads(std::string_view op, Named t, Layout layout, const DeltaSizes& s, std::int64_t heads,
                        std::int64_t width) {
  check_present(op, t);
  const Order o = order_of(layout);
  TensorView expected{};
  expected.rank = tensor_rank(layout, width == 0);
  if (o.row >= 0) {
    expected.sizes[o.row] = s.B;
  }
  expected.sizes[o.token] = s.T;
  expected.sizes[o.head] = heads;
  if (width > 0) {
    expected.sizes[expected.rank - 1] = width;
  }
  check(t.tensor.rank == expected.rank && std::equal(expected.sizes, expected.sizes + expected.rank, t.tensor.sizes),
        op, ": ", t.name, ": expected shape ", Shape{expected}, ", got ", Shape{t.tensor});
  if (width > 0) {
    check_inner_stride(op, t);
  }
}

DeltaSizes key_sizes(std::string_view op, Named k, Layout layout) {
  check_present(op, k);
  check_rank(op, k, tensor_rank(layout, false));
  check_data_type(op, k);
  check_inner_stride(op, k);
  const Order o = order_of(layout);
  const TensorView& t = k.tensor;
  DeltaSizes s{};
  s.B = o.row < 0 ? 1 : t.sizes[o.row];
  s.T = t.sizes[o.token];
  s.HK = t.sizes[o.head];
  s.K = t.sizes[t.rank - 1];
  check(s.HK >= 1, op, ": ", k.name, ": expected at least 1 head, got ", s.HK);
  check(s.K >= 1, op, ": ", k.name, ": expected at least 1 channel, got ", s.K);
  return s;
}

void value_sizes(std::string_view op, Named v, Named k, Layout layout, DeltaSizes& s) {
  check_present(op, v);
  check_rank(op, v, tensor_rank(layout, false));
  check_same_dtype(op, v, k);
  const TensorView& t = v.tensor;
  s.HV = t.sizes[order_of(layout).head];
  s.V = t.sizes[t.rank - 1];
  check(s.HV >= 1 && s.HV % s.HK == 0, op, ": ", v.name, ": expected a multiple of ", s.HK, " (key heads) heads, got ",
        s.HV);
  check(s.V >= 1, op, ": ", v.name, ": expected at least 1 channel, got ", s.V);
  check_tokens_heads(op, v, layout, s, s.HV, s.V);
}

void check_boundaries(std::string_view op, const SeqLens& seq, const DeltaSizes& s) {
  check(seq.rows() == s.B && seq.tokens() == s.T, op, ": seq: expected ", s.B, " rows of ", s.T, " tokens, got ",
        seq.rows(), " rows of ", seq.tokens());
}

void check_wide(std::string_view op, Named t, Named like) {
  const bool wide = like.tensor.dtype == DType::kF64;
  if (t.tensor.defined() && (t.tensor.dtype == DType::kF64) != wide) {
    check(false, op, ": ", t.name, ": expected dtype ", wide ? "float64" : "float32, bfloat16 or float16", " (as ",
          like.name, "), got ", dtype_name(t.tensor.dtype));
  }
}

void check_gate(std::string_view op, Named t, Named k, Layout layout, const DeltaSizes& s) {
  check_tokens_heads(op, t, layout, s, s.HV, 0);
  check_float(op, t);
  check_wide(op, t, k);
}

void check_states(std::string_view op, Named t, Named k, const DeltaSizes& s, std::int64_t count, std::string_view what,
                  bool v_first) {
  if (!t.tensor.defined()) {
    return;
  }
  check_float(op, t);
  check_wide(op, t, k);
  check_rank(op, t, 4);
  check(t.tensor.size(0) == count, op, ": ", t.name, ": expected ", count, " states (", what, "), got ",
        t.tensor.size(0));
  check_shape(op, t, {count, s.HV, v_first ? s.V : s.K, v_first ? s.K : s.V});
}

void check_stored(std::string_view op, Named t) {
  check(!t.tensor.defined() || t.tensor.dtype != DType::kF16, op, ": ", t.name,
        ": expected dtype float32 or bfloat16, got float16 (its range is too small for a state)");
}

}  // namespace tidegate
