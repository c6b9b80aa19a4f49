// Wrong calls: an error, and not a byte written.
#include "fuzz/drivers.h"
#include "tidegate/conv.h"
#include "tidegate/delta_rule.h"
#include "tidegate/error.h"
#include "tidegate/moe.h"

namespace tidegate::fuzz {
namespace {

using test::normal;

// Runs f and says whether it was refused.
template <class F>
void expect_refusal(const TensorView& refused, F f) {
  try {
    f();
  } catch (const Error&) {
    refused.as<std::int32_t>()[0] = 1;
  }
}

Problem wrong(const Line& line) {
  Random random = numbers(line);
  const std::int64_t T = line.size("T");
  const Sizes list = line.list("bad");
  Problem p;
  p.out = {{"refused", Tensor(DType::kI32, {1})}, {"y", Tensor(line.dtype(), {T, 2, 8}, line.form())}};
  p.exact = [](const Views&, const Views& out, const SeqLens&) { out[0].as<std::int32_t>()[0] = 1; };
  if (line.is("what", "cu")) {
    p.in = {{"x", normal(random, line.dtype(), {T, 2, 8}, line.form())}, {"w", normal(random, DType::kF32, {16, 4})}};
    p.call = [list, T](const Views& in, const Views& out, const SeqLens&) {
      expect_refusal(out[0], [&] {
        const SeqLens seq = SeqLens::from_cu(list, T);
        const TensorView x = contiguous(in[0].data, in[0].dtype, {T, 16}),
                         y = contiguous(out[1].data, in[0].dtype, {T, 16});
        causal_conv1d_fwd(x, in[1], {}, {}, y, {}, seq, {Activation::kSilu, 0, Layout::kTND});
      });
    };
    return p;
  }
  if (line.is("what", "ids")) {
    Tensor ids(DType::kI64, {T, 1});
    ids.fill(0.0);
    ids.set(T - 1, static_cast<double>(list[0]));
    p.in = {{"x", normal(random, line.dtype(), {T, 16})},
            {"ids", ids},
            {"weights", test::uniform(random, DType::kF32, {T, 1}, 0.0, 1.0)},
            {"gate_up", normal(random, line.dtype(), {4, 8, 16})},
            {"down", normal(random, line.dtype(), {4, 16, 4})}};
    p.out[1].tensor = Tensor(line.dtype(), {T, 16}, line.form());
    p.call = [](const Views& in, const Views& out, const SeqLens&) {
      expect_refusal(out[0], [&] { moe_experts_fwd({in[0], in[1], in[2], in[3], in[4], {}, {}, {}, {}}, out[1]); });
    };
    return p;
  }
  if (!line.is("what", "slots")) {
    throw LineError("err: what: expected cu, ids or slots, got " + line.text("what"));
  }
  const auto make = [&](std::int64_t D) { return normal(random, line.dtype(), {T, 2, D}, line.form()); };
  p.in = {{"q", make(8)},
          {"k", make(8)},
          {"v", make(8)},
          {"g", test::uniform(random, DType::kF32, {T, 2}, -1.0, 0.0)},
          {"beta", test::uniform(random, DType::kF32, {T, 2}, 0.0, 1.0)}};
  p.out.push_back({"pool", normal(random, DType::kF32, {4, 2, 8, 8})});
  p.call = [list, T](const Views& in, const Views& out, const SeqLens&) {
    expect_refusal(out[0], [&] {
      ChunkGatedDeltaRuleOptions o;
      o.layout = Layout::kTND;
      o.state_indices = list;
      const std::vector<std::int64_t> cu = {0, T / 2, T};
      chunk_gated_delta_rule_pool(in[0], in[1], in[2], in[3], in[4], out[2], out[1], SeqLens::from_cu(cu, T), o);
    });
  };
  return p;
}

}  // namespace

std::vector<Driver> error_drivers() {
  return {{"err",
           "a wrong call: what=cu (offsets), ids (of experts), slots (of a pool)",
           {{"what", "cu"}, {"T", "16"}, {"bad", "0,12,8,16"}},
           [](Random& random, Line& line) {
             line.set("what", pick_text(random, {"cu", "ids", "slots"}));
             const std::int64_t T = random.integer(2, 40);
             line.set("T", T);
             const std::string t = std::to_string(T);
             if (line.is("what", "cu")) {
               line.set("bad",
                        pick(random, {std::string("1,") + t, "0," + std::to_string(T - 1), "0," + std::to_string(T + 1),
                                      "0," + t + ",1," + t, std::string("0,-1,") + t, "0,4611686018427387904," + t}));
             } else if (line.is("what", "ids")) {
               line.set("bad", pick_text(random, {"4", "5", "-2", "2147483647", "-2147483648"}));
             } else {
               line.set("bad", pick_text(random, {"0,0", "4,1", "1,-2", "9223372036854775807,0", "0", "0,1,2"}));
             }
           },
           wrong}};
}

}  // namespace tidegate::fuzz
