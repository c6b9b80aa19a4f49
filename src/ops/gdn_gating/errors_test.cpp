// gdn_gating_fwd, _bwd: every argument wrong in turn. The text names it, and nothing is written.
#include <gtest/gtest.h>

#include <limits>

#include "ops/gdn_gating/test_case.h"

namespace tidegate::test {
namespace {

struct Fwd {
  TensorView a, b, A_log, dt_bias, g, beta;
  GdnGatingOptions options;
  void operator()() const { gdn_gating_fwd(a, b, A_log, dt_bias, g, beta, options); }
};

TEST(GdnGatingErrors, Forward) {
  Random random;
  const Gating v = make_gating(random, {.B = 2, .T = 3, .H = 4, .dtype = DType::kBF16});
  const GatingForward out = outputs_of(v);
  const Fwd good{v.a, v.b, v.A_log, v.dt_bias, out.g, out.beta, v.c.options()};
  const auto bad = [&](auto change, const std::string& text) {
    Fwd call = good;
    change(call);
    expect_error(call, "gdn_gating_fwd: " + text);
  };
  const std::string floats = "expected dtype float32, bfloat16, float16 or float64, got dtype ";
  bad([](Fwd& c) { c.a = {}; }, "a: expected a tensor, got none");
  bad([](Fwd& c) { c.options.layout = Layout::kTND; }, "a: expected 2 dimensions, got 3 in [2, 3, 4]");
  bad([](Fwd& c) { c.options.layout = Layout::kBNSD; }, "A_log: expected shape [3], got [4]");
  bad([](Fwd& c) { c.a.dtype = DType::kI32; }, "a: " + floats + "int32");
  bad([](Fwd& c) { c.a.strides[2] = 2; }, "a: expected inner stride 1, got 2");
  bad([](Fwd& c) { c.b = {}; }, "b: expected a tensor, got none");
  bad([](Fwd& c) { c.b.sizes[0] = 1; }, "b: expected shape [2, 3, 4] (as a), got [1, 3, 4]");
  bad([](Fwd& c) { c.b.dtype = DType::kF32; }, "b: expected dtype bfloat16 (as a), got dtype float32");
  bad([](Fwd& c) { c.b.strides[2] = 0; }, "b: expected inner stride 1, got 0");
  bad([](Fwd& c) { c.A_log = {}; }, "A_log: expected a tensor, got none");
  bad([](Fwd& c) { c.A_log.sizes[0] = 3; }, "A_log: expected shape [4], got [3]");
  bad([](Fwd& c) { c.A_log.dtype = DType::kI64; }, "A_log: " + floats + "int64");
  bad([](Fwd& c) { c.dt_bias.sizes[0] = 5; }, "dt_bias: expected shape [4], got [5]");
  bad([](Fwd& c) { c.dt_bias.dtype = DType::kI8; }, "dt_bias: " + floats + "int8");
  bad([](Fwd& c) { c.g = {}; }, "g: expected a tensor, got none");
  bad([](Fwd& c) { c.g.sizes[1] = 4; }, "g: expected shape [2, 3, 4] (as a), got [2, 4, 4]");
  bad([](Fwd& c) { c.g.dtype = DType::kBF16; }, "g: expected dtype float32, got dtype bfloat16");
  bad([](Fwd& c) { c.g.strides[2] = 2; }, "g: expected inner stride 1, got 2");
  bad([](Fwd& c) { c.beta = {}; }, "beta: expected a tensor, got none");
  bad([](Fwd& c) { c.beta.rank = 2; }, "beta: expected shape [2, 3, 4] (as a), got [2, 3]");
  bad([](Fwd& c) { c.beta.dtype = DType::kF64; }, "beta: expected dtype float32, got dtype float64");
  bad([](Fwd& c) { c.beta.dtype = DType::kBool; }, "beta: " + floats + "bool");
  bad([](Fwd& c) { c.beta.strides[2] = 2; }, "beta: expected inner stride 1, got 2");
  bad([](Fwd& c) { c.options.beta_scale = std::numeric_limits<double>::infinity(); },
      "beta_scale: expected a finite number, got inf");
  bad([](Fwd& c) { c.g.data = c.a.data; }, "g: expected memory of its own, got an overlap with a");
  bad([](Fwd& c) { c.beta.data = c.A_log.data; }, "beta: expected memory of its own, got an overlap with A_log");
  bad([](Fwd& c) { c.beta.data = c.g.data; }, "beta: expected memory of its own, got an overlap with g");
  bad([](Fwd& c) { c.g.strides[0] = 0; },
      "g: expected an output without repeated elements, got stride 0 in dimension 0");
  good();
}

struct Bwd {
  TensorView dg, dbeta, a, b, A_log, dt_bias, da, db, dA_log, ddt_bias;
  GdnGatingOptions options;
  void operator()() const { gdn_gating_bwd(dg, dbeta, a, b, A_log, dt_bias, da, db, dA_log, ddt_bias, options); }
};

TEST(GdnGatingErrors, Backward) {
  Random random;
  const Gating v = make_gating(random, {.B = 2, .T = 3, .H = 4, .dtype = DType::kBF16});
  const GatingBackward out = gradients_of(v);
  const Bwd good{v.dg, v.dbeta, v.a, v.b, v.A_log, v.dt_bias, out.da, out.db, out.dA_log, out.ddt_bias, v.c.options()};
  const auto bad = [&](auto change, const std::string& text) {
    Bwd call = good;
    change(call);
    expect_error(call, "gdn_gating_bwd: " + text);
  };
  bad([](Bwd& c) { c.dg = {}; }, "dg: expected a tensor, got none");
  bad([](Bwd& c) { c.dg.dtype = DType::kF16; }, "dg: expected dtype float32, got dtype float16");
  bad([](Bwd& c) { c.dg.strides[2] = 2; }, "dg: expected inner stride 1, got 2");
  bad([](Bwd& c) { c.dbeta.sizes[2] = 1; }, "dbeta: expected shape [2, 3, 4] (as a), got [2, 3, 1]");
  bad([](Bwd& c) { c.dbeta.dtype = DType::kF64; }, "dbeta: expected dtype float32, got dtype float64");
  bad([](Bwd& c) { c.a.rank = 1; }, "a: expected 3 dimensions, got 1 in [2]");
  bad([](Bwd& c) { c.b.dtype = DType::kF32; }, "b: expected dtype bfloat16 (as a), got dtype float32");
  bad([](Bwd& c) { c.A_log.sizes[0] = 8; }, "A_log: expected shape [4], got [8]");
  bad([](Bwd& c) { c.dt_bias.rank = 2; }, "dt_bias: expected shape [4], got [4, 0]");
  bad([](Bwd& c) { c.da.sizes[0] = 3; }, "da: expected shape [2, 3, 4] (as a), got [3, 3, 4]");
  bad([](Bwd& c) { c.da.dtype = DType::kF32; }, "da: expected dtype bfloat16 (as a), got dtype float32");
  bad([](Bwd& c) { c.da.strides[2] = 2; }, "da: expected inner stride 1, got 2");
  bad([](Bwd& c) { c.db.sizes[2] = 5; }, "db: expected shape [2, 3, 4] (as a), got [2, 3, 5]");
  bad([](Bwd& c) { c.db.dtype = DType::kF16; }, "db: expected dtype bfloat16 (as a), got dtype float16");
  bad([](Bwd& c) { c.dA_log.sizes[0] = 3; }, "dA_log: expected shape [4], got [3]");
  bad([](Bwd& c) { c.dA_log.dtype = DType::kBF16; }, "dA_log: expected dtype float32, got dtype bfloat16");
  bad([](Bwd& c) { c.ddt_bias.rank = 0; }, "ddt_bias: expected shape [4], got []");
  bad([](Bwd& c) { c.ddt_bias.dtype = DType::kF64; }, "ddt_bias: expected dtype float32, got dtype float64");
  bad([](Bwd& c) { c.options.beta_scale = std::numeric_limits<double>::quiet_NaN(); },
      "beta_scale: expected a finite number, got nan");
  bad([](Bwd& c) { c.da = c.a; }, "da: expected memory of its own, got an overlap with a");
  bad([](Bwd& c) { c.db = c.da; }, "db: expected memory of its own, got an overlap with da");
  bad([](Bwd& c) { c.ddt_bias = c.dA_log; }, "ddt_bias: expected memory of its own, got an overlap with dA_log");
  bad([](Bwd& c) { c.dA_log.strides[0] = 0; },
      "dA_log: expected an output without repeated elements, got stride 0 in dimension 0");
  good();
}

}  // namespace
}  // namespace tidegate::test
