// Mixture of experts: grouped products and experts.
#include "tidegate/moe.h"

#include <algorithm>
#include <cmath>

#include "base/element.h"
#include "fuzz/drivers.h"

namespace tidegate::fuzz {
namespace {

using test::Form;
using test::normal;
using test::uniform;

// Results are sums of products of about this size; one that stands alone may be a small rest of them.
constexpr double kTerm = 0.5;

double root(std::int64_t n) { return 1.0 / std::sqrt(static_cast<double>(n)); }

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

// A gradient that is added to starts with numbers, any other one unwritten.
Tensor started(Random& random, const Tensor& t, bool add) {
  return add && t.defined() ? normal(random, t.view().dtype, t.sizes(), t.form()) : test::like(t);
}

Problem grouped(const Line& line) {
  Random random = numbers(line);
  const Sizes counts = line.list("rows");
  const std::int64_t G = static_cast<std::int64_t>(counts.size()), N = line.size("N"), K = line.size("K");
  std::int64_t M = line.integer("tail", 0, 8);
  const bool ends = line.is("list", "cumsum"), add = line.flag("acc");
  Tensor groups(line.is("gt", "i32") ? DType::kI32 : DType::kI64, {G});
  std::int64_t end = 0;
  for (std::size_t g = 0; g < counts.size(); ++g) {
    end += counts[g];
    groups.set(static_cast<std::int64_t>(g), static_cast<double>(ends ? end : counts[g]));
  }
  M += end;
  const Weights lies = weights_of(line);
  const std::int64_t gap = line.integer("gap", 0, 8);
  const DType weight_type = line.dtype("wt");
  const GroupedMatmulOptions options{lies.axes, ends ? GroupList::kCumsum : GroupList::kCounts, add};
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
           {"dweight", started(random, weight, add), Span::kWhole, 0, 5e-7, kTerm},
           {"dbias", started(random, bias, add), Span::kWhole, 0, 5e-7, kTerm}};
  p.call = [options](const Views& in, const Views& out, const SeqLens&) {
    grouped_matmul_bwd(in[0], in[1], in[2], in[3], out[0], out[1], out[2], options);
  };
  return p;
}

// The gradient of down's low-rank b is dout times u = a . h. h = silu(gate) * up was rounded, and u may be a small rest
// of its sum: so it is measured against the norm of the terms, that of the expert with the largest ones.
double down_b_terms(const std::vector<Part>& in, const MoeExpertsOptions& o) {
  const auto at = [&](std::size_t part, auto... index) {
    const TensorView t = in[part].tensor.view();
    return read_element(t, offset_of(t, index...));
  };
  constexpr std::size_t kX = 0, kIds = 1, kWeights = 2, kGateUp = 3, kA = 9, kB = 10, kDownA = 11, kDout = 13;
  const Sizes x = in[kX].tensor.sizes(), ids = in[kIds].tensor.sizes(), a = in[kDownA].tensor.sizes();
  const std::int64_t H = x[1], rank = a[1], I = a[2];
  std::vector<double> of_expert(static_cast<std::size_t>(a[0]));
  for (std::int64_t t = 0; t < x[0]; ++t) {
    double dout = 0.0;
    for (std::int64_t c = 0; c < H; ++c) {
      dout = std::max(dout, std::abs(at(kDout, t, c)));
    }
    for (std::int64_t k = 0; k < ids[1]; ++k) {
      const auto e = static_cast<std::int64_t>(at(kIds, t, k));
      if (e < 0) {
        continue;
      }
      std::vector<double> u(static_cast<std::size_t>(rank)), terms(u.size());
      for (std::int64_t q = 0; q < rank; ++q) {
        for (std::int64_t c = 0; c < H; ++c) {
          u[static_cast<std::size_t>(q)] += o.gate_up_lora_scale * at(kA, e, q, c) * at(kX, t, c);
        }
      }
      const auto product = [&](std::int64_t n) {
        double sum = 0.0;
        for (std::int64_t c = 0; c < H; ++c) {
          sum += (o.weight_axes == WeightAxes::kNK ? at(kGateUp, e, n, c) : at(kGateUp, e, c, n)) * at(kX, t, c);
        }
        for (std::int64_t q = 0; q < rank; ++q) {
          sum += at(kB, e, n, q) * u[static_cast<std::size_t>(q)];
        }
        return sum;
      };
      for (std::int64_t i = 0; i < I; ++i) {
        const double gate = product(o.interleaved ? 2 * i : i), up = product(o.interleaved ? 2 * i + 1 : I + i);
        const double h = gate / (1.0 + std::exp(-gate)) * up;
        for (std::int64_t q = 0; q < rank; ++q) {
          terms[static_cast<std::size_t>(q)] += std::pow(at(kDownA, e, q, i) * h, 2);
        }
      }
      const double factor = o.down_lora_scale * at(kWeights, t, k) * dout;
      of_expert[static_cast<std::size_t>(e)] += factor * factor * *std::max_element(terms.begin(), terms.end());
    }
  }
  return std::sqrt(*std::max_element(of_expert.begin(), of_expert.end()));
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
  options.round_y = line.flag("round");
  options.gate_up_lora_scale = 0.75;
  options.down_lora_scale = -1.5;
  const std::int64_t rank = line.integer("lora", 0, 64);
  const auto lora = [&](const Sizes& sizes) {
    return rank > 0 ? normal(random, weight_type, sizes, test::padded(gap), root(sizes[2])) : Tensor();
  };
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
          {"gate_up_lora_a", lora({E, rank, H})},
          {"gate_up_lora_b", lora({E, 2 * I, rank})},
          {"down_lora_a", lora({E, rank, I})},
          {"down_lora_b", lora({E, H, rank})},
          {"dout", normal(random, dtype, {T, H}, line.form())}};
  const auto inputs = [](const Views& in) {
    return MoeExpertsInputs{in[0], in[1], in[2], in[3],  in[4],  in[5], in[6],
                            in[7], in[8], in[9], in[10], in[11], in[12]};
  };
  // silu(gate) * up is rounded to x's type, and in the backward its gradients too.
  const double inside = dtype == DType::kF32 ? 2e-6 : test::stored(dtype, 0.0);
  if (line.is("dir", "fwd")) {
    // With round_y every expert's result is rounded too.
    const double roundings = options.round_y ? 1.75 : 1.45;
    p.out = {{options.round_y ? "rounded" : "out", test::like(x), Span::kWhole, 0, inside, 0.0,
              dtype == DType::kF32 ? 1e-6 : roundings * inside}};
    p.call = [options, inputs](const Views& in, const Views& out, const SeqLens&) {
      moe_experts_fwd(inputs(in), out[0], options);
    };
    return p;
  }
  // Additions of 0.75 and 1.5 times the size of the weights make gate and up 1.25 times as large each, and y 1.8 times.
  const double grown = rank > 0 ? 1.25 * 1.25 * 1.8 : 1.0;
  const double down_b = rank > 0 ? std::max(kTerm, down_b_terms(p.in, options)) : 0.0;
  for (const std::size_t i : {0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}) {  // all inputs but ids
    const double rounding = std::max(test::stored(dtype, 0.0), test::stored(weight_type, 0.0));
    // The gradients of routing weights are sums over H of products of about 1, those of low-rank factors products with
    // such sums: they may be small rests of them. That of an `a` hangs on b^T dh, one sum over the 2 I (or H) rows of
    // b, whose numbers are of the size root(rank).
    const double size = i == 2    ? grown / root(H)
                        : i == 8  ? 0.25 / root(H)
                        : i == 9  ? kTerm * grown * root(std::max<std::int64_t>(rank, 1)) / root(2 * I)
                        : i == 11 ? kTerm * grown * root(std::max<std::int64_t>(rank, 1)) / root(H)
                        : i == 12 ? down_b
                        : i > 8   ? kTerm
                                  : 0.0;
    p.out.push_back({"d" + p.in[i].name, test::like(p.in[i].tensor), Span::kWhole, 0, inside, size,
                     dtype == DType::kF32 ? std::max(2e-6, rounding) : 1.75 * rounding});
  }
  const bool keep = line.flag("keep");
  p.call = [options, inputs, keep, T, k, I](const Views& in, const Views& out, const SeqLens&) {
    MoeExpertsInputs given = inputs(in);
    std::vector<char> kept, y;
    if (keep && in[0].dtype != DType::kF64) {  // the truth has no use for it
      kept.resize(static_cast<std::size_t>(T * k * 2 * I) * sizeof(float));
      y.resize(static_cast<std::size_t>(in[0].numel() * dtype_bytes(in[0].dtype)));
      given.hidden = contiguous(kept.data(), DType::kF32, {T * k, 2, I});
      moe_experts_fwd(inputs(in), contiguous(y.data(), in[0].dtype, {T, in[0].sizes[1]}), options, given.hidden);
    }
    moe_experts_bwd(in[13], given,
                    {out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7], out[8], out[9], out[10], out[11]},
                    options);
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
      {"gmm",
       "products of rows with their group's weight",
       {{"dir", "fwd", "fwd|bwd"},
        {"rows", "3,0,5"},
        {"tail", "1"},
        {"N", "32"},
        {"K", "64"},
        {"bias", "1"},
        {"list", "counts", "counts|cumsum"},
        {"gt", "i64", "i32|i64"},
        {"acc", "0"},
        {"w", "nk", "nk|kn|view"},
        {"wt", "f32"},
        {"gap", "0"}},
       [](Random& random, Line& line) {
         draw_weights(random, line);
         line.set("list", pick_text(random, {"counts", "cumsum"}));
         line.set("gt", pick_text(random, {"i32", "i64"}));
         line.set("acc", random.integer(0, 1));
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
        {"inter", "0"},
        {"lora", "0"},
        {"round", "0"},
        {"keep", "0"}},
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
         line.set("lora", pick<std::int64_t>(random, {0, 0, 1, 8, 20}));
         line.set("round", line.is("dir", "fwd") ? random.integer(0, 1) : 0);
         line.set("keep", line.is("dir", "bwd") ? random.integer(0, 1) : 0);  // gate and up come from a forward
       },
       experts},
  };
}

}  // namespace tidegate::fuzz
