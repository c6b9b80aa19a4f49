// int8: quantisation and exact products, compared bit by bit with their definitions; experts within a step of a tie.
#include "fuzz/drivers.h"
#include "ops/grouped_matmul_quant/reference.h"
#include "ops/moe_experts_quant/reference.h"
#include "ops/quantize/reference.h"

namespace tidegate::fuzz {
namespace {

using test::normal;
using test::uniform;

Tensor bytes(Random& random, const Sizes& sizes, const test::Form& form = {}) {
  Tensor t(DType::kI8, sizes, form);
  for (std::int64_t i = 0; i < t.view().numel(); ++i) {  // written as bytes: -128 is legal in a product
    t.view().as<std::int8_t>()[test::offset_at(t, i)] = static_cast<std::int8_t>(random.integer(-128, 127));
  }
  return t;
}

Problem quant(const Line& line) {
  Random random = numbers(line);
  const Sizes sizes = {line.size("G"), line.size("N"), line.size("K")};
  const int axis = static_cast<int>(line.integer("axis", 1, 2));
  const test::Form form = line.flag("turned") ? test::permuted({0, 2, 1}, 1) : test::padded(1);
  Problem p;
  p.in = {{"x", normal(random, line.dtype(), sizes, form)}};
  p.out = {{"q", Tensor(DType::kI8, sizes, form)},
           {"scale", Tensor(DType::kF32, {sizes[0], sizes[axis == 1 ? 2 : 1]})}};
  p.call = [axis](const Views& in, const Views& out, const SeqLens&) { quantize(in[0], out[0], out[1], axis); };
  p.exact = [axis](const Views& in, const Views& out, const SeqLens&) {
    quantize_int8::reference(in[0], out[0], out[1], axis);
  };
  return p;
}

struct Product {
  std::vector<std::int64_t> offsets = {0};
  WeightAxes axes;
  std::vector<Part> in;
};
Product make_product(Random& random, const Line& line, std::int64_t N) {
  const Sizes counts = line.list("rows");
  const std::int64_t G = static_cast<std::int64_t>(counts.size()), K = line.size("K");
  Product p;
  p.axes = line.is("w", "nk") ? WeightAxes::kNK : WeightAxes::kKN;
  Tensor groups(DType::kI64, {G});
  for (std::size_t g = 0; g < counts.size(); ++g) {
    groups.set(static_cast<std::int64_t>(g), static_cast<double>(counts[g]));
    p.offsets.push_back(p.offsets.back() + counts[g]);
  }
  const std::int64_t M = p.offsets.back() + line.integer("tail", 0, 8);
  p.in = {{"x", bytes(random, {M, K}, test::padded())},
          {"x_scale", uniform(random, DType::kF32, {M}, 1e-3, 2e-2)},
          {"weight", bytes(random, p.axes == WeightAxes::kNK ? Sizes{G, N, K} : Sizes{G, K, N},
                           test::padded(line.integer("gap", 0, 8)))},
          {"weight_scale", uniform(random, DType::kF32, {G, N}, 1e-3, 1e-2)},
          {"groups", groups}};
  return p;
}

Problem gmm_quant(const Line& line) {
  Random random = numbers(line);
  const std::int64_t N = line.size("N");
  const auto [offsets, axes, in] = make_product(random, line, N);
  const std::int64_t M = in[0].tensor.view().sizes[0];
  Problem p;
  p.in = in;
  p.out = {{"y", Tensor(DType::kF32, {M, N}, line.form())}};
  p.call = [axes = axes](const Views& in, const Views& out, const SeqLens&) {
    grouped_matmul_quant({in[0], in[1], in[2], in[3], in[4]}, out[0], {axes, GroupList::kCounts});
  };
  p.exact = [axes = axes, offsets = offsets, N](const Views& in, const Views& out, const SeqLens&) {
    std::vector<float> y(static_cast<std::size_t>(out[0].numel()));
    quant_products::reference_product({in[0], in[1], in[2], in[3], in[4]}, offsets.data(), axes, y.data());
    for (std::int64_t i = 0; i < offsets.back() * N; ++i) {
      out[0].as<float>()[test::offset_at(out[0], i)] = y[static_cast<std::size_t>(i)];
    }
  };
  return p;
}

// The activation is an fp32 approximation: what it gives is quantised to the same integer, or at a tie to the next one.
Problem swiglu_quant(const Line& line) {
  Random random = numbers(line);
  const std::int64_t I = line.size("I");
  const auto [offsets, axes, in] = make_product(random, line, 2 * I);
  const std::int64_t M = in[0].tensor.view().sizes[0], G = static_cast<std::int64_t>(offsets.size()) - 1;
  Problem p;
  p.in = in;
  p.in.push_back({"smooth", line.flag("smooth") ? uniform(random, DType::kF32, {G, I}, 0.5, 2.0) : Tensor()});
  constexpr double kStep = 1.01 / (10.0 * 127.0);  // ten bounds of the largest q are one step
  p.out = {{"q", Tensor(DType::kI8, {M, I}), Span::kWhole, 0, kStep, 127.0, 1e-3},
           {"q_scale", Tensor(DType::kF32, {M}), Span::kWhole, 0, 1e-6}};
  p.call = [axes = axes](const Views& in, const Views& out, const SeqLens&) {
    grouped_matmul_swiglu_quant({in[0], in[1], in[2], in[3], in[4]}, in[5], out[0], out[1], {axes, GroupList::kCounts});
  };
  p.truth = [axes = axes, offsets = offsets, I](const Views& in, const Views& out, const SeqLens&) {
    const auto narrow = [](const TensorView& t) {
      return t.defined() ? test::converted(test::copied(t), DType::kF32) : Tensor();
    };
    const Tensor x_scale = narrow(in[1]), weight_scale = narrow(in[3]), smooth = narrow(in[5]);
    std::vector<float> s(static_cast<std::size_t>(out[0].numel()));
    quant_products::reference_swiglu({in[0], x_scale, in[2], weight_scale, in[4]}, offsets.data(), axes, smooth,
                                     s.data());
    for (std::int64_t j = 0; j < offsets.back(); ++j) {
      out[1].as<double>()[j] = quantize_int8::reference_row(s.data() + j * I, I, out[0].as<std::int8_t>() + j * I);
    }
  };
  return p;
}

Problem experts_quant(const Line& line) {
  Random random = numbers(line);
  const std::int64_t T = line.size("T", 0), H = line.size("H"), I = line.size("I"), E = line.size("E");
  const std::int64_t k = line.integer("k", 1, 16);
  Tensor ids(DType::kI32, {T, k});
  ids.fill([&](std::int64_t) { return static_cast<double>(random.integer(-1, E - 1)); });
  const auto weight = [&](const Sizes& sizes) {
    std::pair<Tensor, Tensor> w{Tensor(DType::kI8, sizes), Tensor(DType::kF32, {sizes[0], sizes[1]})};
    quantize(normal(random, DType::kBF16, sizes, {}, 0.2), w.first, w.second);
    return w;
  };
  const auto gate_up = weight({E, 2 * I, H}), down = weight({E, H, I});
  Problem p;
  p.in = {{"x", normal(random, line.dtype(), {T, H}, line.form())},
          {"ids", ids},
          {"weights", uniform(random, DType::kF32, {T, k}, 0.0, 1.0)},
          {"gate_up", gate_up.first},
          {"gate_up_scale", gate_up.second},
          {"down", down.first},
          {"down_scale", down.second}};
  // A number on the edge between two integers may go either way: one step of one factor.
  p.out = {
      {"out", Tensor(line.dtype(), {T, H}, line.form()), Span::kWhole, 0, 2e-3, 0.0, test::stored(line.dtype(), 5e-5)}};
  p.call = [](const Views& in, const Views& out, const SeqLens&) {
    moe_experts_quant({in[0], in[1], in[2], in[3], in[4], in[5], in[6]}, out[0]);
  };
  p.truth = [](const Views& in, const Views& out, const SeqLens&) {
    // The definition forms scales and quotients in fp32: it gets the fp32 numbers that the fp64 ones are.
    const Tensor x = test::converted(test::copied(in[0]), DType::kF32),
                 w = test::converted(test::copied(in[2]), DType::kF32);
    const Tensor s1 = test::converted(test::copied(in[4]), DType::kF32),
                 s2 = test::converted(test::copied(in[6]), DType::kF32);
    quant_experts::reference({x, in[1], w, in[3], s1, in[5], s2}, WeightAxes::kNK, out[0].as<double>());
  };
  return p;
}

std::vector<Key> product_keys(const char* width) {
  std::vector<Key> keys = {{"rows", "3,0,5"}, {"tail", "1"},        {width, "32"},
                           {"K", "64"},       {"w", "nk", "nk|kn"}, {"gap", "0"}};
  if (std::string(width) == "I") {
    keys.push_back({"smooth", "0"});
  }
  return keys;
}
void draw_product(Random& random, Line& line) {
  std::string rows;
  for (std::int64_t g = random.integer(1, 5); g > 0; --g) {
    rows += (rows.empty() ? "" : ",") + std::to_string(pick<std::int64_t>(random, {0, 1, 2, 5, 9, 13}));
  }
  line.set("rows", rows);
  line.set("tail", pick<std::int64_t>(random, {0, 2}));
  line.set("K", draw_width(random, 600));
  line.set("w", pick_text(random, {"nk", "kn"}));
  line.set("gap", pick<std::int64_t>(random, {0, 1, 3}));
}

}  // namespace

std::vector<Driver> quant_drivers() {
  return {
      {"quantize",
       "numbers as int8 with one scale a row",
       {{"G", "2"}, {"N", "9"}, {"K", "33"}, {"axis", "2"}, {"turned", "0"}},
       [](Random& random, Line& line) {
         line.set("G", random.integer(1, 3));
         line.set("N", draw_width(random, 64));
         line.set("K", draw_width(random, 130));
         line.set("axis", random.integer(1, 2));
         line.set("turned", random.integer(0, 1));
       },
       quant},
      {"gmm_quant", "int8 products, exact", product_keys("N"),
       [](Random& random, Line& line) {
         draw_product(random, line);
         line.set("N", draw_width(random, 64));
       },
       gmm_quant},
      {"swiglu_quant", "int8 products, silu(gate) * up of them, quantised again", product_keys("I"),
       [](Random& random, Line& line) {
         draw_product(random, line);
         line.set("I", draw_width(random, 64));
         line.set("smooth", random.integer(0, 1));
       },
       swiglu_quant},
      {"moe_quant",
       "int8 experts",
       {{"T", "9"}, {"H", "64"}, {"I", "32"}, {"E", "4"}, {"k", "2"}},
       [](Random& random, Line& line) {
         line.set("T", pick<std::int64_t>(random, {0, 1, 9, 20}));
         line.set("H", draw_width(random, 130, 8));
         line.set("I", draw_width(random, 64, 8));
         line.set("E", random.integer(1, 6));
         line.set("k", random.integer(1, 4));
       },
       experts_quant},
  };
}

}  // namespace tidegate::fuzz
