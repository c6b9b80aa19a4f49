// causal_conv1d_fwd, _bwd, _update: every argument wrong in turn. The text names it, and nothing is written.
#include <gtest/gtest.h>

#include "ops/causal_conv1d/test_case.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

const ConvCase kCase{.T = 6, .D = 8, .W = 4, .state = 3, .final_state = 3, .lengths = {4, 2}};

struct Fwd {
  TensorView x, weight, bias, initial, y, final_state;
  SeqLens seq;
  CausalConv1dOptions options;
  void operator()() const { causal_conv1d_fwd(x, weight, bias, initial, y, final_state, seq, options); }
};

TEST(CausalConv1dErrors, Forward) {
  Random random;
  const Conv v = make_conv(random, kCase);
  const ConvForward out = outputs_of(v);
  const Fwd good{v.x, v.weight, v.bias, v.initial, out.y, out.final_state, v.seq, v.c.options()};
  const auto bad = [&](auto change, const std::string& text) {
    Fwd call = good;
    change(call);
    expect_error(call, "causal_conv1d_fwd: " + text);
  };
  bad([](Fwd& c) { c.x = {}; }, "x: expected a tensor, got none");
  bad([](Fwd& c) { c.options.layout = Layout::kBSND; }, "x: expected 3 dimensions, got 2 in [6, 8]");
  bad([](Fwd& c) { c.options.layout = Layout::kNTD; }, "x: expected 3 dimensions, got 2 in [6, 8]");
  bad([](Fwd& c) { c.options.layout = Layout::kBNSD; }, "x: expected 4 dimensions, got 2 in [6, 8]");
  bad([](Fwd& c) { c.x.dtype = DType::kI32; },
      "x: expected dtype float32, bfloat16, float16 or float64, got dtype int32");
  bad([](Fwd& c) { c.x.strides[1] = 2; }, "x: expected inner stride 1, got 2");
  bad([](Fwd& c) { c.weight = {}; }, "weight: expected a tensor, got none");
  bad([](Fwd& c) { c.weight.rank = 1; }, "weight: expected 2 dimensions, got 1 in [8]");
  bad([](Fwd& c) { c.weight.dtype = DType::kI8; },
      "weight: expected dtype float32, bfloat16, float16 or float64, got dtype int8");
  bad([](Fwd& c) { c.weight.sizes[1] = 5; }, "weight: expected 2 to 4 taps [D, W], got [8, 5]");
  bad([](Fwd& c) { c.weight.sizes[1] = 1; }, "weight: expected 2 to 4 taps [D, W], got [8, 1]");
  bad([](Fwd& c) { c.weight.sizes[0] = 7; }, "weight: expected shape [8, 4], got [7, 4]");
  bad([](Fwd& c) { c.bias.sizes[0] = 9; }, "bias: expected shape [8], got [9]");
  bad([](Fwd& c) { c.bias.dtype = DType::kI64; },
      "bias: expected dtype float32, bfloat16, float16 or float64, got dtype int64");
  bad([](Fwd& c) { c.options.activation = Activation::kSigmoid; },
      "activation: expected None, silu or swish, got sigmoid");
  bad([](Fwd& c) { c.seq = SeqLens::dense(1, 5); }, "cu_seqlens: expected boundaries of 1 x 6 tokens (x), got 1 x 5");
  bad([](Fwd& c) { c.seq = SeqLens::dense(2, 3); }, "cu_seqlens: expected boundaries of 1 x 6 tokens (x), got 2 x 3");
  bad([](Fwd& c) { c.initial.rank = 2; }, "initial_state: expected 3 dimensions, got 2 in [2, 8]");
  bad([](Fwd& c) { c.initial.dtype = DType::kBF16; },
      "initial_state: expected dtype float32 (as x), got dtype bfloat16");
  bad([](Fwd& c) { c.initial.sizes[0] = 3; }, "initial_state: expected 2 states (one per sequence), got 3");
  bad([](Fwd& c) { c.initial.sizes[1] = 7; }, "initial_state: expected 8 channels, got 7");
  bad([](Fwd& c) { c.initial.sizes[2] = 2; }, "initial_state: expected state length >= 3, got 2");
  bad([](Fwd& c) { c.y = {}; }, "y: expected a tensor, got none");
  bad([](Fwd& c) { c.y.sizes[0] = 5; }, "y: expected shape [6, 8] (as x), got [5, 8]");
  bad([](Fwd& c) { c.y.dtype = DType::kF16; }, "y: expected dtype float32 (as x), got dtype float16");
  bad([](Fwd& c) { c.y.strides[1] = 3; }, "y: expected inner stride 1, got 3");
  bad([](Fwd& c) { c.options.head_num = 3; }, "head_num: expected 0 or a divisor of 8 channels, got 3");
  bad([](Fwd& c) { c.options.head_num = -1; }, "head_num: expected 0 or a divisor of 8 channels, got -1");
  bad([](Fwd& c) { c.options.head_num = 2; }, "y: expected shape [2, 6, 4], got [6, 8]");
  bad([](Fwd& c) { c.final_state.rank = 4; }, "final_state: expected 3 dimensions, got 4 in [2, 8, 3, 0]");
  bad([](Fwd& c) { c.final_state.dtype = DType::kF16; },
      "final_state: expected dtype float32 (as x), got dtype float16");
  bad([](Fwd& c) { c.final_state.sizes[0] = 1; }, "final_state: expected 2 states (one per sequence), got 1");
  bad([](Fwd& c) { c.final_state.sizes[1] = 9; }, "final_state: expected 8 channels, got 9");
  bad([](Fwd& c) { c.final_state.sizes[2] = 1; }, "final_state: expected state length >= 3, got 1");
  bad([](Fwd& c) { c.y = c.x; }, "y: expected memory of its own, got an overlap with x");
  bad([](Fwd& c) { c.final_state = c.initial; },
      "final_state: expected memory of its own, got an overlap with initial_state");
  bad([](Fwd& c) { c.final_state.data = c.y.data; }, "final_state: expected memory of its own, got an overlap with y");
  bad([](Fwd& c) { c.y.strides[0] = 0; },
      "y: expected an output without repeated elements, got stride 0 in dimension 0");
  good();  // what was changed above was right before
}

TEST(CausalConv1dErrors, Boundaries) {
  const auto of = [](Sizes cu) { return [cu] { SeqLens::from_cu(cu, 6, false, "causal_conv1d_fwd"); }; };
  expect_error(of({1, 6}), "causal_conv1d_fwd: cu_seqlens[0]: expected 0, got 1");
  expect_error(of({0, 5, 3, 6}), "causal_conv1d_fwd: cu_seqlens[2]: expected >= 5, got 3");
  expect_error(of({0, 7}), "causal_conv1d_fwd: cu_seqlens[1]: expected <= 6 (tokens), got 7");
  expect_error(of({0, 4}), "causal_conv1d_fwd: cu_seqlens[1]: expected 6 (tokens), got 4");
}

struct Bwd {
  TensorView dy, x, weight, bias, initial, dfinal, dx, dweight, dbias, dinitial;
  SeqLens seq;
  CausalConv1dOptions options;
  void operator()() const {
    causal_conv1d_bwd(dy, x, weight, bias, initial, dfinal, dx, dweight, dbias, dinitial, seq, options);
  }
};

TEST(CausalConv1dErrors, Backward) {
  Random random;
  const Conv v = make_conv(random, kCase);
  const ConvBackward out = gradients_of(v);
  const Bwd good{v.dy,   v.x,         v.weight,  v.bias,       v.initial, v.dfinal,
                 out.dx, out.dweight, out.dbias, out.dinitial, v.seq,     v.c.options()};
  const auto bad = [&](auto change, const std::string& text) {
    Bwd call = good;
    change(call);
    expect_error(call, "causal_conv1d_bwd: " + text);
  };
  bad([](Bwd& c) { c.dy = {}; }, "dy: expected a tensor, got none");
  bad([](Bwd& c) { c.dy.sizes[1] = 7; }, "dy: expected shape [6, 8] (as x), got [6, 7]");
  bad([](Bwd& c) { c.dy.dtype = DType::kBF16; }, "dy: expected dtype float32 (as x), got dtype bfloat16");
  bad([](Bwd& c) { c.dy.strides[1] = -1; }, "dy: expected inner stride 1, got -1");
  bad([](Bwd& c) { c.options.head_num = 4; }, "dy: expected shape [4, 6, 2], got [6, 8]");
  bad([](Bwd& c) { c.x.rank = 1; }, "x: expected 2 dimensions, got 1 in [6]");
  bad([](Bwd& c) { c.weight.sizes[0] = 16; }, "weight: expected shape [8, 4], got [16, 4]");
  bad([](Bwd& c) { c.bias.rank = 2; }, "bias: expected shape [8], got [8, 0]");
  bad([](Bwd& c) { c.initial.sizes[0] = 1; }, "initial_state: expected 2 states (one per sequence), got 1");
  bad([](Bwd& c) { c.dfinal.sizes[2] = 2; }, "dfinal_state: expected state length >= 3, got 2");
  bad([](Bwd& c) { c.dfinal.dtype = DType::kF64; }, "dfinal_state: expected dtype float32 (as x), got dtype float64");
  bad([](Bwd& c) { c.dx.sizes[0] = 7; }, "dx: expected shape [6, 8] (as x), got [7, 8]");
  bad([](Bwd& c) { c.dx.dtype = DType::kF16; }, "dx: expected dtype float32 (as x), got dtype float16");
  bad([](Bwd& c) { c.dx.strides[1] = 2; }, "dx: expected inner stride 1, got 2");
  bad([](Bwd& c) { c.dweight.sizes[1] = 3; }, "dweight: expected shape [8, 4], got [8, 3]");
  bad([](Bwd& c) { c.dweight.dtype = DType::kBF16; }, "dweight: expected dtype float32, got dtype bfloat16");
  bad([](Bwd& c) { c.dbias.sizes[0] = 4; }, "dbias: expected shape [8], got [4]");
  bad([](Bwd& c) { c.dbias.dtype = DType::kF64; }, "dbias: expected dtype float32, got dtype float64");
  bad([](Bwd& c) { c.dinitial.sizes[2] = 2; }, "dinitial_state: expected state length >= 3, got 2");
  bad([](Bwd& c) { c.dinitial.sizes[2] = 4; },
      "dinitial_state: expected shape [2, 8, 3] (as initial_state), got [2, 8, 4]");
  bad([](Bwd& c) { c.seq = SeqLens::dense(1, 7); }, "cu_seqlens: expected boundaries of 1 x 6 tokens (x), got 1 x 7");
  bad([](Bwd& c) { c.options.activation = Activation::kSigmoid; },
      "activation: expected None, silu or swish, got sigmoid");
  bad([](Bwd& c) { c.dx = c.dy; }, "dx: expected memory of its own, got an overlap with dy");
  bad([](Bwd& c) { c.dweight.data = c.weight.data; },
      "dweight: expected memory of its own, got an overlap with weight");
  bad([](Bwd& c) { c.dbias.data = c.dweight.data; }, "dbias: expected memory of its own, got an overlap with dweight");
  bad([](Bwd& c) { c.dinitial.strides[0] = 0; },
      "dinitial_state: expected an output without repeated elements, got stride 0 in dimension 0");
  good();
}

struct Upd {
  TensorView x, pool, weight, bias, y;
  SeqLens seq;
  CausalConv1dUpdateOptions options;
  Sizes slots, accepted, written;
  std::vector<std::uint8_t> has_state;
  void operator()() const {
    CausalConv1dUpdateOptions o = options;
    o.cache_indices = slots;
    o.num_accepted_tokens = accepted;
    o.cache_seqlens = written;
    o.has_initial_state = has_state;
    causal_conv1d_update(x, pool, weight, bias, y, seq, o);
  }
};

TEST(CausalConv1dErrors, Update) {
  Random random;
  const Conv v = make_conv(random, kCase);
  const Tensor y = like(v.x);
  const Tensor pool = normal(random, DType::kF32, {4, 8, 5});
  const Upd good{v.x, pool, v.weight, v.bias, y, v.seq, {}, {3, 1}, {}, {}, {}};
  const auto bad = [&](auto change, const std::string& text) {
    Upd call = good;
    change(call);
    expect_error([&] { call(); }, "causal_conv1d_update: " + text);  // not a copy, which has other lists
  };
  bad([](Upd& c) { c.options.layout = Layout::kNTD; }, "layout: expected TND or BSND, got a head-major one");
  bad([](Upd& c) { c.options.layout = Layout::kBSND; }, "x: expected 3 dimensions, got 2 in [6, 8]");
  bad([](Upd& c) { c.x.dtype = DType::kBool; },
      "x: expected dtype float32, bfloat16, float16 or float64, got dtype bool");
  bad([](Upd& c) { c.x.dtype = DType::kF64; }, "x: expected dtype float32, bfloat16 or float16, got dtype float64");
  bad([](Upd& c) { c.pool = {}; }, "conv_state: expected a tensor, got none");
  bad([](Upd& c) { c.pool.rank = 2; }, "conv_state: expected 3 dimensions, got 2 in [4, 8]");
  bad([](Upd& c) { c.pool.dtype = DType::kBF16; }, "conv_state: expected dtype float32 (as x), got dtype bfloat16");
  bad([](Upd& c) { c.pool.sizes[1] = 4; }, "conv_state: expected 8 channels, got 4");
  bad([](Upd& c) { c.pool.sizes[2] = 2; }, "conv_state: expected state length >= 3, got 2");
  bad([](Upd& c) { c.weight.sizes[0] = 4; }, "weight: expected shape [8, 4], got [4, 4]");
  bad([](Upd& c) { c.bias.sizes[0] = 4; }, "bias: expected shape [8], got [4]");
  bad([](Upd& c) { c.y.sizes[1] = 9; }, "y: expected shape [6, 8] (as x), got [6, 9]");
  bad([](Upd& c) { c.y.dtype = DType::kF16; }, "y: expected dtype float32 (as x), got dtype float16");
  bad([](Upd& c) { c.options.head_num = 5; }, "head_num: expected 0 or a divisor of 8 channels, got 5");
  bad([](Upd& c) { c.options.activation = Activation::kSigmoid; },
      "activation: expected None, silu or swish, got sigmoid");
  bad([](Upd& c) { c.seq = SeqLens::dense(1, 7); }, "cu_seqlens: expected boundaries of 1 x 6 tokens (x), got 1 x 7");
  bad([](Upd& c) { c.slots = {3, 1, 2}; }, "cache_indices: expected 2 entries (one per sequence), got 3");
  bad([](Upd& c) { c.slots = {3, 4}; }, "cache_indices[1]: expected -1 or 0 to 3, got 4");
  bad([](Upd& c) { c.slots = {-2, 1}; }, "cache_indices[0]: expected -1 or 0 to 3, got -2");
  bad([](Upd& c) { c.slots = {1, 1}; }, "cache_indices[1]: expected a row of its own, got 1 as in [0]");
  bad([](Upd& c) { c.slots = {}, c.pool.sizes[0] = 1; }, "conv_state: expected at least 2 rows (sequences), got 1");
  bad([](Upd& c) { c.has_state = {1}; }, "has_initial_state: expected 2 entries (one per sequence), got 1");
  bad([](Upd& c) { c.accepted = {1}; }, "num_accepted_tokens: expected 2 entries (one per sequence), got 1");
  bad([](Upd& c) { c.accepted = {1, 0}; }, "conv_state: expected state length >= 6 for 4 tokens of sequence 0, got 5");
  bad(
      [](Upd& c) {
        c.pool = sized(sized(c.pool, 1, 8), 2, 6), c.pool.strides[1] = 5, c.accepted = {1, 0};
      },
      "num_accepted_tokens[1]: expected 1 to 4 (state length 6), got 0");
  bad([](Upd& c) { c.accepted = {4, 1}; }, "num_accepted_tokens[0]: expected 1 to 3 (state length 5), got 4");
  bad([](Upd& c) { c.written = {1, 2, 3}; }, "cache_seqlens: expected 2 entries (one per sequence), got 3");
  bad([](Upd& c) { c.written = {1, -2}; }, "cache_seqlens[1]: expected >= 0, got -2");
  bad(
      [](Upd& c) {
        c.written = {1, 2}, c.accepted = {1, 1};
      },
      "cache_seqlens: expected none together with num_accepted_tokens, got both");
  bad(
      [](Upd& c) {
        c.written = {1, 2}, c.options.state_anchor_head = true;
      },
      "state_anchor: expected tail together with num_accepted_tokens or cache_seqlens, got head");
  bad([](Upd& c) { c.y = c.x; }, "y: expected memory of its own, got an overlap with x");
  bad([](Upd& c) { c.pool.data = c.x.data; }, "conv_state: expected memory of its own, got an overlap with x");
  const std::string overlap = "y: expected memory of its own, got an overlap with ";
  // The lists have room for all of y, or it could reach into the memory of another one.
  const auto within = [&](auto& list) {
    list.reserve(static_cast<std::size_t>(y.view().numel()) * sizeof(float));
    return list.data();
  };
  bad([&](Upd& c) { c.y.data = within(c.slots); }, overlap + "cache_indices");
  bad([&](Upd& c) { c.has_state = {1, 1}, c.y.data = within(c.has_state); }, overlap + "has_initial_state");
  bad([](Upd& c) { c.pool.sizes[0] = 0; }, "cache_indices[0]: expected -1 in a pool of 0 rows, got 3");
  const std::int64_t halves[] = {0, 3, 6};
  bad(
      [&](Upd& c) {
        c.seq = SeqLens::from_cu(halves, 6, false, ""), c.accepted = {1, 1}, c.y.data = within(c.accepted);
      },
      overlap + "num_accepted_tokens");
  bad([&](Upd& c) { c.written = {1, 1}, c.y.data = within(c.written); }, overlap + "cache_seqlens");
  bad([](Upd& c) { c.pool.strides[0] = 0; },
      "conv_state: expected an output without repeated elements, got stride 0 in dimension 0");
  good();
}

}  // namespace
}  // namespace tidegate::test
