// chunk_gated_delta_rule_fwd, _pool, gdn_segment_map: every argument wrong in turn. The text names it, and nothing is
// written.
#include <gtest/gtest.h>

#include <limits>

#include "ops/chunk_gated_delta_rule/test_case.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
const std::string kFloats = "expected dtype float32, bfloat16, float16 or float64, got dtype ";
const std::string kNone = "expected a tensor, got none";
const std::string kStride = "expected inner stride 1, got 2";
const std::string kOverlap = "expected memory of its own, got an overlap with ";

struct Call {
  TensorView q, k, v, g, beta, initial, o, last, snapshots;
  SeqLens seq;
  ChunkGatedDeltaRuleOptions options;
};

// What the checks have in common: k, v, g, beta, boundaries, and the gates formed inside. Three sequences of 4, 0 and 3
// tokens in TND, 2 key heads, 4 value heads, K = 5, V = 6, bf16 with gates of fp32.
template <class Bad>
void expect_input_errors(const Bad& bad) {
  bad([](Call& c) { c.k = {}; }, "k: " + kNone);
  bad([](Call& c) { c.k.rank = 2; }, "k: expected 3 dimensions, got 2 in [7, 2]");
  bad([](Call& c) { c.k.dtype = DType::kI32; }, "k: " + kFloats + "int32");
  bad([](Call& c) { c.k.strides[2] = 2; }, "k: " + kStride);
  bad([](Call& c) { c.k.sizes[1] = 0; }, "k: expected at least 1 head, got 0");
  bad([](Call& c) { c.k.sizes[2] = 0; }, "k: expected at least 1 channel, got 0");
  bad([](Call& c) { c.k.sizes[1] = 3; }, "v: expected a multiple of 3 (key heads) heads, got 4");
  bad([](Call& c) { c.k.sizes[0] = 6; }, "v: expected shape [6, 4, 6], got [7, 4, 6]");
  bad([](Call& c) { c.k.dtype = DType::kF32; }, "v: expected dtype float32 (as k), got dtype bfloat16");
  bad([](Call& c) { c.v = {}; }, "v: " + kNone);
  bad([](Call& c) { c.v.rank = 4; }, "v: expected 3 dimensions, got 4 in [7, 4, 6, 0]");
  bad([](Call& c) { c.v.dtype = DType::kF16; }, "v: expected dtype bfloat16 (as k), got dtype float16");
  bad([](Call& c) { c.v.sizes[1] = 0; }, "v: expected a multiple of 2 (key heads) heads, got 0");
  bad([](Call& c) { c.v.sizes[1] = 3; }, "v: expected a multiple of 2 (key heads) heads, got 3");
  bad([](Call& c) { c.v.sizes[2] = 0; }, "v: expected at least 1 channel, got 0");
  bad([](Call& c) { c.v.sizes[0] = 8; }, "v: expected shape [7, 4, 6], got [8, 4, 6]");
  bad([](Call& c) { c.v.strides[2] = 2; }, "v: " + kStride);
  bad([](Call& c) { c.g = {}; }, "g: " + kNone);
  bad([](Call& c) { c.g.sizes[1] = 2; }, "g: expected shape [7, 4], got [7, 2]");
  bad([](Call& c) { c.g.rank = 3; }, "g: expected shape [7, 4], got [7, 4, 0]");
  bad([](Call& c) { c.g.dtype = DType::kI64; }, "g: " + kFloats + "int64");
  bad([](Call& c) { c.g.dtype = DType::kF64; }, "g: expected dtype float32, bfloat16 or float16 (as k), got float64");
  bad([](Call& c) { c.beta = {}; }, "beta: " + kNone);
  bad([](Call& c) { c.beta.sizes[0] = 6; }, "beta: expected shape [7, 4], got [6, 4]");
  bad([](Call& c) { c.beta.dtype = DType::kBool; }, "beta: " + kFloats + "bool");
  bad([](Call& c) { c.beta.dtype = DType::kF64; },
      "beta: expected dtype float32, bfloat16 or float16 (as k), got float64");
  bad([](Call& c) { c.seq = SeqLens::dense(1, 6); }, "seq: expected 1 rows of 7 tokens, got 1 rows of 6");
  bad([](Call& c) { c.seq = SeqLens::dense(2, 7); }, "seq: expected 1 rows of 7 tokens, got 2 rows of 7");
  bad([](Call& c) { c.options.A_log.sizes[0] = 2; }, "A_log: expected shape [4], got [2]");
  bad([](Call& c) { c.options.A_log.rank = 2; }, "A_log: expected shape [4], got [4, 0]");
  bad([](Call& c) { c.options.A_log.dtype = DType::kI8; }, "A_log: " + kFloats + "int8");
  bad([](Call& c) { c.options.A_log = {}; }, "dt_bias: expected none without A_log, got a tensor");
  bad([](Call& c) { c.options.dt_bias.sizes[0] = 5; }, "dt_bias: expected shape [4], got [5]");
  bad([](Call& c) { c.options.dt_bias.dtype = DType::kI32; }, "dt_bias: " + kFloats + "int32");
  bad([](Call& c) { c.options.beta_sigmoid = false; }, "beta_scale: expected 1 without beta_sigmoid, got 2");
  bad([](Call& c) { c.options.beta_scale = kNan; }, "beta_scale: expected a finite number, got nan");
  bad([](Call& c) { c.options.beta_scale = kInfinity; }, "beta_scale: expected a finite number, got inf");
  bad([](Call& c) { c.options.layout = Layout::kBNSD; }, "k: expected 4 dimensions, got 3 in [7, 2, 5]");
}

class ChunkGatedDeltaRuleErrors : public testing::Test {
 protected:
  ChunkGatedDeltaRuleErrors() {
    Random random;
    rule_ = make_rule(random, {.lengths = {4, 0, 3}, .HK = 2, .G = 2, .K = 5, .V = 6, .dtype = DType::kBF16});
    A_log_ = normal(random, DType::kF32, {4});
    dt_bias_ = normal(random, DType::kF16, {4});
    rule_.options.A_log = A_log_;
    rule_.options.dt_bias = dt_bias_;
    rule_.options.beta_sigmoid = true;
    rule_.options.beta_scale = 2.0;
  }
  Call call(const TensorView& o, const TensorView& last, const TensorView& snapshots) const {
    return {rule_.q, rule_.k, rule_.v, rule_.g, rule_.beta, rule_.h0, o, last, snapshots, rule_.c.seq(), rule_.options};
  }

  Rule rule_;
  Tensor A_log_, dt_bias_;
};

void run_fwd(const Call& c) {
  chunk_gated_delta_rule_fwd(c.q, c.k, c.v, c.g, c.beta, c.initial, c.o, c.last, c.snapshots, c.seq, c.options);
}

TEST_F(ChunkGatedDeltaRuleErrors, Forward) {
  const SnapshotPoint points[] = {{2, 3}, {0, 1}};
  rule_.options.snapshot_at = points;
  rule_.options.state_v_first = true;
  rule_.h0 = copied(exchanged(rule_.h0, 2, 3));
  const RuleResult out = outputs(rule_, DType::kBF16, DType::kF32);
  const Call good = call(out.o, out.ht, out.snapshots);
  const auto bad = [&](auto change, const std::string& text) {
    Call c = good;
    change(c);
    expect_error([&] { run_fwd(c); }, "chunk_gated_delta_rule_fwd: " + text);
  };
  expect_input_errors(bad);

  bad([](Call& c) { c.q = {}; }, "q: " + kNone);
  bad([](Call& c) { c.q.sizes[1] = 4; }, "q: expected shape [7, 2, 5], got [7, 4, 5]");
  bad([](Call& c) { c.q.sizes[2] = 4; }, "q: expected shape [7, 2, 5], got [7, 2, 4]");
  bad([](Call& c) { c.q.dtype = DType::kF32; }, "q: expected dtype bfloat16 (as k), got dtype float32");
  bad([](Call& c) { c.q.strides[2] = 2; }, "q: " + kStride);
  bad([](Call& c) { c.options.scale = kNan; }, "scale: expected a finite number, got nan");
  bad([](Call& c) { c.options.scale = -kInfinity; }, "scale: expected a finite number, got -inf");
  bad([](Call& c) { c.options.out_layout = Layout::kBSND; },
      "out_layout: expected BSND or BNSD with a batched layout, TND or NTD with a packed one, got another kind");
  bad([](Call& c) { c.options.out_layout = Layout::kNTD; }, "o: expected shape [4, 7, 6], got [7, 4, 6]");

  bad([](Call& c) { c.initial.rank = 3; }, "initial_state: expected 4 dimensions, got 3 in [3, 4, 6]");
  bad([](Call& c) { c.initial.sizes[0] = 2; }, "initial_state: expected 3 states (one per sequence of 3), got 2");
  bad([](Call& c) { c.initial.sizes[1] = 2; }, "initial_state: expected shape [3, 4, 6, 5], got [3, 2, 6, 5]");
  bad([](Call& c) { c.options.state_v_first = false; }, "initial_state: expected shape [3, 4, 5, 6], got [3, 4, 6, 5]");
  bad([](Call& c) { c.initial.dtype = DType::kI32; }, "initial_state: " + kFloats + "int32");
  bad([](Call& c) { c.initial.dtype = DType::kF64; },
      "initial_state: expected dtype float32, bfloat16 or float16 (as k), got float64");
  bad([](Call& c) { c.last.rank = 5; }, "final_state: expected 4 dimensions, got 5 in [3, 4, 6, 5, 0]");
  bad([](Call& c) { c.last.sizes[0] = 4; }, "final_state: expected 3 states (one per sequence of 3), got 4");
  bad([](Call& c) { c.last.sizes[3] = 6; }, "final_state: expected shape [3, 4, 6, 5], got [3, 4, 6, 6]");
  bad([](Call& c) { c.last.dtype = DType::kI64; }, "final_state: " + kFloats + "int64");
  bad([](Call& c) { c.last.dtype = DType::kF16; },
      "final_state: expected dtype float32 or bfloat16, got float16 (its range is too small for a state)");

  bad([](Call& c) { c.snapshots = {}; }, "snapshots: expected a tensor (snapshot_at has 2 entries), got none");
  bad([](Call& c) { c.options.snapshot_at = {}; },
      "snapshots: expected 0 states (one per entry of snapshot_at), got 2");
  bad([](Call& c) { c.snapshots.sizes[0] = 3; }, "snapshots: expected 2 states (one per entry of snapshot_at), got 3");
  bad([](Call& c) { c.snapshots.sizes[2] = 5; }, "snapshots: expected shape [2, 4, 6, 5], got [2, 4, 5, 5]");
  bad([](Call& c) { c.snapshots.dtype = DType::kBF16; }, "snapshots: expected dtype float32, got dtype bfloat16");
  const auto at = [&](const SnapshotPoint& point, const std::string& text) {
    const SnapshotPoint wrong[] = {{0, 4}, point};
    bad([&](Call& c) { c.options.snapshot_at = wrong; }, "snapshot_at[1]: " + text);
  };
  at({3, 0}, "expected a sequence from 0 to 2, got 3");
  at({-1, 0}, "expected a sequence from 0 to 2, got -1");
  at({0, 5}, "expected 0 to 4 tokens, got 5");
  at({2, -1}, "expected 0 to 3 tokens, got -1");
  at({1, 1}, "expected 0 to 0 tokens, got 1");

  bad([](Call& c) { c.o.rank = 4; }, "o: expected shape [7, 4, 6], got [7, 4, 6, 0]");
  bad([](Call& c) { c.o.sizes[0] = 6; }, "o: expected shape [7, 4, 6], got [6, 4, 6]");
  bad([](Call& c) { c.o.dtype = DType::kF32; }, "o: expected dtype bfloat16 (as k), got dtype float32");
  bad([](Call& c) { c.o.strides[2] = 2; }, "o: " + kStride);

  bad([](Call& c) { c.o.data = c.q.data; }, "o: " + kOverlap + "q");
  bad([](Call& c) { c.o.data = c.k.data; }, "o: " + kOverlap + "k");
  bad([](Call& c) { c.o.data = c.v.data; }, "o: " + kOverlap + "v");
  bad([](Call& c) { c.o.data = c.initial.data; }, "o: " + kOverlap + "initial_state");
  bad([](Call& c) { c.o.data = const_cast<SnapshotPoint*>(c.options.snapshot_at.data()); },
      "o: " + kOverlap + "snapshot_at");
  bad([](Call& c) { c.last.data = c.g.data; }, "final_state: " + kOverlap + "g");
  bad([](Call& c) { c.last.data = c.beta.data; }, "final_state: " + kOverlap + "beta");
  bad([](Call& c) { c.last.data = c.o.data; }, "final_state: " + kOverlap + "o");
  bad([](Call& c) { c.last.data = c.initial.as<float>() + 1; }, "final_state: " + kOverlap + "initial_state");
  bad([](Call& c) { c.snapshots.data = c.options.A_log.data; }, "snapshots: " + kOverlap + "A_log");
  bad([](Call& c) { c.snapshots.data = c.options.dt_bias.data; }, "snapshots: " + kOverlap + "dt_bias");
  bad([](Call& c) { c.snapshots.data = c.initial.data; }, "snapshots: " + kOverlap + "initial_state");
  bad([](Call& c) { c.snapshots.data = c.last.data; }, "snapshots: " + kOverlap + "final_state");
  const std::string repeats = "expected an output without repeated elements, got stride 0 in dimension ";
  bad([](Call& c) { c.o.strides[0] = 0; }, "o: " + repeats + "0");
  bad([](Call& c) { c.last.strides[1] = 0; }, "final_state: " + repeats + "1");
  bad([](Call& c) { c.snapshots.strides[0] = 0; }, "snapshots: " + repeats + "0");
  run_fwd(good);
}

// States in slots, through the operator that takes both of them.
TEST_F(ChunkGatedDeltaRuleErrors, Slots) {
  Random random;
  const Tensor pool = normal(random, DType::kF32, {5, 4, 5, 6}), other = normal(random, DType::kF32, {6, 4, 5, 6});
  const RuleResult out = outputs(rule_, DType::kBF16, DType::kF32);
  const std::int64_t slots[] = {3, -1, 0};
  const std::uint8_t has[] = {1, 0, 1};
  Call good = call(out.o, pool, {});
  good.initial = pool;
  good.options.state_indices = slots;
  good.options.has_initial_state = has;
  const auto bad = [&](auto change, const std::string& text) {
    Call c = good;
    change(c);
    expect_error([&] { run_fwd(c); }, "chunk_gated_delta_rule_fwd: " + text);
  };
  const auto indices = [&](const std::vector<std::int64_t>& list, const std::string& text) {
    bad([&](Call& c) { c.options.state_indices = list; }, "state_indices" + text);
  };
  indices({3, -1}, ": expected 3 entries (one per sequence), got 2");
  indices({3, -1, 0, 1}, ": expected 3 entries (one per sequence), got 4");
  indices({5, -1, 0}, "[0]: expected 0 to 4 or -1 (null slot), got 5");
  indices({3, -2, 0}, "[1]: expected 0 to 4 or -1 (null slot), got -2");
  indices({3, 1, 3}, "[2]: expected a slot of its own, got 3 (also of sequence 0)");
  bad([](Call& c) { c.options.null_slot = 9; }, "state_indices[1]: expected 0 to 4 or 9 (null slot), got -1");
  bad([](Call& c) { c.initial = c.last = {}; }, "state_indices: expected none without states, got a list");
  bad([&](Call& c) { c.last = other; }, "final_state: expected 5 states (as the other states), got 6");
  bad([&](Call& c) { c.options.has_initial_state = std::span(has, 2); },
      "has_initial_state: expected 3 entries (one per sequence), got 2");
  const SnapshotPoint skipped[] = {{1, 0}};
  const Tensor snapshots(DType::kF32, {1, 4, 5, 6});
  bad(
      [&](Call& c) {
        c.options.snapshot_at = skipped;
        c.snapshots = snapshots;
      },
      "snapshot_at[0]: expected a sequence with a slot, got 1 (null slot)");
  // The same memory seen with other strides is not the same pool.
  bad([](Call& c) { c.last.strides[0] *= 2; }, "final_state: " + kOverlap + "initial_state");
  bad([](Call& c) { c.last.dtype = DType::kBF16; }, "final_state: " + kOverlap + "initial_state");
  run_fwd(good);
}

TEST_F(ChunkGatedDeltaRuleErrors, Pool) {
  Random random;
  const Tensor pool = normal(random, DType::kF32, {5, 4, 5, 6});
  const RuleResult out = outputs(rule_, DType::kBF16, DType::kF32);
  const std::int64_t slots[] = {3, -1, 0};
  Call good = call(out.o, pool, {});
  good.options.state_indices = slots;
  const auto run_pool = [](const Call& c) {
    chunk_gated_delta_rule_pool(c.q, c.k, c.v, c.g, c.beta, c.last, c.o, c.seq, c.options);
  };
  const auto bad = [&](auto change, const std::string& text) {
    Call c = good;
    change(c);
    expect_error([&] { run_pool(c); }, "chunk_gated_delta_rule_pool: " + text);
  };
  bad([](Call& c) { c.k = {}; }, "k: " + kNone);
  bad([](Call& c) { c.last = {}; }, "state: " + kNone);
  bad([](Call& c) { c.last.rank = 3; }, "state: expected 4 dimensions, got 3 in [5, 4, 5]");
  bad([](Call& c) { c.last.sizes[1] = 2; }, "state: expected shape [5, 4, 5, 6], got [5, 2, 5, 6]");
  bad([](Call& c) { c.last.dtype = DType::kI8; }, "state: " + kFloats + "int8");
  bad([](Call& c) { c.last.dtype = DType::kF16; },
      "state: expected dtype float32 or bfloat16, got float16 (its range is too small for a state)");
  bad([](Call& c) { c.options.state_indices = {}; }, "state_indices: expected 3 entries (one per sequence), got 0");
  const SnapshotPoint points[] = {{0, 0}};
  bad([&](Call& c) { c.options.snapshot_at = points; }, "snapshot_at: expected none, got 1 entries");
  bad([](Call& c) { c.last.data = c.v.data; }, "state: " + kOverlap + "v");
  bad([](Call& c) { c.o.data = c.last.data; }, "state: " + kOverlap + "o");
  bad([](Call& c) { c.o.data = const_cast<std::int64_t*>(c.options.state_indices.data()); },
      "o: " + kOverlap + "state_indices");
  bad([](Call& c) { c.last.sizes[0] = 0; }, "state_indices[0]: expected -1 (null slot) in a pool of 0, got 3");
  std::uint8_t has[] = {1, 1, 1};
  bad([&](Call& c) { c.options.has_initial_state = has, c.o.data = has; }, "o: " + kOverlap + "has_initial_state");
  bad([](Call& c) { c.last.strides[0] = 0; },
      "state: expected an output without repeated elements, got stride 0 in dimension 0");
  run_pool(good);
}

TEST_F(ChunkGatedDeltaRuleErrors, SegmentMap) {
  const Tensor phi(DType::kF32, {3, 4, 5, 5}), s(DType::kF32, {3, 4, 5, 6});
  const Call good = call(phi, s, {});  // o stands for phi
  const auto run_map = [](const Call& c) { gdn_segment_map(c.k, c.v, c.g, c.beta, c.o, c.last, c.seq, c.options); };
  const auto bad = [&](auto change, const std::string& text) {
    Call c = good;
    change(c);
    expect_error([&] { run_map(c); }, "gdn_segment_map: " + text);
  };
  expect_input_errors(bad);
  bad([](Call& c) { c.o = {}; }, "phi: " + kNone);
  bad([](Call& c) { c.o.sizes[3] = 6; }, "phi: expected shape [3, 4, 5, 5], got [3, 4, 5, 6]");
  bad([](Call& c) { c.o.rank = 3; }, "phi: expected shape [3, 4, 5, 5], got [3, 4, 5]");
  bad([](Call& c) { c.o.dtype = DType::kBF16; }, "phi: expected dtype float32, got dtype bfloat16");
  bad([](Call& c) { c.last = {}; }, "s: " + kNone);
  bad([](Call& c) { c.last.rank = 3; }, "s: expected 4 dimensions, got 3 in [3, 4, 5]");
  bad([](Call& c) { c.last.sizes[0] = 1; }, "s: expected 3 states (one per sequence of 3), got 1");
  bad([](Call& c) { c.last.sizes[3] = 5; }, "s: expected shape [3, 4, 5, 6], got [3, 4, 5, 5]");
  bad([](Call& c) { c.last.dtype = DType::kBF16; }, "s: expected dtype float32, got dtype bfloat16");
  bad([](Call& c) { c.o.data = c.k.data; }, "phi: " + kOverlap + "k");
  bad([](Call& c) { c.last.data = c.o.data; }, "s: " + kOverlap + "phi");
  bad([](Call& c) { c.last.data = c.options.A_log.data; }, "s: " + kOverlap + "A_log");
  bad([](Call& c) { c.o.strides[1] = 0; },
      "phi: expected an output without repeated elements, got stride 0 in dimension 1");
  const std::string unset = "options: expected none about states, snapshots or o, got one";
  const SnapshotPoint points[] = {{0, 0}};
  const std::int64_t slots[] = {0, 1, 2};
  const std::uint8_t has[] = {1, 1, 1};
  bad([&](Call& c) { c.options.snapshot_at = points; }, unset);
  bad([&](Call& c) { c.options.state_indices = slots; }, unset);
  bad([&](Call& c) { c.options.has_initial_state = has; }, unset);
  bad([](Call& c) { c.options.state_v_first = true; }, unset);
  bad([](Call& c) { c.options.out_layout = Layout::kNTD; }, unset);
  bad([](Call& c) { c.options.scale = 1.0; }, unset);
  run_map(good);
}

TEST_F(ChunkGatedDeltaRuleErrors, Precision) {
  EXPECT_EQ(parse_precision("op", "fp32"), Precision::kFp32);
  EXPECT_EQ(parse_precision("op", "bf16"), Precision::kBf16);
  expect_error([] { parse_precision("op", "tf32"); }, "op: precision: expected fp32 or bf16, got tf32");
}

}  // namespace
}  // namespace tidegate::test
