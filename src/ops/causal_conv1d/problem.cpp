#include "ops/causal_conv1d/problem.h"

#include <algorithm>
#include <cstring>

#include "base/checks.h"
#include "tidegate/parallel.h"

namespace tidegate::causal_conv1d {

Problem check_inputs(std::string_view op, const TensorView& x, const TensorView& weight, const TensorView& bias,
                     const SeqLens& seq, Layout layout, Activation activation) {
  check_rank(op, {"x", x}, (is_head_major(layout) ? 3 : 2) + (has_batch(layout) ? 1 : 0));
  check_data_type(op, {"x", x});
  check_inner_stride(op, {"x", x});
  Problem p{};
  p.rows = has_batch(layout) ? x.size(0) : 1;
  p.tokens = x.size(-2);
  p.channels = x.size(-1) * (is_head_major(layout) ? x.size(-3) : 1);
  check_rank(op, {"weight", weight}, 2);
  check_float(op, {"weight", weight});
  p.taps = weight.size(1);
  check(p.taps >= 2 && p.taps <= 4, op, ": weight: expected 2 to 4 taps [D, W], got ", Shape{weight});
  check_shape(op, {"weight", weight}, {p.channels, p.taps});
  if (bias.defined()) {
    check_shape(op, {"bias", bias}, {p.channels});
    check_float(op, {"bias", bias});
  }
  check(activation != Activation::kSigmoid, op, ": activation: expected None, silu or swish, got sigmoid");
  check(seq.rows() == p.rows && seq.tokens() == p.tokens, op, ": cu_seqlens: expected boundaries of ", p.rows, " x ",
        p.tokens, " tokens (x), got ", seq.rows(), " x ", seq.tokens());
  return p;
}

void check_output_side(std::string_view op, std::string_view name, const TensorView& t, const TensorView& x,
                       const Problem& p, Layout layout, std::int64_t head_num) {
  check_present(op, {name, t});
  check(head_num >= 0 && (head_num == 0 || p.channels % head_num == 0), op, ": head_num: expected 0 or a divisor of ",
        p.channels, " channels, got ", head_num);
  if (head_num == 0) {
    check_same_shape(op, {name, t}, {"x", x});
  } else if (has_batch(layout)) {
    check_shape(op, {name, t}, {p.rows, head_num, p.tokens, p.channels / head_num});
  } else {
    check_shape(op, {name, t}, {head_num, p.tokens, p.channels / head_num});
  }
  check_same_dtype(op, {name, t}, {"x", x});
  check_inner_stride(op, {name, t});
}

void check_state(std::string_view op, std::string_view name, const TensorView& t, const TensorView& x, const Problem& p,
                 std::int64_t count, std::int64_t min_length) {
  if (!t.defined()) {
    return;
  }
  check_rank(op, {name, t}, 3);
  check_same_dtype(op, {name, t}, {"x", x});
  check(t.size(0) == count, op, ": ", name, ": expected ", count, " states (one per sequence), got ", t.size(0));
  check(t.size(1) == p.channels, op, ": ", name, ": expected ", p.channels, " channels, got ", t.size(1));
  check(t.size(2) >= min_length, op, ": ", name, ": expected state length >= ", min_length, ", got ", t.size(2));
}

Grid grid_of(const TensorView& t, Layout layout, std::int64_t head_num, std::int64_t channels) {
  if (!t.defined()) {
    return {nullptr, 0, 0, 0, channels};
  }
  const bool heads = head_num > 0 || is_head_major(layout);
  // An empty tensor still needs a width that divisions can use.
  return {t.data, has_batch(layout) ? t.stride(0) : 0, heads ? t.stride(-3) : 0, t.stride(-2),
          std::max<std::int64_t>(1, heads ? t.size(-1) : channels)};
}

State state_of(const TensorView& t) {
  return t.defined() && t.numel() > 0 ? State{t.data, t.strides[0], t.strides[1], t.strides[2], t.sizes[2]} : State{};
}

std::vector<TokenBlock> token_blocks(const SeqLens& seq, std::int64_t size) {
  std::vector<TokenBlock> blocks;
  for (std::int64_t n = 0; n < seq.count(); ++n) {
    for (std::int64_t t = seq[n].begin; t < seq[n].end; t += size) {
      blocks.push_back({n, t, std::min(t + size, seq[n].end)});
    }
  }
  return blocks;
}

void write_final_state(const TensorView& x, const Grid& grid, const TensorView& initial, const TensorView& final_state,
                       const SeqLens& seq, std::int64_t channels) {
  const auto bytes = static_cast<std::size_t>(dtype_bytes(x.dtype));
  const State from = state_of(initial);
  const State to = state_of(final_state);
  if (to.data == nullptr) {
    return;
  }
  parallel_for(seq.count(), [&](std::int64_t n) {
    const Sequence& s = seq[n];
    for (std::int64_t sample = 0; sample < to.length; ++sample) {
      const std::int64_t t =
          s.end - to.length + sample;  // token, or before the sequence: a column of the initial state
      const std::int64_t old = from.length + t - s.begin;
      for (std::int64_t c = 0; c < channels; ++c) {
        char* out = static_cast<char*>(to.data) +
                    (n * to.row + c * to.channel + sample * to.sample) * static_cast<std::int64_t>(bytes);
        if (t >= s.begin) {
          const std::int64_t offset = s.row * grid.batch + c / grid.width * grid.head + t * grid.token + c % grid.width;
          std::memcpy(out, static_cast<const char*>(grid.data) + offset * static_cast<std::int64_t>(bytes), bytes);
        } else if (from.data != nullptr && old >= 0) {
          const std::int64_t offset = n * from.row + c * from.channel + old * from.sample;
          std::memcpy(out, static_cast<const char*>(from.data) + offset * static_cast<std::int64_t>(bytes), bytes);
        } else {
          std::memset(out, 0, bytes);
        }
      }
    }
  });
}

}  // namespace tidegate::causal_conv1d
