// rms_norm_gated_fwd, _bwd: every argument wrong in turn. The text names it, and nothing is written.
#include <gtest/gtest.h>

#include "ops/rms_norm_gated/test_case.h"

namespace tidegate::test {
namespace {

const std::string kFloats = "expected dtype float32, bfloat16, float16 or float64, got dtype ";

struct Fwd {
  TensorView x, z, weight, y, rstd;
  RmsNormGatedOptions options;
  void operator()() const { rms_norm_gated_fwd(x, z, weight, y, rstd, options); }
};

TEST(RmsNormGatedErrors, Forward) {
  Random random;
  const GatedNorm v = make_gated(random, DType::kBF16, DType::kF32, {2, 3, 8});
  const GatedForward out = outputs_of(v);
  const Fwd good{v.x, v.z, v.weight, out.y, out.rstd, {}};
  const auto bad = [&](auto change, const std::string& text) {
    Fwd call = good;
    change(call);
    expect_error(call, "rms_norm_gated_fwd: " + text);
  };
  bad([](Fwd& c) { c.x = {}; }, "x: expected a tensor, got none");
  bad([](Fwd& c) { c.x.rank = 0; }, "x: expected at least 1 dimension, got 0");
  bad([](Fwd& c) { c.x.dtype = DType::kI32; }, "x: " + kFloats + "int32");
  bad([](Fwd& c) { c.x.strides[2] = 2; }, "x: expected inner stride 1, got 2");
  bad([](Fwd& c) { c.z = {}; }, "z: expected a tensor, got none");
  bad([](Fwd& c) { c.z.rank = 2; }, "z: expected shape [2, 3, 8] (as x), got [2, 3]");
  bad([](Fwd& c) { c.z.dtype = DType::kF32; }, "z: expected dtype bfloat16 (as x), got dtype float32");
  bad([](Fwd& c) { c.z.strides[2] = -1; }, "z: expected inner stride 1, got -1");
  bad([](Fwd& c) { c.weight.sizes[0] = 4; }, "weight: expected shape [8], got [4]");
  bad([](Fwd& c) { c.weight.dtype = DType::kBool; }, "weight: " + kFloats + "bool");
  bad([](Fwd& c) { c.y = {}; }, "y: expected a tensor, got none");
  bad([](Fwd& c) { c.y.sizes[1] = 2; }, "y: expected shape [2, 3, 8] (as x), got [2, 2, 8]");
  bad([](Fwd& c) { c.y.dtype = DType::kF16; }, "y: expected dtype bfloat16 (as x), got dtype float16");
  bad([](Fwd& c) { c.y.strides[2] = 2; }, "y: expected inner stride 1, got 2");
  bad([](Fwd& c) { c.rstd = {}; }, "rstd: expected a tensor, got none");
  bad([](Fwd& c) { c.rstd.sizes[0] = 6; }, "rstd: expected shape [2, 3] (x without its last dimension), got [6, 3]");
  bad([](Fwd& c) { c.rstd.dtype = DType::kF64; }, "rstd: expected dtype float32, got dtype float64");
  bad([](Fwd& c) { c.options.eps = -1e-6; }, "eps: expected a finite number >= 0, got -1e-06");
  bad([](Fwd& c) { c.options.activation = Activation::kNone; },
      "activation: expected silu, swish or sigmoid, got None");
  bad([](Fwd& c) { c.y = c.z; }, "y: expected memory of its own, got an overlap with z");
  bad([](Fwd& c) { c.rstd.data = c.weight.data; }, "rstd: expected memory of its own, got an overlap with weight");
  bad([](Fwd& c) { c.y.strides[0] = 8; },
      "y: expected an output without repeated elements, got stride 8 in dimension 1");
  good();
}

struct Bwd {
  TensorView dy, x, z, weight, rstd, dx, dz, dweight;
  RmsNormGatedOptions options;
  void operator()() const { rms_norm_gated_bwd(dy, x, z, weight, rstd, dx, dz, dweight, options); }
};

TEST(RmsNormGatedErrors, Backward) {
  Random random;
  const GatedNorm v = make_gated(random, DType::kBF16, DType::kF32, {2, 3, 8});
  const GatedBackward out = gradients_of(v);
  const Bwd good{v.dy, v.x, v.z, v.weight, v.rstd, out.dx, out.dz, out.dweight, {}};
  const auto bad = [&](auto change, const std::string& text) {
    Bwd call = good;
    change(call);
    expect_error(call, "rms_norm_gated_bwd: " + text);
  };
  bad([](Bwd& c) { c.dy = {}; }, "dy: expected a tensor, got none");
  bad([](Bwd& c) { c.dy.sizes[0] = 1; }, "dy: expected shape [2, 3, 8] (as x), got [1, 3, 8]");
  bad([](Bwd& c) { c.dy.dtype = DType::kF16; }, "dy: expected dtype bfloat16 (as x), got dtype float16");
  bad([](Bwd& c) { c.dy.strides[2] = 2; }, "dy: expected inner stride 1, got 2");
  bad([](Bwd& c) { c.x.dtype = DType::kI8; }, "x: " + kFloats + "int8");
  bad([](Bwd& c) { c.z.sizes[2] = 9; }, "z: expected shape [2, 3, 8] (as x), got [2, 3, 9]");
  bad([](Bwd& c) { c.weight.rank = 0; }, "weight: expected shape [8], got []");
  bad([](Bwd& c) { c.rstd = {}; }, "rstd: expected a tensor, got none");
  bad([](Bwd& c) { c.rstd.dtype = DType::kBF16; }, "rstd: expected dtype float32, got dtype bfloat16");
  bad([](Bwd& c) { c.options.activation = Activation::kNone; },
      "activation: expected silu, swish or sigmoid, got None");
  bad([](Bwd& c) { c.dx.sizes[2] = 7; }, "dx: expected shape [2, 3, 8] (as x), got [2, 3, 7]");
  bad([](Bwd& c) { c.dx.dtype = DType::kF32; }, "dx: expected dtype bfloat16 (as x), got dtype float32");
  bad([](Bwd& c) { c.dx.strides[2] = 2; }, "dx: expected inner stride 1, got 2");
  bad([](Bwd& c) { c.dz.rank = 1; }, "dz: expected shape [2, 3, 8] (as x), got [2]");
  bad([](Bwd& c) { c.dz.dtype = DType::kF32; }, "dz: expected dtype bfloat16 (as x), got dtype float32");
  bad([](Bwd& c) { c.dweight.sizes[0] = 9; }, "dweight: expected shape [8], got [9]");
  bad([](Bwd& c) { c.dweight.dtype = DType::kF64; }, "dweight: expected dtype float32, got dtype float64");
  bad([](Bwd& c) { c.dz = c.dx; }, "dz: expected memory of its own, got an overlap with dx");
  bad([](Bwd& c) { c.dx = c.x; }, "dx: expected memory of its own, got an overlap with x");
  bad([](Bwd& c) { c.dweight = c.weight; }, "dweight: expected memory of its own, got an overlap with weight");
  good();
}

}  // namespace
}  // namespace tidegate::test
