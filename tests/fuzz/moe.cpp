// Mixture of experts: router, order of pairs, grouped products, experts.
#include "tidegate/moe.h"

#include <cmath>

#include "fuzz/drivers.h"

namespace tidegate::fuzz {
namespace {

using test::Form;
using test::normal;
using test::uniform;

// Results are sums of products of about this size; one that stands alone may be a small rest of them.
constexpr double kTerm = 0.5;

double root(std::int64_t n) { return 1.0 / std::sqrt(static_cast<double>(n)); }

Problem route(const Line& line) {
  Random random = numbers(line);
  const std::int64_t T = line.size("T", 0), E = line.size("E"), k = line.integer("k", 1, E);
  const Tensor logits = normal(random, line.dtype(), {T, E}, line.form(), 2.0);
  MoeRouteOptions options;
  options.renormalise = line.flag("norm");
  Problem p;
  // The choice is replayed, so that fp64 and fp32 weigh the same experts; what is chosen is compared bit by bit in
  // tests.
  Tensor chosen(DType::kI32, {T, k});
  moe_route_fwd(logits, {}, chosen, Tensor(DType::kF32, {T, k}), {}, options);
  if (line.is("dir", "fwd")) {
    p.in = {{"logits", logits}, {"replay", chosen}};
    p.out = {{"ids", Tensor(DType::kI32, {T, k})},
             {"weights", Tensor(DType::kF32, {T, k}), Span::kWhole, 0, 3e-7},
             {"probs", Tensor(DType::kF32, {T, E}), Span::kWhole, 0, 3e-7}};
    p.call = [options](const Views& in, const Views& out, const SeqLens&) {
      moe_route_fwd(in[0], in[1], out[0], out[1], out[2], options);
    };
    return p;
  }
  p.in = {{"dweights", normal(random, DType::kF32, {T, k})},
          {"dprobs", line.flag("probs") ? normal(random, DType::kF32, {T, E}) : Tensor()},
          {"logits", logits},
          {"ids", chosen}};
  // A softmax's gradient is a difference of terms of the size of dweights.
  p.out = {{"dlogits", test::like(logits), Span::kWhole, 0, 1e-6, 1.0}};
  p.call = [options](const Views& in, const Views& out, const SeqLens&) {
    moe_route_bwd(in[0], in[1], in[2], in[3], out[0], options);
  };
  return p;
}

// ids= random, one (all pairs to one expert) or none (nothing is routed).
Tensor draw_ids(Random& random, const Line& line, std::int64_t T, std::int64_t k, std::int64_t E) {
  Tensor ids(DType::kI32, {T, k});
  return ids.fill([&](std::int64_t i) {
    return static_cast<double>(line.is("ids", "none")  ? -1
                               : line.is("ids", "one") ? (E - 1) / 2
                                                       : random.integer(i % 5 == 0 ? -1 : 0, E - 1));
  });
}

Problem unpermute(const Line& line) {
  Random random = numbers(line);
  const std::int64_t T = line.size("T", 0), H = line.size("H"), E = line.size("E"), k = line.integer("k", 1, 16);
  const Tensor ids = draw_ids(random, line, T, k, E);
  Tensor counts(DType::kI64, {E}), src(DType::kI32, {T * k}), pos(DType::kI32, {T, k});
  moe_init_routing(ids, counts, src, pos);
  const Tensor weights = normal(random, DType::kF32, {T, k}), y = normal(random, line.dtype(), {T * k, H}, line.form());
  Problem p;
  if (line.is("dir", "fwd")) {
    p.in = {{"y", y}, {"pos", pos}, {"weights", weights}};
    p.out = {{"out", Tensor(line.dtype(), {T, H}, line.form()), Span::kWhole, 0, 3e-7, kTerm}};
    p.call = [](const Views& in, const Views& out, const SeqLens&) { moe_unpermute_fwd(in[0], in[1], in[2], out[0]); };
    return p;
  }
  p.in = {{"dout", normal(random, line.dtype(), {T, H}, line.form())}, {"y", y}, {"pos", pos}, {"weights", weights}};
  p.out = {{"dy", test::like(y), Span::kWhole, 0, 3e-7, kTerm},
           {"dweights", Tensor(DType::kF32, {T, k}), Span::kWhole, 0, 3e-7, kTerm}};
  p.call = [](const Views& in, const Views& out, const SeqLens&) {
    moe_unpermute_bwd(in[0], in[1], in[2], in[3], out[0], out[1]);
  };
  return p;
}

// w= nk, kn: the axes; view: [G,K,N] as a transposed view of memory [G,N,K].
struct Weights {
  WeightAxes axes;
  bool turned;
};
Weights weights_of(const Line& line) {
  return {line.is("w", "nk") ? WeightAxes::kNK : WeightAxes::kKN, line.is("w", "view")};
}
Tensor make_weight(Random& random, const Weights& w, DType dtype, std::int64_t G, std::int64_t N, std::int64_t K,
                   std::int64_t gap, double scale) {
  const Form form = w.turned ? test::permuted({0, 2, 1}, gap) : test::padded(gap);
  return normal(random, dtype, w.axes == WeightAxes::kNK ? Sizes{G, N, K} : Sizes{G, K, N}, form, scale);
}

Problem grouped(const Line& line) {
  Random random = numbers(line);
  const Sizes counts = line.list("rows");
  const std::int64_t G = static_cast<std::int64_t>(counts.size()), N = line.size("N"), K = line.size("K");
  std::int64_t M = line.integer("tail", 0, 8);
  Tensor groups(DType::kI64, {G});
  for (std::size_t g = 0; g < counts.size(); ++g) {
    groups.set(static_cast<std::int64_t>(g), static_cast<double>(counts[g]));
    M += counts[g];
  }
  const Weights lies = weights_of(line);
  const std::int64_t gap = line.integer("gap", 0, 8);
  const DType weight_type = line.dtype("wt");
  const GroupedMatmulOptions options{lies.axes, GroupList::kCounts, false};
  const Tensor x = normal(random, line.dtype(), {M, K}, line.form());
  const Tensor weight = make_weight(random, lies, weight_type, G, N, K, gap, root(K));
  const Tensor bias = line.flag("bias") ? normal(random, weight_type, {G, N}) : Tensor();
  Problem p;
  if (line.is("dir", "fwd")) {
    p.in = {{"x", x}, {"weight", weight}, {"groups", groups}, {"bias", bias}};
    p.out = {{"y", Tensor(line.dtype(), {M, N}, line.form()), Span::kWhole, 0, 5e-7, kTerm}};
    p.call = [options](const Views& in, const Views& out, const SeqLens&) {
      grouped_matmul_fwd(in[0], in[1], in[2], in[3], out[0], options);
    };
    return p;
  }
  p.in = {{"dy", normal(random, line.dtype(), {M, N}, line.form())}, {"x", x}, {"weight", weight}, {"groups", groups}};
  p.out = {{"dx", test::like(x), Span::kWhole, 0, 5e-7, kTerm},
           {"dweight", test::like(weight), Span::kWhole, 0, 5e-7, kTerm},
           {"dbias", test::like(bias), Span::kWhole, 0, 5e-7, kTerm}};
  p.call = [options](const Views& in, const Views& out, const SeqLens&) {
    grouped_matmul_bwd(in[0], in[1], in[2], in[3], out[0], out[1], out[2], options);
  };
  return p;
}

Problem experts(const Line& line) {
  Random random = numbers(line);
  const std::int64_t T = line.size("T", 0), H = line.size("H"), I = line.size("I"), E = line.size("E");
  const std::int64_t k = line.integer("k", 1, 16), J = line.integer("shared", 0, 256), gap = line.integer("gap", 0, 8);
  const Weights lies = weights_of(line);
  const DType dtype = line.dtype(), weight_type = line.dtype("wt");
  MoeExpertsOptions options;
  options.weight_axes = lies.axes;
  options.interleaved = line.flag("inter");
  const Tensor x = normal(random, dtype, {T, H}, line.form());
  Problem p;
  p.in = {{"x", x},
          {"ids", draw_ids(random, line, T, k, E)},
          {"weights", uniform(random, DType::kF32, {T, k}, 0.0, 1.0)},
          {"gate_up", make_weight(random, lies, weight_type, E, 2 * I, H, gap, root(H))},
          {"down", make_weight(random, lies, weight_type, E, H, I, gap, root(I))},
          {"shared_gate", J > 0 ? normal(random, weight_type, {J, H}, {}, root(H)) : Tensor()},
          {"shared_up", J > 0 ? normal(random, weight_type, {J, H}, {}, root(H)) : Tensor()},
          {"shared_down", J > 0 ? normal(random, weight_type, {H, J}, {}, root(J)) : Tensor()},
          {"shared_router", J > 0 ? normal(random, weight_type, {H}, {}, root(H)) : Tensor()},
          {"dout", normal(random, dtype, {T, H}, line.form())}};
  const auto inputs = [](const Views& in) {
    return MoeExpertsInputs{in[0], in[1], in[2], in[3], in[4], in[5], in[6], in[7], in[8]};
  };
  // silu(gate) * up is rounded to x's type, and in the backward its gradients too.
  const double inside = dtype == DType::kF32 ? 2e-6 : test::stored(dtype, 0.0);
  if (line.is("dir", "fwd")) {
    p.out = {{"out", test::like(x), Span::kWhole, 0, inside, 0.0, dtype == DType::kF32 ? 1e-6 : 1.45 * inside}};
    p.call = [options, inputs](const Views& in, const Views& out, const SeqLens&) {
      moe_experts_fwd(inputs(in), out[0], options);
    };
    return p;
  }
  const char* names[] = {"dx",           "dweights",   "dgate_up",     "ddown",
                         "dshared_gate", "dshared_up", "dshared_down", "dshared_router"};
  const std::size_t of[] = {0, 2, 3, 4, 5, 6, 7, 8};
  for (std::size_t i = 0; i < 8; ++i) {
    const double rounding = std::max(test::stored(dtype, 0.0), test::stored(weight_type, 0.0));
    // The gradients of routing weights are sums over H of products of about 1: they may be small rests of them.
    p.out.push_back({names[i], test::like(p.in[of[i]].tensor), Span::kWhole, 0, inside,
                     i == 1   ? 1.0 / root(H)
                     : i == 7 ? 0.25 / root(H)
                              : 0.0,
                     dtype == DType::kF32 ? std::max(2e-6, rounding) : 1.75 * rounding});
  }
  p.call = [options, inputs](const Views& in, const Views& out, const SeqLens&) {
    moe_experts_bwd(in[9], inputs(in), {out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7]}, options);
  };
  return p;
}

void draw_weights(Random& random, Line& line) {
  line.set("dir", pick_text(random, {"fwd", "bwd"}));
  line.set("w", pick_text(random, {"nk", "kn", "view"}));
  line.set("wt", pick_text(random, {"f32", line.text("in").c_str()}));
  line.set("gap", pick<std::int64_t>(random, {0, 0, 1, 3}));
}

}  // namespace

std::vector<Driver> moe_drivers() {
  return {
      {"route",
       "the router's weights of chosen experts",
       {{"dir", "fwd", "fwd|bwd"}, {"T", "5"}, {"E", "8"}, {"k", "2"}, {"norm", "1"}, {"probs", "1"}},
       [](Random& random, Line& line) {
         line.set("dir", pick_text(random, {"fwd", "bwd"}));
         line.set("T", pick<std::int64_t>(random, {0, 1, 2, 17, 65}));
         const std::int64_t E = draw_width(random, 256);
         line.set("E", E);
         line.set("k", random.integer(1, std::min<std::int64_t>(E, 10)));
         line.set("norm", random.integer(0, 1));
         line.set("probs", random.integer(0, 1));
       },
       route},
      {"unpermute",
       "sums over the slots of a token",
       {{"dir", "fwd", "fwd|bwd"},
        {"T", "5"},
        {"H", "64"},
        {"E", "8"},
        {"k", "2"},
        {"ids", "random", "random|one|none"}},
       [](Random& random, Line& line) {
         line.set("dir", pick_text(random, {"fwd", "bwd"}));
         line.set("T", pick<std::int64_t>(random, {0, 1, 2, 17, 65}));
         line.set("H", draw_width(random, 130));
         line.set("E", random.integer(1, 12));
         line.set("k", random.integer(1, 8));
         line.set("ids", pick_text(random, {"random", "random", "one", "none"}));
       },
       unpermute},
      {"gmm",
       "products of rows with their group's weight",
       {{"dir", "fwd", "fwd|bwd"},
        {"rows", "3,0,5"},
        {"tail", "1"},
        {"N", "32"},
        {"K", "64"},
        {"bias", "1"},
        {"w", "nk", "nk|kn|view"},
        {"wt", "f32"},
        {"gap", "0"}},
       [](Random& random, Line& line) {
         draw_weights(random, line);
         std::string rows;
         for (std::int64_t g = random.integer(1, 5); g > 0; --g) {
           rows += (rows.empty() ? "" : ",") + std::to_string(pick<std::int64_t>(random, {0, 1, 2, 5, 12, 13, 30}));
         }
         line.set("rows", rows);
         line.set("tail", pick<std::int64_t>(random, {0, 0, 2}));
         line.set("N", draw_width(random, 100));
         line.set("K", draw_width(random, 300));
         line.set("bias", random.integer(0, 1));
       },
       grouped},
      {"moe",
       "the experts of a layer, with or without a shared one",
       {{"dir", "fwd", "fwd|bwd"},
        {"T", "17"},
        {"H", "64"},
        {"I", "32"},
        {"E", "8"},
        {"k", "2"},
        {"shared", "0"},
        {"ids", "random", "random|one|none"},
        {"w", "nk", "nk|kn|view"},
        {"wt", "f32"},
        {"gap", "0"},
        {"inter", "0"}},
       [](Random& random, Line& line) {
         draw_weights(random, line);
         line.set("T", pick<std::int64_t>(random, {0, 1, 2, 7, 17, 40}));
         line.set("H", draw_width(random, 130, 8));
         line.set("I", draw_width(random, 64, 4));
         line.set("E", random.integer(1, 8));
         line.set("k", random.integer(1, 4));
         line.set("shared", pick<std::int64_t>(random, {0, 0, 9, 32}));
         line.set("ids", pick_text(random, {"random", "random", "one", "none"}));
         line.set("inter", line.is("w", "nk") ? random.integer(0, 1) : 0);  // rows that take turns must be rows
       },
       experts},
  };
}

}  // namespace tidegate::fuzz
