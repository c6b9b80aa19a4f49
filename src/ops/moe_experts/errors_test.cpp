// moe_experts_fwd and _bwd: every argument with a wrong value.
#include "ops/moe_experts/test_case.h"

namespace tidegate::test {
namespace {

struct Wrong {
  ExpertsCase e;
  Tensor out;
  void fwd(const std::function<void(MoeExpertsInputs&)>& change, const std::string& text,
           const MoeExpertsOptions& options = {}) const {
    MoeExpertsInputs in = e.inputs();
    change(in);
    expect_error([&] { moe_experts_fwd(in, out, options); }, "moe_experts_fwd: " + text);
    const ExpertsGradients g = empty_gradients(e);
    expect_error([&] { moe_experts_bwd(e.dout, in, g.views(e), options); }, "moe_experts_bwd: " + text);
  }
  void bwd(const std::function<void(TensorView&, MoeExpertsGradients&)>& change, const std::string& text) const {
    const ExpertsGradients g = empty_gradients(e);
    MoeExpertsGradients views = g.views(e);
    TensorView dout = e.dout;
    change(dout, views);
    expect_error([&] { moe_experts_bwd(dout, e.inputs(), views); }, "moe_experts_bwd: " + text);
  }
};

TEST(MoeExperts, Errors) {
  Random random;
  Experts c{3, 8, 5, 4, 2, 6};
  c.rank = 3;
  const Wrong w{make_experts(random, c), Tensor(DType::kF32, {3, 8})};
  const std::string narrow = "expected dtype float32, bfloat16 or float16, got dtype float64";
  w.fwd([](auto& in) { in.x = {}; }, "x: expected a tensor, got none");
  w.fwd([](auto& in) { in.x = ranked(in.x, 1); }, "x: expected 2 dimensions, got 1 in [3]");
  w.fwd([](auto& in) { in.x = strided(in.x, 1, 2); }, "x: expected inner stride 1, got 2");
  w.fwd([](auto& in) { in.ids = sized(in.ids, 0, 2); }, "ids: expected shape [3, 2], got [2, 2]");
  w.fwd([](auto& in) { in.ids = typed(in.ids, DType::kF32); }, "ids: expected dtype int32 or int64, got dtype float32");
  w.fwd([](auto& in) { in.weights = sized(in.weights, 1, 3); }, "weights: expected shape [3, 2], got [3, 3]");
  w.fwd([](auto& in) { in.weights = typed(in.weights, DType::kI32); },
        "weights: expected dtype float32, bfloat16, float16 or float64, got dtype int32");
  w.fwd([](auto& in) { in.gate_up = sized(in.gate_up, 1, 9); }, "gate_up: expected shape [4, 10, 8], got [4, 9, 8]");
  w.fwd([](auto& in) { in.gate_up = typed(in.gate_up, DType::kF64); }, "gate_up: " + narrow);
  w.fwd([](auto& in) { in.down = sized(in.down, 0, 3); }, "down: expected shape [4, 8, 5], got [3, 8, 5]");
  w.fwd([](auto& in) { in.down = strided(strided(in.down, 2, 2), 1, 10); },
        "down: expected stride 1 in one of the last two dimensions, got 10 and 2");
  w.fwd([](auto&) {}, "gate_up: expected shape [4, 8, 16], got [4, 10, 8]", {WeightAxes::kKN});
  w.fwd([](auto& in) { in.shared_down = {}; }, "shared_down: expected a tensor (as shared_gate), got none");
  w.fwd([](auto& in) { in.shared_gate = {}; }, "shared_up: expected none (as shared_gate), got a tensor");
  w.fwd([](auto& in) { in.shared_up = sized(in.shared_up, 0, 5); }, "shared_up: expected shape [6, 8], got [5, 8]");
  w.fwd([](auto& in) { in.shared_router = sized(in.shared_router, 0, 7); },
        "shared_router: expected shape [8], got [7]");
  w.fwd([](auto& in) { in.gate_up_lora_b = {}; }, "gate_up_lora_b: expected a tensor (as gate_up_lora_a), got none");
  w.fwd([](auto& in) { in.down_lora_a = {}; }, "down_lora_b: expected none (as down_lora_a), got a tensor");
  w.fwd([](auto& in) { in.gate_up_lora_a = sized(in.gate_up_lora_a, 2, 7); },
        "gate_up_lora_a: expected shape [4, 3, 8], got [4, 3, 7]");
  w.fwd([](auto& in) { in.gate_up_lora_b = sized(in.gate_up_lora_b, 1, 9); },
        "gate_up_lora_b: expected shape [4, 10, 3], got [4, 9, 3]");
  w.fwd([](auto& in) { in.down_lora_b = sized(in.down_lora_b, 2, 2); },
        "down_lora_b: expected shape [4, 8, 3], got [4, 8, 2]");
  w.fwd([](auto& in) { in.down_lora_a = typed(in.down_lora_a, DType::kF64); }, "down_lora_a: " + narrow);
  MoeExpertsOptions turns;
  turns.interleaved = true;
  ExpertsCase rows_apart = make_experts(random, {3, 8, 5, 4, 2, 0, DType::kF32, DType::kF32, true});
  for (const WeightAxes axes : {WeightAxes::kNK, WeightAxes::kKN}) {  // [E,K,N] in memory, whatever it is called
    rows_apart.c.options.weight_axes = turns.weight_axes = axes;
    expect_error([&] { moe_experts_fwd(rows_apart.inputs(), w.out, turns); },
                 "moe_experts_fwd: gate_up: expected stride 1 along H with interleaved rows, got 10");
  }
  turns.weight_axes = WeightAxes::kNK;
  w.fwd([](auto&) {}, "gate_up_lora_b: expected stride 1 along the rank with interleaved rows, got 10", turns);
  MoeExpertsOptions endless;
  endless.down_lora_scale = HUGE_VAL;
  w.fwd([](auto&) {}, "down_lora_scale: expected a finite number, got inf", endless);
  for (const std::int32_t id : {4, -2, 300}) {
    Wrong bad = w;
    bad.e.ids.view().as<std::int32_t>()[3] = id;
    bad.fwd([](auto&) {}, "ids[1,1]: expected -1 or 0..3, got " + std::to_string(id));
  }
  const MoeExpertsInputs in = w.e.inputs();
  expect_error([&] { moe_experts_fwd(in, in.x); },
               "moe_experts_fwd: out: expected memory of its own, got an overlap with x");
  expect_error([&] { moe_experts_fwd(in, typed(w.out, DType::kBF16)); },
               "moe_experts_fwd: out: expected dtype float32 (as x), got dtype bfloat16");
  w.bwd([](auto& dout, auto&) { dout = sized(dout, 0, 2); }, "dout: expected shape [3, 8] (as x), got [2, 8]");
  w.bwd([](auto&, auto& g) { g.dx = typed(g.dx, DType::kBF16); },
        "dx: expected dtype float32 (as x), got dtype bfloat16");
  w.bwd([](auto&, auto& g) { g.dweights = sized(g.dweights, 1, 1); },
        "dweights: expected shape [3, 2] (as weights), got [3, 1]");
  w.bwd([](auto&, auto& g) { g.dgate_up = typed(g.dgate_up, DType::kF64); }, "dgate_up: " + narrow);
  w.bwd([](auto&, auto& g) { g.ddown = sized(g.ddown, 2, 4); }, "ddown: expected shape [4, 8, 5], got [4, 8, 4]");
  w.bwd([](auto&, auto& g) { g.dshared_gate = ranked(g.dshared_gate, 1); },
        "dshared_gate: expected shape [6, 8], got [6]");
  w.bwd([](auto&, auto& g) { g.ddown_lora_b = sized(g.ddown_lora_b, 0, 3); },
        "ddown_lora_b: expected shape [4, 8, 3], got [3, 8, 3]");
  w.bwd([&](auto&, auto& g) { g.dgate_up_lora_a = in.gate_up_lora_a; },
        "dgate_up_lora_a: expected memory of its own, got an overlap with gate_up_lora_a");
  w.bwd([&](auto&, auto& g) { g.ddown = in.down; }, "ddown: expected memory of its own, got an overlap with down");
  w.bwd([](auto& dout, auto& g) { g.dx = dout; }, "dx: expected memory of its own, got an overlap with dout");
}

}  // namespace
}  // namespace tidegate::test
