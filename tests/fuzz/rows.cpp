// Row norms and gates.
#include <algorithm>
#include <cmath>

#include "fuzz/drivers.h"
#include "tidegate/gating.h"
#include "tidegate/norm.h"
#include "tidegate/swiglu.h"

namespace tidegate::fuzz {
namespace {

using test::normal;
using test::uniform;

// Elements of gradients of narrow rows are small rests of large terms; they are measured against these.
double largest_product(const Tensor& dy, const Tensor& rstd, std::int64_t D) {
  double largest = 0.0;
  for (std::int64_t i = 0; i < dy.view().numel(); ++i) {
    largest = std::max(largest, std::abs(dy.get(i) * rstd.get(i / D)));
  }
  return largest;
}

// Gradients of weights are sums over rows of products of dy and numbers of about 1; in narrow rows all of them may be
// small rests of such a sum.
double norm_of(const Tensor& dy) {
  double squares = 0.0;
  for (const double x : test::values(dy)) {
    squares += x * x;
  }
  return std::sqrt(squares);
}

Sizes row_sizes(const Line& line) { return {line.size("rows", 0), line.size("heads"), line.size("D")}; }
Tensor lengths_of(const Tensor& x, double eps, bool mean) {
  const Sizes sizes = x.sizes();
  Tensor rstd(DType::kF32, {sizes[0], sizes[1]});
  return rstd.fill([&](std::int64_t row) {
    double squares = 0.0;
    for (std::int64_t d = 0; d < sizes[2]; ++d) {
      squares += x.get(row * sizes[2] + d) * x.get(row * sizes[2] + d);
    }
    return 1.0 / std::sqrt(squares / (mean ? static_cast<double>(sizes[2]) : 1.0) + eps);
  });
}

void draw_rows(Random& random, Line& line) {
  line.set("dir", pick_text(random, {"fwd", "bwd"}));
  line.set("rows", pick<std::int64_t>(random, {0, 1, 2, 3, 7, 17, 65}));
  line.set("heads", random.integer(1, 4));
  line.set("D", draw_width(random, 600));
}
const std::vector<Key> kRowKeys = {{"dir", "fwd", "fwd|bwd"}, {"rows", "3"}, {"heads", "2"}, {"D", "64"}};

Problem l2norm(const Line& line) {
  Random random = numbers(line);
  const Sizes sizes = row_sizes(line);
  const Tensor x = normal(random, line.dtype(), sizes, line.form());
  Problem p;
  if (line.is("dir", "fwd")) {
    p.in = {{"x", x}};
    p.out = {{"y", Tensor(line.dtype("out"), sizes, line.form()), Span::kWhole, 0, 3e-7},
             {"rstd", Tensor(DType::kF32, {sizes[0], sizes[1]}), Span::kWhole, 0, 3e-7}};
    p.call = [](const Views& in, const Views& out, const SeqLens&) { l2norm_fwd(in[0], out[0], out[1]); };
    return p;
  }
  const Tensor dy = normal(random, line.dtype("out"), sizes, line.form()), rstd = lengths_of(x, 1e-6, false);
  const bool safe = line.flag("safe");
  p.in = {{"dy", dy}, {"x", x}, {"rstd", rstd}};
  p.out = {{"dx", test::like(x), Span::kWhole, 0, 3e-7, sizes[2] < 8 ? largest_product(dy, rstd, sizes[2]) : 0.0}};
  p.call = [safe](const Views& in, const Views& out, const SeqLens&) { l2norm_bwd(in[0], in[1], in[2], out[0], safe); };
  return p;
}

Problem swiglu(const Line& line) {
  Random random = numbers(line);
  const Sizes sizes = row_sizes(line);
  const Tensor gate = normal(random, line.dtype(), sizes, line.form(), 3.0);
  const Tensor up = normal(random, line.dtype(), sizes, line.form());
  Problem p;
  if (line.is("dir", "fwd")) {
    p.in = {{"gate", gate}, {"up", up}};
    p.out = {{"y", test::like(gate), Span::kWhole, 0, 3e-7}};
    p.call = [](const Views& in, const Views& out, const SeqLens&) { swiglu_fwd(in[0], in[1], out[0]); };
    return p;
  }
  p.in = {{"dy", normal(random, line.dtype(), sizes, line.form())}, {"gate", gate}, {"up", up}};
  p.out = {{"dgate", test::like(gate), Span::kWhole, 0, 3e-7}, {"dup", test::like(gate), Span::kWhole, 0, 3e-7}};
  p.call = [](const Views& in, const Views& out, const SeqLens&) { swiglu_bwd(in[0], in[1], in[2], out[0], out[1]); };
  return p;
}

Problem rms_norm(const Line& line) {
  Random random = numbers(line);
  const Sizes sizes = row_sizes(line);
  const Tensor x = normal(random, line.dtype(), sizes, line.form());
  const Tensor weight = normal(random, line.dtype("w"), {sizes[2]}, {}, 0.3);
  Problem p;
  if (line.is("dir", "fwd")) {
    p.in = {{"x", x}, {"weight", weight}};
    p.out = {{"y", test::like(x), Span::kWhole, 0, 3e-7},
             {"rstd", Tensor(DType::kF32, {sizes[0], sizes[1]}), Span::kWhole, 0, 3e-7}};
    p.call = [](const Views& in, const Views& out, const SeqLens&) { rms_norm_fwd(in[0], in[1], out[0], out[1]); };
    return p;
  }
  const Tensor dy = normal(random, line.dtype(), sizes, line.form()), rstd = lengths_of(x, 1e-6, true);
  p.in = {{"dy", dy}, {"x", x}, {"weight", weight}, {"rstd", rstd}};
  p.out = {{"dx", test::like(x), Span::kWhole, 0, 1e-6, sizes[2] < 8 ? 2.0 * largest_product(dy, rstd, sizes[2]) : 0.0},
           {"dweight", Tensor(DType::kF32, {sizes[2]}), Span::kWhole, 0, 1e-6, sizes[2] < 8 ? norm_of(dy) : 0.0}};
  p.call = [](const Views& in, const Views& out, const SeqLens&) {
    rms_norm_bwd(in[0], in[1], in[2], in[3], out[0], out[1]);
  };
  return p;
}

Problem rms_norm_gated(const Line& line) {
  Random random = numbers(line);
  const Sizes sizes = row_sizes(line);
  const Tensor x = normal(random, line.dtype(), sizes, line.form()), z = normal(random, line.dtype(), sizes);
  const Tensor weight = line.is("w", "none") ? Tensor() : normal(random, line.dtype("w"), {sizes[2]});
  RmsNormGatedOptions options;
  options.activation = line.is("act", "sigmoid") ? Activation::kSigmoid : Activation::kSilu;
  options.rounding = line.is("round", "hf") ? Rounding::kHf : Rounding::kFp32;
  Problem p;
  if (line.is("dir", "fwd")) {
    // hf rounds up to three times.
    const double more = options.rounding == Rounding::kHf && line.dtype() != DType::kF32 ? 1.0 : 0.0;
    const double bound = more > 0.0 ? test::stored(line.dtype(), 0.0) : 3e-7;
    p.in = {{"x", x}, {"z", z}, {"weight", weight}};
    p.out = {{"y", test::like(x), Span::kWhole, 0, bound, 0.0, std::sqrt(3.0) * test::stored(line.dtype(), 3e-7)},
             {"rstd", Tensor(DType::kF32, {sizes[0], sizes[1]}), Span::kWhole, 0, 3e-7}};
    p.call = [options](const Views& in, const Views& out, const SeqLens&) {
      rms_norm_gated_fwd(in[0], in[1], in[2], out[0], out[1], options);
    };
    return p;
  }
  const Tensor dy = normal(random, line.dtype(), sizes, line.form()), rstd = lengths_of(x, 1e-6, true);
  p.in = {{"dy", dy}, {"x", x}, {"z", z}, {"weight", weight}, {"rstd", rstd}};
  // z and the weight make terms up to 10 times as large as dy * rstd.
  p.out = {{"dx", test::like(x), Span::kWhole, 0, 1e-6, sizes[2] < 8 ? 4.0 * largest_product(dy, rstd, sizes[2]) : 0.0},
           {"dz", test::like(z), Span::kWhole, 0, 1e-6},
           {"dweight", weight.defined() ? Tensor(DType::kF32, {sizes[2]}) : Tensor(), Span::kWhole, 0, 1e-6,
            sizes[2] < 8 ? norm_of(dy) : 0.0}};
  p.call = [options](const Views& in, const Views& out, const SeqLens&) {
    rms_norm_gated_bwd(in[0], in[1], in[2], in[3], in[4], out[0], out[1], out[2], options);
  };
  return p;
}

Problem gating(const Line& line) {
  Random random = numbers(line);
  const Layout layout = line.layout();
  const std::int64_t B = line.size("B"), T = line.size("T", 0), H = line.size("HV");
  Sizes sizes = is_head_major(layout) ? Sizes{H, T} : Sizes{T, H};
  sizes.insert(sizes.begin(), has_batch(layout) ? 1 : 0, B);
  const GdnGatingOptions options{line.is("beta", "2") ? 2.0 : 1.0, layout};
  const Tensor a = normal(random, line.dtype(), sizes, line.form(), 2.0), b = normal(random, line.dtype(), sizes);
  const Tensor A_log = uniform(random, DType::kF32, {H}, std::log(0.01), std::log(16.0));
  const Tensor dt_bias = line.flag("bias") ? normal(random, line.dtype(), {H}) : Tensor();
  Problem p;
  if (line.is("dir", "fwd")) {
    p.in = {{"a", a}, {"b", b}, {"A_log", A_log}, {"dt_bias", dt_bias}};
    p.out = {{"g", Tensor(DType::kF32, sizes, line.form()), Span::kWhole, 0, 3e-7},
             {"beta", Tensor(line.dtype("out"), sizes, line.form()), Span::kWhole, 0, 3e-7}};
    p.call = [options](const Views& in, const Views& out, const SeqLens&) {
      gdn_gating_fwd(in[0], in[1], in[2], in[3], out[0], out[1], options);
    };
    return p;
  }
  p.in = {{"dg", normal(random, DType::kF32, sizes, line.form())},
          {"dbeta", normal(random, line.dtype("out"), sizes, line.form())},
          {"a", a},
          {"b", b},
          {"A_log", A_log},
          {"dt_bias", dt_bias}};
  p.out = {{"da", test::like(a), Span::kWhole, 0, 1e-6},
           {"db", test::like(b), Span::kWhole, 0, 1e-6},
           {"dA_log", Tensor(DType::kF32, {H}), Span::kWhole, 0, 1e-6, 0.0, 0.0, 0},
           {"ddt_bias", dt_bias.defined() ? Tensor(DType::kF32, {H}) : Tensor(), Span::kWhole, 0, 1e-6, 0.0, 0.0, 0}};
  p.call = [options](const Views& in, const Views& out, const SeqLens&) {
    gdn_gating_bwd(in[0], in[1], in[2], in[3], in[4], in[5], out[0], out[1], out[2], out[3], options);
  };
  return p;
}

std::vector<Key> row_keys(std::initializer_list<Key> more) {
  std::vector<Key> keys = kRowKeys;
  keys.insert(keys.end(), more);
  return keys;
}

}  // namespace

std::vector<Driver> row_drivers() {
  return {
      {"l2norm", "rows divided by their length", row_keys({{"out", "f32"}, {"safe", "0"}}),
       [](Random& random, Line& line) {
         draw_rows(random, line);
         line.set("out", pick_text(random, {"f32", "bf16", "f16"}));
         line.set("safe", random.integer(0, 1));
       },
       l2norm},
      {"swiglu", "the product inside a gated MLP", row_keys({}), draw_rows, swiglu},
      {"rms_norm", "zero-centred RMSNorm", row_keys({{"w", "f32"}}),
       [](Random& random, Line& line) {
         draw_rows(random, line);
         line.set("w", pick_text(random, {"f32", "bf16", "f16"}));
       },
       rms_norm},
      {"rms_norm_gated", "gated RMSNorm",
       row_keys({{"w", "f32"}, {"act", "silu", "silu|sigmoid"}, {"round", "fp32", "fp32|hf"}}),
       [](Random& random, Line& line) {
         draw_rows(random, line);
         line.set("w", pick_text(random, {"none", "f32", line.text("in").c_str()}));
         line.set("act", pick_text(random, {"silu", "sigmoid"}));
         line.set("round", pick_text(random, {"fp32", "hf"}));
       },
       rms_norm_gated},
      {"gating",
       "log decay and write strength",
       {{"dir", "fwd", "fwd|bwd"},
        {"B", "1"},
        {"T", "7"},
        {"HV", "4"},
        {"layout", "tnd"},
        {"bias", "1"},
        {"beta", "1", "1|2"},
        {"out", "f32"}},
       [](Random& random, Line& line) {
         line.set("dir", pick_text(random, {"fwd", "bwd"}));
         line.set("layout", pick_text(random, {"tnd", "ntd", "bsnd", "bnsd"}));
         line.set("B", has_batch(line.layout()) ? random.integer(1, 3) : 1);
         line.set("T", pick<std::int64_t>(random, {0, 1, 2, 17, 64, 65, 129}));
         line.set("HV", draw_width(random, 64));
         line.set("bias", random.integer(0, 1));
         line.set("beta", random.integer(1, 2));
         line.set("out", pick_text(random, {"f32", line.text("in").c_str()}));
       },
       gating},
  };
}

}  // namespace tidegate::fuzz
