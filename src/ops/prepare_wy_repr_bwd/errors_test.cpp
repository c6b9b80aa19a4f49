// prepare_wy_repr_bwd, _da and _full: every argument wrong in turn. The text names it, and nothing is written.
#include <gtest/gtest.h>

#include "tidegate/chunk_backward.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

struct Call {
  TensorView k, v, beta, A, dw, du, gc, dA, dk, dv, dbeta, dg;
  SeqLens seq;
  Layout layout;
};
struct Operator {
  std::string name;
  void (*run)(const Call&);
};
const Operator kDa{"prepare_wy_repr_bwd_da", [](const Call& c) {
                     prepare_wy_repr_bwd_da(c.k, c.v, c.beta, c.A, c.dw, c.du, c.gc, c.dA, c.seq, c.layout);
                   }};
const Operator kFull{"prepare_wy_repr_bwd_full", [](const Call& c) {
                       prepare_wy_repr_bwd_full(c.k, c.v, c.beta, c.A, c.dA, c.dw, c.du, c.gc, c.dk, c.dv, c.dbeta,
                                                c.dg, c.seq, c.layout);
                     }};
const Operator kBoth{"prepare_wy_repr_bwd", [](const Call& c) {
                       prepare_wy_repr_bwd(c.k, c.v, c.beta, c.A, c.dw, c.du, c.gc, c.dk, c.dv, c.dbeta, c.dg, c.seq,
                                           c.layout);
                     }};

TEST(PrepareWyReprBwdErrors, EveryArgument) {
  Random random;
  const Tensor k = normal(random, DType::kBF16, {6, 2, 8});
  const Tensor v = normal(random, DType::kBF16, {6, 4, 5});
  const Tensor beta = normal(random, DType::kBF16, {6, 4});
  const Tensor A = normal(random, DType::kF32, {6, 4, 16});
  const Tensor dw = normal(random, DType::kF32, {6, 4, 8});
  const Tensor du = normal(random, DType::kBF16, {6, 4, 5});
  const Tensor gc = normal(random, DType::kF32, {6, 4});
  const Tensor dA = normal(random, DType::kF32, {6, 4, 16});
  const Tensor dk(DType::kF32, {6, 2, 8});
  const Tensor dv(DType::kBF16, {6, 4, 5});
  const Tensor dbeta(DType::kF32, {6, 4});
  const Tensor dg(DType::kF32, {6, 4});
  const Call good{k, v, beta, A, dw, du, gc, dA, dk, dv, dbeta, dg, SeqLens::dense(1, 6), Layout::kTND};
  const auto bad = [&](const std::vector<Operator>& ops, auto change, const std::string& text) {
    Call call = good;
    change(call);
    for (const Operator& op : ops) {
      expect_error([&] { op.run(call); }, op.name + ": " + text);
    }
  };
  const std::vector<Operator> all{kDa, kFull, kBoth};
  const std::vector<Operator> gradients{kFull, kBoth};
  const std::vector<Operator> with_dA{kDa, kFull};
  const std::string either = "expected dtype float32 or bfloat16 (as k), got dtype ";
  bad(
      all, [](Call& c) { c.k = {}; }, "k: expected a tensor, got none");
  bad(
      all, [](Call& c) { c.k.sizes[1] = 3; }, "v: expected a multiple of 3 (key heads) heads, got 4");
  bad(
      all, [](Call& c) { c.layout = Layout::kBSND; }, "k: expected 4 dimensions, got 3 in [6, 2, 8]");
  bad(
      all, [](Call& c) { c.v = {}; }, "v: expected a tensor, got none");
  bad(
      all, [](Call& c) { c.v.dtype = DType::kF16; }, "v: expected dtype bfloat16 (as k), got dtype float16");
  bad(
      all, [](Call& c) { c.v.sizes[0] = 5; }, "v: expected shape [6, 4, 5], got [5, 4, 5]");
  bad(
      all, [](Call& c) { c.v.strides[2] = 2; }, "v: expected inner stride 1, got 2");
  bad(
      all, [](Call& c) { c.beta.sizes[1] = 2; }, "beta: expected shape [6, 4], got [6, 2]");
  bad(
      all, [](Call& c) { c.beta.dtype = DType::kF64; }, "beta: " + either + "float64");
  bad(
      all, [](Call& c) { c.A = {}; }, "A: expected a tensor, got none");
  bad(
      all, [](Call& c) { c.A.rank = 2; }, "A: expected 3 dimensions, got 2 in [6, 4]");
  bad(
      all, [](Call& c) { c.A.sizes[2] = 20; }, "A: expected a last size of 16, 32, 64 or 128, got 20");
  bad(
      all, [](Call& c) { c.A.sizes[1] = 2; }, "A: expected shape [6, 4, 16], got [6, 2, 16]");
  bad(
      all, [](Call& c) { c.A.dtype = DType::kF16; }, "A: " + either + "float16");
  bad(
      all, [](Call& c) { c.dw = {}; }, "dw: expected a tensor, got none");
  bad(
      all, [](Call& c) { c.dw.sizes[2] = 5; }, "dw: expected shape [6, 4, 8], got [6, 4, 5]");
  bad(
      all, [](Call& c) { c.dw.dtype = DType::kF64; }, "dw: " + either + "float64");
  bad(
      all, [](Call& c) { c.du = {}; }, "du: expected a tensor, got none");
  bad(
      all, [](Call& c) { c.du.sizes[2] = 8; }, "du: expected shape [6, 4, 5], got [6, 4, 8]");
  bad(
      all, [](Call& c) { c.du.dtype = DType::kF16; }, "du: " + either + "float16");
  bad(
      all, [](Call& c) { c.gc = {}; }, "gc: expected a tensor, got none");
  bad(
      all, [](Call& c) { c.gc.dtype = DType::kF64; }, "gc: expected dtype float32, got dtype float64");
  bad(
      all, [](Call& c) { c.seq = SeqLens::dense(1, 5); }, "seq: expected 1 rows of 6 tokens, got 1 rows of 5");
  bad(
      with_dA, [](Call& c) { c.dA = {}; }, "dA: expected a tensor, got none");
  bad(
      with_dA, [](Call& c) { c.dA.sizes[2] = 32; }, "dA: expected shape [6, 4, 16], got [6, 4, 32]");
  bad(
      with_dA, [](Call& c) { c.dA.dtype = DType::kF16; }, "dA: " + either + "float16");
  bad(
      with_dA, [](Call& c) { c.dA.strides[2] = 2; }, "dA: expected inner stride 1, got 2");
  bad(
      {kDa}, [](Call& c) { c.dA.data = c.A.data; }, "dA: expected memory of its own, got an overlap with A");
  bad(
      {kDa}, [](Call& c) { c.dA.strides[0] = 0; },
      "dA: expected an output without repeated elements, got stride 0 in dimension 0");
  bad(
      {kFull}, [](Call& c) { c.dk.data = c.dA.data; }, "dk: expected memory of its own, got an overlap with dA");
  bad(
      gradients, [](Call& c) { c.dk = {}; }, "dk: expected a tensor, got none");
  bad(
      gradients, [](Call& c) { c.dk.sizes[1] = 4; }, "dk: expected shape [6, 2, 8], got [6, 4, 8]");
  bad(
      gradients, [](Call& c) { c.dk.dtype = DType::kF16; }, "dk: " + either + "float16");
  bad(
      gradients, [](Call& c) { c.dv.strides[2] = -1; }, "dv: expected inner stride 1, got -1");
  bad(
      gradients, [](Call& c) { c.dv.sizes[2] = 8; }, "dv: expected shape [6, 4, 5], got [6, 4, 8]");
  bad(
      gradients, [](Call& c) { c.dv.dtype = DType::kI32; }, "dv: " + either + "int32");
  bad(
      gradients, [](Call& c) { c.dbeta = {}; }, "dbeta: expected a tensor, got none");
  bad(
      gradients, [](Call& c) { c.dbeta.dtype = DType::kBF16; }, "dbeta: expected dtype float32, got dtype bfloat16");
  bad(
      gradients, [](Call& c) { c.dg.sizes[1] = 2; }, "dg: expected shape [6, 4], got [6, 2]");
  bad(
      gradients, [](Call& c) { c.dg.dtype = DType::kF64; }, "dg: expected dtype float32, got dtype float64");
  bad(
      gradients, [](Call& c) { c.dk.data = c.dw.data; }, "dk: expected memory of its own, got an overlap with dw");
  bad(
      gradients, [](Call& c) { c.dg.data = c.dbeta.data; },
      "dg: expected memory of its own, got an overlap with dbeta");
  bad(
      gradients, [](Call& c) { c.dbeta.strides[1] = 0; },
      "dbeta: expected an output without repeated elements, got stride 0 in dimension 1");
  for (const Operator& op : all) {
    op.run(good);
  }
}

}  // namespace
}  // namespace tidegate::test
