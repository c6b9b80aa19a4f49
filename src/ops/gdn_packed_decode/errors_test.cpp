// gdn_packed_decode: every argument wrong in turn. The text names it, and nothing is written.
#include <gtest/gtest.h>

#include <limits>

#include "ops/gdn_packed_decode/test_case.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

const std::string kFloats = "expected dtype float32, bfloat16, float16 or float64, got dtype ";
const std::string kNone = "expected a tensor, got none";
const std::string kStride = "expected inner stride 1, got 2";
const std::string kOverlap = "expected memory of its own, got an overlap with ";

struct Call {
  TensorView mixed, z, a, b, conv_state, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight, y;
  SeqLens seq;
  GdnPackedDecodeOptions options;
};

// Two sequences of 2 and 1 tokens, 2 key heads, 4 value heads, K = 5, V = 6: 44 channels.
TEST(GdnPackedDecodeErrors, Arguments) {
  Random random;
  Layer l = make_layer(random, {.lengths = {2, 1}, .K = 5, .V = 6, .S = 5, .slots = 8});
  const std::vector<std::int64_t> slots = {0, 1, /**/ 2, 3}, counts = {2, 1}, rows = {4, 6};
  l.options.state_indices = slots;
  l.options.states_per_sequence = 2;
  l.options.num_accepted_tokens = counts;
  l.options.conv_indices = rows;
  const Projected in = project(l);
  Tensor y(l.c.dtype, {3, 24});
  const Call good{in.mixed,
                  in.z,
                  in.a,
                  in.b,
                  l.conv_state,
                  l.conv_weight,
                  l.conv_bias,
                  l.A_log,
                  l.dt_bias,
                  l.state,
                  l.norm_weight,
                  y,
                  SeqLens::from_lengths(l.c.lengths),
                  l.options};
  const auto bad = [&](auto change, const std::string& text) {
    Call c = good;
    change(c);
    expect_error(
        [&] {
          gdn_packed_decode(c.mixed, c.z, c.a, c.b, c.conv_state, c.conv_weight, c.conv_bias, c.A_log, c.dt_bias,
                            c.state, c.norm_weight, c.y, c.seq, c.options);
        },
        "gdn_packed_decode: " + text);
  };
  bad([](Call& c) { c.options.HK = 0; }, "HK: expected >= 1, got 0");
  bad([](Call& c) { c.options.HV = 3; }, "HV: expected a multiple of 2 (HK), got 3");
  bad([](Call& c) { c.options.K = 0; }, "K: expected >= 1, got 0");
  bad([](Call& c) { c.options.V = -1; }, "V: expected >= 1, got -1");
  bad([](Call& c) { c.options.K = 4; }, "mixed: expected shape [3, 40], got [3, 44]");
  bad([](Call& c) { c.mixed = {}; }, "mixed: " + kNone);
  bad([](Call& c) { c.mixed.rank = 1; }, "mixed: expected 2 dimensions, got 1 in [3]");
  bad([](Call& c) { c.mixed.dtype = DType::kF64; },
      "mixed: expected dtype float32, bfloat16 or float16, got dtype float64");
  bad([](Call& c) { c.mixed.strides[1] = 2; }, "mixed: " + kStride);
  bad([](Call& c) { c.z = {}; }, "z: " + kNone);
  bad([](Call& c) { c.z.sizes[1] = 23; }, "z: expected shape [3, 24], got [3, 23]");
  bad([](Call& c) { c.z.dtype = DType::kF32; }, "z: expected dtype bfloat16 (as mixed), got dtype float32");
  bad([](Call& c) { c.a = {}; }, "a: " + kNone);
  bad([](Call& c) { c.a.sizes[0] = 2; }, "a: expected shape [3, 4], got [2, 4]");
  bad([](Call& c) { c.b = {}; }, "b: " + kNone);
  bad([](Call& c) { c.b.strides[1] = 2; }, "b: " + kStride);
  bad([](Call& c) { c.options.projection = Projection::kQkvzBa; }, "mixed: expected shape [3, 68], got [3, 44]");
  bad([](Call& c) { c.conv_weight = {}; }, "conv_weight: " + kNone);
  bad([](Call& c) { c.conv_weight.sizes[0] = 43; }, "conv_weight: expected shape [44, 4], got [43, 4]");
  bad([](Call& c) { c.conv_weight.sizes[1] = 5; }, "conv_weight: expected 2 to 4 taps [D, W], got [44, 5]");
  bad([](Call& c) { c.conv_weight.dtype = DType::kI8; }, "conv_weight: " + kFloats + "int8");
  bad([](Call& c) { c.conv_bias.sizes[0] = 1; }, "conv_bias: expected shape [44], got [1]");
  bad([](Call& c) { c.conv_bias.dtype = DType::kI32; }, "conv_bias: " + kFloats + "int32");
  bad([](Call& c) { c.A_log = {}; }, "A_log: " + kNone);
  bad([](Call& c) { c.A_log.sizes[0] = 2; }, "A_log: expected shape [4], got [2]");
  bad([](Call& c) { c.dt_bias.sizes[0] = 5; }, "dt_bias: expected shape [4], got [5]");
  bad([](Call& c) { c.norm_weight = {}; }, "norm_weight: " + kNone);
  bad([](Call& c) { c.norm_weight.sizes[0] = 5; }, "norm_weight: expected shape [6], got [5]");
  bad([](Call& c) { c.options.norm.eps = -1.0; }, "eps: expected a finite number >= 0, got -1");
  bad([](Call& c) { c.options.norm.activation = Activation::kNone; },
      "activation: expected silu, swish or sigmoid, got None");
  bad([](Call& c) { c.options.scale = std::numeric_limits<double>::infinity(); },
      "scale: expected a finite number, got inf");
  bad([](Call& c) { c.conv_state = {}; }, "conv_state: " + kNone);
  bad([](Call& c) { c.conv_state.dtype = DType::kF16; },
      "conv_state: expected dtype bfloat16 (as mixed), got dtype float16");
  bad([](Call& c) { c.conv_state.sizes[1] = 40; }, "conv_state: expected 44 channels, got 40");
  bad([](Call& c) { c.conv_state.sizes[2] = 2; }, "conv_state: expected state length >= 3, got 2");
  bad([](Call& c) { c.conv_state.sizes[2] = 3; },
      "num_accepted_tokens[0]: expected 1 to 1 (conv state length 3), got 2");
  bad([](Call& c) { c.state.sizes[2] = 4; }, "state: expected shape [8, 4, 5, 6], got [8, 4, 4, 6]");
  bad([](Call& c) { c.state.dtype = DType::kF16; },
      "state: expected dtype float32 or bfloat16, got float16 (its range is too small for a state)");
  bad([](Call& c) { c.state.strides[3] = 2; }, "state: " + kStride);
  bad([](Call& c) { c.y.sizes[1] = 20; }, "y: expected shape [3, 24], got [3, 20]");
  bad([](Call& c) { c.y.data = c.z.data; }, "y: " + kOverlap + "z");
  bad([](Call& c) { c.conv_state.data = c.mixed.data; }, "conv_state: " + kOverlap + "mixed");
  bad([](Call& c) { c.state.data = c.conv_state.data; }, "state: " + kOverlap + "conv_state");
  bad([](Call& c) { c.seq = SeqLens::dense(1, 2); }, "seq: expected 1 rows of 3 tokens, got 1 rows of 2");
  const auto indices = [&](std::vector<std::int64_t> list, const std::string& text) {
    bad([&](Call& c) { c.options.state_indices = list; }, "state_indices" + text);
  };
  indices({0, 1, 8, 3}, "[1][0]: expected 0 to 7 or -1 (null slot), got 8");
  indices({0, 1, 1, 3}, "[1][0]: expected a slot of its own, got 1 (also of sequence 0)");
  const auto conv = [&](std::vector<std::int64_t> list, const std::string& text) {
    bad([&](Call& c) { c.options.conv_indices = list; }, "conv_indices" + text);
  };
  conv({4}, ": expected 2 entries (one per sequence), got 1");
  conv({4, 8}, "[1]: expected 0 to 7 (sequence 1 has a state), got 8");
  conv({4, -1}, "[1]: expected 0 to 7 (sequence 1 has a state), got -1");
  conv({4, 4}, "[1]: expected a row of its own, got 4 (also of another sequence)");
  const std::vector<std::int64_t> none = {0, 1};
  bad([&](Call& c) { c.options.num_accepted_tokens = none; },
      "num_accepted_tokens[0]: expected 1 to 2 (states per sequence), got 0");

  Layer prompt = make_layer(random, {.lengths = {17}, .K = 5, .V = 6});
  prompt.options.state_indices = std::span(slots).first(1);
  expect_error([&] { decode(prompt, SeqLens::dense(1, 17)); },
               "gdn_packed_decode: cu_seqlens: expected at most 16 tokens per sequence, got 17");

  Layer packed = l;
  packed.c.projection = packed.options.projection = Projection::kQkvzBa;
  const Projected other = project(packed);
  const auto bad_packed = [&](auto change, const std::string& text) {
    bad(
        [&](Call& c) {
          c.options.projection = Projection::kQkvzBa;
          c.mixed = other.mixed;
          c.z = c.a = {};
          c.b = other.b;
          change(c);
        },
        text);
  };
  bad_packed([&](Call& c) { c.z = good.z; }, "z: expected none with projection qkvz_ba, got a tensor");
  bad_packed([&](Call& c) { c.a = good.a; }, "a: expected none with projection qkvz_ba, got a tensor");
  bad_packed([&](Call& c) { c.b = good.b; }, "b: expected shape [3, 8], got [3, 4]");
}

}  // namespace
}  // namespace tidegate::test
