// recurrent_gated_delta_rule and its functional form: every argument wrong in turn. The text names it, and nothing is
// written.
#include <gtest/gtest.h>

#include <limits>

#include "ops/recurrent_gated_delta_rule/test_case.h"

namespace tidegate::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
const std::string kFloats = "expected dtype float32, bfloat16, float16 or float64, got dtype ";
const std::string kNone = "expected a tensor, got none";
const std::string kStride = "expected inner stride 1, got 2";
const std::string kOverlap = "expected memory of its own, got an overlap with ";

struct Call {
  TensorView q, k, v, g, gk, beta, from, to, o;
  SeqLens seq;
  RecurrentGatedDeltaRuleOptions options;
};

// Three sequences of 2, 0 and 3 tokens in TND, 2 key heads, 4 value heads, K = 5, V = 6, bf16 with gates of fp32.
class RecurrentGatedDeltaRuleErrors : public testing::Test {
 protected:
  RecurrentGatedDeltaRuleErrors() {
    Random random;
    r_ = make_recurrence(random, {.lengths = {2, 0, 3}, .HK = 2, .G = 2, .K = 5, .V = 6, .dtype = DType::kBF16});
    r_.gk = uniform(random, DType::kF32, {5, 4, 5}, -1.0, 0.0);
    A_log_ = normal(random, DType::kF32, {4});
    dt_bias_ = normal(random, DType::kF16, {4});
    pool_ = normal(random, DType::kF32, {5, 4, 5, 6});
    o_ = like(r_.v);
    r_.options.A_log = A_log_;
    r_.options.dt_bias = dt_bias_;
    r_.options.beta_sigmoid = true;
    r_.options.beta_scale = 2.0;
  }
  Call call(const TensorView& from, const TensorView& to) const {
    return {r_.q, r_.k, r_.v, r_.g, r_.gk, r_.beta, from, to, o_, r_.c.seq(), r_.options};
  }

  Recurrence r_;
  Tensor A_log_, dt_bias_, pool_, o_;
};

template <class Bad>
void expect_input_errors(const Bad& bad) {
  bad([](Call& c) { c.q = {}; }, "q: " + kNone);
  bad([](Call& c) { c.q.sizes[1] = 4; }, "q: expected shape [5, 2, 5], got [5, 4, 5]");
  bad([](Call& c) { c.q.dtype = DType::kF32; }, "q: expected dtype bfloat16 (as k), got dtype float32");
  bad([](Call& c) { c.k.strides[2] = 2; }, "k: " + kStride);
  bad([](Call& c) { c.k = {}; }, "k: " + kNone);
  bad([](Call& c) { c.v.sizes[1] = 3; }, "v: expected a multiple of 2 (key heads) heads, got 3");
  bad([](Call& c) { c.g = {}; }, "g: expected a tensor with A_log, got none");
  bad([](Call& c) { c.g.sizes[1] = 2; }, "g: expected shape [5, 4], got [5, 2]");
  bad([](Call& c) { c.g.dtype = DType::kI64; }, "g: " + kFloats + "int64");
  bad([](Call& c) { c.g.dtype = DType::kF64; }, "g: expected dtype float32, bfloat16 or float16 (as k), got float64");
  bad([](Call& c) { c.gk.sizes[2] = 6; }, "gk: expected shape [5, 4, 5], got [5, 4, 6]");
  bad([](Call& c) { c.gk.strides[2] = 2; }, "gk: " + kStride);
  bad([](Call& c) { c.gk.dtype = DType::kI8; }, "gk: " + kFloats + "int8");
  bad([](Call& c) { c.gk.dtype = DType::kF64; }, "gk: expected dtype float32, bfloat16 or float16 (as k), got float64");
  bad([](Call& c) { c.beta = {}; }, "beta: " + kNone);
  bad([](Call& c) { c.beta.sizes[0] = 6; }, "beta: expected shape [5, 4], got [6, 4]");
  bad([](Call& c) { c.beta.rank = 3; }, "beta: expected shape [5, 4, 6], got [5, 4, 0]");
  bad([](Call& c) { c.beta.dtype = DType::kBool; }, "beta: " + kFloats + "bool");
  bad([](Call& c) { c.o = {}; }, "o: " + kNone);
  bad([](Call& c) { c.o.sizes[2] = 5; }, "o: expected shape [5, 4, 6], got [5, 4, 5]");
  bad([](Call& c) { c.o.strides[2] = 2; }, "o: " + kStride);
  bad([](Call& c) { c.o.dtype = DType::kF16; }, "o: expected dtype bfloat16 (as k), got dtype float16");
  bad([](Call& c) { c.o.data = c.v.data; }, "o: " + kOverlap + "v");
  bad([](Call& c) { c.o.data = c.gk.data; }, "o: " + kOverlap + "gk");
  bad([](Call& c) { c.seq = SeqLens::dense(1, 4); }, "seq: expected 1 rows of 5 tokens, got 1 rows of 4");
  bad([](Call& c) { c.options.A_log.sizes[0] = 2; }, "A_log: expected shape [4], got [2]");
  bad([](Call& c) { c.options.A_log = {}; }, "dt_bias: expected none without A_log, got a tensor");
  bad([](Call& c) { c.options.dt_bias.dtype = DType::kI32; }, "dt_bias: " + kFloats + "int32");
  bad([](Call& c) { c.options.beta_sigmoid = false; }, "beta_scale: expected 1 without beta_sigmoid, got 2");
  bad([](Call& c) { c.options.beta_scale = kNan; }, "beta_scale: expected a finite number, got nan");
  bad([](Call& c) { c.options.scale = kNan; }, "scale: expected a finite number, got nan");
  bad([](Call& c) { c.options.layout = Layout::kBSND; }, "k: expected 4 dimensions, got 3 in [5, 2, 5]");
}

TEST_F(RecurrentGatedDeltaRuleErrors, Pool) {
  const std::vector<std::int64_t> slots = {3, 1, 0, /**/ 2, 2, 2, /**/ 4, 2, -1}, accepted = {2, 0, 1};
  const std::vector<std::uint8_t> has = {1, 1, 0};
  r_.options.state_indices = slots;
  r_.options.states_per_sequence = 3;
  r_.options.num_accepted_tokens = accepted;
  r_.options.has_initial_state = has;
  const Call good = call(pool_, pool_);
  const auto bad = [&](auto change, const std::string& text) {
    Call c = good;
    change(c);
    expect_error([&] { recurrent_gated_delta_rule(c.q, c.k, c.v, c.g, c.gk, c.beta, c.to, c.o, c.seq, c.options); },
                 "recurrent_gated_delta_rule: " + text);
  };
  expect_input_errors(bad);

  bad([](Call& c) { c.to = {}; }, "state: " + kNone);
  bad([](Call& c) { c.to.rank = 3; }, "state: expected 4 dimensions, got 3 in [5, 4, 5]");
  bad([](Call& c) { c.to.sizes[1] = 3; }, "state: expected shape [5, 4, 5, 6], got [5, 3, 5, 6]");
  bad([](Call& c) { c.options.state_v_first = true; }, "state: expected shape [5, 4, 6, 5], got [5, 4, 5, 6]");
  bad([](Call& c) { c.to.strides[3] = 2; }, "state: " + kStride);
  bad([](Call& c) { c.to.dtype = DType::kI32; }, "state: " + kFloats + "int32");
  bad([](Call& c) { c.to.dtype = DType::kF64; },
      "state: expected dtype float32, bfloat16 or float16 (as k), got float64");
  bad([](Call& c) { c.to.dtype = DType::kF16; },
      "state: expected dtype float32 or bfloat16, got float16 (its range is too small for a state)");
  bad([](Call& c) { c.to.strides[0] = 0; },
      "state: expected an output without repeated elements, got stride 0 in dimension 0");
  bad([](Call& c) { c.to.data = c.gk.data; }, "state: " + kOverlap + "gk");
  bad([](Call& c) { c.to.data = c.options.A_log.data; }, "state: " + kOverlap + "A_log");
  bad([](Call& c) { c.to.data = c.o.data; }, "state: " + kOverlap + "o");

  const auto wrong = [&](std::size_t i, std::int64_t slot, const std::string& text) {
    std::vector<std::int64_t> list = slots;
    list[i] = slot;
    bad([&](Call& c) { c.options.state_indices = list; }, "state_indices" + text);
  };
  wrong(1, 5, "[0][1]: expected 0 to 4 or -1 (null slot), got 5");
  wrong(5, -2, "[1][2]: expected 0 to 4 or -1 (null slot), got -2");  // of an empty sequence
  wrong(8, 7, "[2][2]: expected 0 to 4 or -1 (null slot), got 7");    // of a token that does not come
  wrong(8, 1, "[2][2]: expected a slot of its own, got 1 (also of sequence 0)");
  wrong(7, 3, "[2][1]: expected a slot of its own, got 3 (also of sequence 0)");
  wrong(6, 1, "[2][0]: expected a slot of its own, got 1 (also of sequence 0)");
  // What one sequence starts from, another may not write: sequence 0 then starts from its third entry.
  const std::vector<std::int64_t> third = {3, 1, 1};
  const std::vector<std::int64_t> crossing = {3, 1, 2, /**/ 2, 2, 2, /**/ 4, 2, -1};
  bad(
      [&](Call& c) {
        c.options.state_indices = crossing;
        c.options.num_accepted_tokens = third;
      },
      "state_indices[0][2]: expected a slot of its own, got 2 (also of sequence 2)");
  bad([&](Call& c) { c.options.state_indices = std::span(slots).first(8); },
      "state_indices: expected 9 entries (3 per sequence), got 8");
  bad([](Call& c) { c.options.states_per_sequence = -1; }, "states_per_sequence: expected >= 0, got -1");
  const std::vector<std::int64_t> pairs = {3, 1, 2, 2, 4, 0};
  bad(
      [&](Call& c) {
        c.options.state_indices = pairs;
        c.options.states_per_sequence = 2;
      },
      "state_indices: expected at least 3 entries for sequence 2 (its tokens), got 2");
  for (const std::int64_t a : {0, 4}) {
    const std::vector<std::int64_t> counts = {1, 1, a};
    bad([&](Call& c) { c.options.num_accepted_tokens = counts; },
        "num_accepted_tokens[2]: expected 1 to 3 (states per sequence), got " + std::to_string(a));
  }
  bad([&](Call& c) { c.options.num_accepted_tokens = std::span(accepted).first(2); },
      "num_accepted_tokens: expected 3 entries (one per sequence), got 2");
  bad([&](Call& c) { c.options.has_initial_state = std::span(has).first(2); },
      "has_initial_state: expected 3 entries (one per sequence), got 2");
  const std::vector<std::int64_t> twice = {3, 1, 3};
  bad(
      [&](Call& c) {
        c.options.state_indices = twice;
        c.options.states_per_sequence = 0;
        c.options.num_accepted_tokens = {};
      },
      "state_indices[2]: expected a slot of its own, got 3 (also of sequence 0)");
}

TEST_F(RecurrentGatedDeltaRuleErrors, Functional) {
  Random random;
  const Tensor initial = normal(random, DType::kF32, {3, 4, 5, 6}), last = like(initial);
  const Call good = call(initial, last);
  const auto bad = [&](auto change, const std::string& text) {
    Call c = good;
    change(c);
    expect_error(
        [&] { recurrent_gated_delta_rule_fwd(c.q, c.k, c.v, c.g, c.gk, c.beta, c.from, c.o, c.to, c.seq, c.options); },
        "recurrent_gated_delta_rule_fwd: " + text);
  };
  expect_input_errors(bad);
  bad([](Call& c) { c.from.sizes[0] = 2; }, "initial_state: expected 3 states (one per sequence), got 2");
  bad([](Call& c) { c.from.sizes[3] = 5; }, "initial_state: expected shape [3, 4, 5, 6], got [3, 4, 5, 5]");
  bad([](Call& c) { c.from.strides[3] = 2; }, "initial_state: " + kStride);
  bad([](Call& c) { c.from.dtype = DType::kF16; },
      "initial_state: expected dtype float32 or bfloat16, got float16 (its range is too small for a state)");
  bad([](Call& c) { c.from.dtype = DType::kBF16; },
      "initial_state: expected dtype float32 (as final_state), got dtype bfloat16");
  bad([](Call& c) { c.to.sizes[0] = 4; }, "final_state: expected 3 states (one per sequence), got 4");
  bad([](Call& c) { c.to.rank = 3; }, "final_state: expected 4 dimensions, got 3 in [3, 4, 5]");
  bad([](Call& c) { c.to.data = c.from.data; }, "final_state: " + kOverlap + "initial_state");
  bad([](Call& c) { c.o.data = c.from.data; }, "o: " + kOverlap + "initial_state");
  const std::vector<std::int64_t> slots = {0, 1, 2};
  bad([&](Call& c) { c.options.state_indices = slots; }, "options: expected none about a pool, got one");
  bad([](Call& c) { c.options.states_per_sequence = 1; }, "options: expected none about a pool, got one");
}

}  // namespace
}  // namespace tidegate::test
