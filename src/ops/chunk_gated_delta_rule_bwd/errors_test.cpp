// chunk_gated_delta_rule_bwd: every argument wrong in turn. The text names it, and nothing is written.
#include <gtest/gtest.h>

#include "ops/chunk_gated_delta_rule_bwd/test_case.h"

namespace tidegate::test {
namespace {

struct Call {
  TensorView d_o, dfinal, q, k, v, g, beta, h0, states;
  ChunkGatedDeltaRuleGradients d;
  SeqLens seq;
  ChunkGatedDeltaRuleOptions options;
};

TEST(ChunkGatedDeltaRuleBwdErrors, EveryArgument) {
  Random random;
  const Training t =
      make_raw_training(random, {.lengths = {4, 0, 300}, .HK = 2, .G = 2, .K = 5, .V = 6, .dtype = DType::kBF16});
  const GradientResult out = empty_gradients(t);
  const Tensor states = states_for(t);
  const Rule& r = t.rule;
  const SnapshotPoint point{0, 1};
  const std::int64_t slots[] = {0, 1, 2};
  const auto bad = [&](const std::function<void(Call&)>& change, const std::string& message) {
    Call c{t.d_o, t.dfinal, r.q, r.k, r.v, r.g, r.beta, r.h0, states, views(out), r.c.seq(), options_of(t)};
    change(c);
    expect_error(
        [&] {
          chunk_gated_delta_rule_bwd(c.d_o, c.dfinal, c.q, c.k, c.v, c.g, c.beta, c.h0, c.states, c.d, c.seq,
                                     c.options);
        },
        "chunk_gated_delta_rule_bwd: " + message);
  };
  const std::string floats = "expected dtype float32, bfloat16, float16 or float64, got dtype ";
  const std::string overlap = "expected memory of its own, got an overlap with ";
  bad([](Call& c) { c.q = {}; }, "q: expected a tensor, got none");
  bad([](Call& c) { c.k = {}; }, "k: expected a tensor, got none");
  bad([](Call& c) { c.q.sizes[1] = 4; }, "q: expected shape [304, 2, 5], got [304, 4, 5]");
  bad([](Call& c) { c.d_o.sizes[0] = 303; }, "do: expected shape [304, 4, 6], got [303, 4, 6]");
  bad([](Call& c) { c.d_o.dtype = DType::kF16; }, "do: expected dtype bfloat16 (as k), got dtype float16");
  bad([](Call& c) { c.d_o.strides[2] = 2; }, "do: expected inner stride 1, got 2");
  bad([](Call& c) { c.dfinal.sizes[0] = 2; }, "dfinal_state: expected 3 states (one per sequence of 3), got 2");
  bad([](Call& c) { c.dfinal.sizes[2] = 6; }, "dfinal_state: expected shape [3, 4, 5, 6], got [3, 4, 6, 6]");
  bad([](Call& c) { c.dfinal.dtype = DType::kI32; }, "dfinal_state: " + floats + "int32");
  bad([](Call& c) { c.dfinal.dtype = DType::kF64; },
      "dfinal_state: expected dtype float32, bfloat16 or float16 (as k), got float64");
  bad([](Call& c) { c.states.sizes[0] = 2; },
      "states: expected 1 states (one after every 256 tokens of a sequence), got 2");
  bad([](Call& c) { c.states.dtype = DType::kBF16; }, "states: expected dtype float32, got dtype bfloat16");
  bad([](Call& c) { c.d.dq.sizes[2] = 4; }, "dq: expected shape [304, 2, 5] (as q), got [304, 2, 4]");
  bad([](Call& c) { c.d.dk.dtype = DType::kF32; }, "dk: expected dtype bfloat16 (as k), got dtype float32");
  bad([](Call& c) { c.d.dv.strides[2] = 2; }, "dv: expected inner stride 1, got 2");
  bad([](Call& c) { c.d.dg.sizes[1] = 2; }, "dg: expected shape [304, 4] (as g), got [304, 2]");
  bad([](Call& c) { c.d.dg.dtype = DType::kI64; }, "dg: " + floats + "int64");
  bad([](Call& c) { c.d.dbeta.dtype = DType::kF64; },
      "dbeta: expected dtype float32, bfloat16 or float16 (as k), got float64");
  bad([](Call& c) { c.h0 = {}; }, "dh0: expected none without initial_state, got a tensor");
  bad([](Call& c) { c.d.dh0.dtype = DType::kF16; },
      "dh0: expected dtype float32 or bfloat16, got float16 (its range is too small for a state)");
  bad([](Call& c) { c.d.dA_log.sizes[0] = 3; }, "dA_log: expected shape [4], got [3]");
  bad([](Call& c) { c.options.A_log = c.options.dt_bias = {}; }, "dA_log: expected none without A_log, got a tensor");
  bad([](Call& c) { c.options.dt_bias = {}; }, "ddt_bias: expected none without dt_bias, got a tensor");
  bad([](Call& c) { c.d.ddt_bias.dtype = DType::kBF16; }, "ddt_bias: expected dtype float32, got dtype bfloat16");
  bad(
      [&](Call& c) {
        c.options.snapshot_at = {&point, 1};
      },
      "snapshot_at: expected none, got 1 entries (a snapshot has no gradient)");
  bad([&](Call& c) { c.options.state_indices = slots; },
      "state_indices: expected none, got a list (a pool has no gradient)");
  bad([](Call& c) { c.d.dq.data = c.q.data; }, "dq: " + overlap + "q");
  bad([](Call& c) { c.d.dv = c.d_o; }, "dv: " + overlap + "do");
  bad([](Call& c) { c.d.dk = c.d.dq; }, "dk: " + overlap + "dq");
  bad([](Call& c) { c.d.dh0 = c.dfinal; }, "dh0: " + overlap + "dfinal_state");
}

}  // namespace
}  // namespace tidegate::test
