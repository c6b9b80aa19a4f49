// The causal convolution: sequences, gradients, the update of a pool.
#include "fuzz/drivers.h"
#include "ops/causal_conv1d/test_case.h"

namespace tidegate::fuzz {
namespace {

using test::normal;

// Results are sums of products of about this size; one that stands alone may be a small rest of them.
constexpr double kTerm = 0.5;

test::ConvCase case_of(const Line& line) {
  test::ConvCase c;
  const Sizes lengths = line.lengths();
  c.layout = line.layout();
  const bool batch = has_batch(c.layout);
  c.B = batch ? static_cast<std::int64_t>(lengths.size()) : 1;
  c.T = batch ? lengths[0] : line.list("cu").back();
  c.lengths = batch ? Sizes{} : lengths;
  c.heads = is_head_major(c.layout) ? line.size("heads") : 1;
  c.head_num = is_head_major(c.layout) ? 0 : line.integer("head_num", 0, 64);
  // Channels are cut into heads of equal width.
  const std::int64_t heads = std::max(c.heads, c.head_num);
  c.D = (line.size("D") + heads - 1) / heads * heads;
  c.W = line.integer("W", 2, 4);
  c.dtype = line.dtype();
  c.weight_type = line.dtype("w");
  c.bias = line.flag("bias");
  c.silu = line.is("act", "silu");
  c.state = line.integer("state", 0, 16) == 0 ? 0 : std::max(line.integer("state", 0, 16), c.W - 1);
  c.final_state = line.integer("final", 0, 16) == 0 ? 0 : std::max(line.integer("final", 0, 16), c.W - 1);
  c.form = line.form();
  return c;
}

int token_dimension(const test::ConvCase& c, bool heads) { return (has_batch(c.layout) ? 1 : 0) + (heads ? 1 : 0); }

Problem conv(const Line& line) {
  Random random = numbers(line);
  const test::ConvCase c = case_of(line);
  const test::Conv v = make_conv(random, c);
  const int of_x = token_dimension(c, is_head_major(c.layout));
  const int of_y = token_dimension(c, is_head_major(c.layout) || c.head_num > 0);
  const CausalConv1dOptions options = c.options();
  Problem p;
  p.seq = v.seq;
  if (line.is("dir", "fwd")) {
    const test::ConvForward out = outputs_of(v);
    p.in = {
        {"x", v.x, Span::kTokens, of_x}, {"weight", v.weight}, {"bias", v.bias}, {"state", v.initial, Span::kStates}};
    p.out = {{"y", out.y, Span::kTokens, of_y, 2e-7, kTerm}, {"final", out.final_state, Span::kStates, 0, 2e-7}};
    p.call = [options](const Views& in, const Views& out, const SeqLens& seq) {
      causal_conv1d_fwd(in[0], in[1], in[2], in[3], out[0], out[1], seq, options);
    };
    return p;
  }
  const test::ConvBackward out = gradients_of(v);
  p.in = {
      {"dy", v.dy, Span::kTokens, of_y},   {"x", v.x, Span::kTokens, of_x},    {"weight", v.weight}, {"bias", v.bias},
      {"state", v.initial, Span::kStates}, {"dfinal", v.dfinal, Span::kStates}};
  p.out = {{"dx", out.dx, Span::kTokens, of_x, 5e-7, kTerm},
           {"dweight", out.dweight, Span::kWhole, 0, 5e-7, kTerm},
           {"dbias", c.bias ? out.dbias : Tensor(), Span::kWhole, 0, 5e-7, kTerm},
           {"dstate", out.dinitial, Span::kStates, 0, 5e-7, kTerm}};
  p.call = [options](const Views& in, const Views& out, const SeqLens& seq) {
    causal_conv1d_bwd(in[0], in[1], in[2], in[3], in[4], in[5], out[0], out[1], out[2], out[3], seq, options);
  };
  return p;
}

Problem conv_update(const Line& line) {
  Random random = numbers(line);
  const Sizes lengths = line.lengths();
  const std::int64_t T = line.list("cu").back(), D = line.size("D"), W = line.integer("W", 2, 4);
  const std::int64_t S = std::max(line.integer("S", 1, 16), W - 1), N = static_cast<std::int64_t>(lengths.size());
  const std::int64_t slots = std::max(line.integer("slots", 1, 16), N);
  const Sizes rows = draw_slots(random, slots, lengths.size());
  const bool silu = line.is("act", "silu");
  Problem p;
  p.seq = SeqLens::from_lengths(lengths);
  p.in = {{"x", normal(random, line.dtype(), {T, D}, line.form()), Span::kTokens, 0},
          {"weight", normal(random, line.dtype("w"), {D, W}, {}, 0.5)},
          {"bias", line.flag("bias") ? normal(random, line.dtype("w"), {D}) : Tensor()}};
  p.out = {{"y", Tensor(line.dtype(), {T, D}, line.form()), Span::kTokens, 0, 2e-7, kTerm},
           {"pool", normal(random, line.dtype(), {slots, D, S}), Span::kWhole, 0, 2e-7}};
  p.call = [rows, silu](const Views& in, const Views& out, const SeqLens& seq) {
    CausalConv1dUpdateOptions options;
    options.activation = silu ? Activation::kSilu : Activation::kNone;
    options.cache_indices = rows;
    causal_conv1d_update(in[0], out[1], in[1], in[2], out[0], seq, options);
  };
  // The same by the convolution of sequences, on states that are taken out of the pool and put back.
  p.truth = [rows, silu](const Views& in, const Views& out, const SeqLens& seq) {
    for (std::int64_t n = 0; n < seq.count(); ++n) {
      const std::int64_t slot = rows[static_cast<std::size_t>(n)];
      const TensorView state = test::part(out[1], 0, slot, slot + 1);
      const Tensor before = test::copied(state);
      const Tensor after(DType::kF64, before.sizes());
      const CausalConv1dOptions options{silu ? Activation::kSilu : Activation::kNone, 0, Layout::kTND};
      causal_conv1d_fwd(test::part(in[0], 0, seq[n].begin, seq[n].end), in[1], in[2], before,
                        test::part(out[0], 0, seq[n].begin, seq[n].end), after, SeqLens::dense(1, seq[n].length()),
                        options);
      for (std::int64_t i = 0; i < state.numel(); ++i) {
        state.as<double>()[test::offset_at(state, i)] = after.get(i);
      }
    }
  };
  return p;
}

}  // namespace

std::vector<Driver> conv_drivers() {
  return {
      {"conv",
       "causal convolution over packed or batched sequences",
       {{"dir", "fwd", "fwd|bwd"},
        {"cu", "0,5,5,70"},
        {"D", "48"},
        {"W", "4"},
        {"act", "silu", "silu|none"},
        {"layout", "tnd"},
        {"heads", "1"},
        {"head_num", "0"},
        {"bias", "1"},
        {"state", "0"},
        {"final", "0"},
        {"w", "f32"}},
       [](Random& random, Line& line) {
         line.set("dir", pick_text(random, {"fwd", "bwd"}));
         line.set("layout", pick_text(random, {"tnd", "tnd", "ntd", "bsnd", "bnsd"}));
         line.set("cu", has_batch(line.layout()) ? equal_cu(random.integer(1, 3), random.integer(0, 70))
                                                 : draw_cu(random, 200));
         line.set("D", draw_width(random, 130));
         line.set("W", random.integer(2, 4));
         line.set("act", pick_text(random, {"silu", "none"}));
         line.set("heads", is_head_major(line.layout()) ? random.integer(1, 4) : 1);
         line.set("head_num", is_head_major(line.layout()) ? 0 : pick<std::int64_t>(random, {0, 0, 1, 3}));
         line.set("bias", random.integer(0, 1));
         line.set("state", pick<std::int64_t>(random, {0, 3, 5}));
         line.set("final", pick<std::int64_t>(random, {0, 3, 6}));
         line.set("w", pick_text(random, {"f32", line.text("in").c_str()}));
       },
       conv},
      {"conv_update",
       "the convolution on a pool of states, in place",
       {{"cu", "0,1,2"},
        {"D", "48"},
        {"W", "4"},
        {"S", "3"},
        {"slots", "4"},
        {"act", "silu", "silu|none"},
        {"bias", "1"},
        {"w", "f32"}},
       [](Random& random, Line& line) {
         line.set("cu", random.integer(0, 1) == 0 ? equal_cu(random.integer(1, 5), 1) : draw_cu(random, 60));
         line.set("D", draw_width(random, 300));
         line.set("W", random.integer(2, 4));
         line.set("S", random.integer(1, 8));
         line.set("slots", random.integer(1, 8));
         line.set("act", pick_text(random, {"silu", "none"}));
         line.set("bias", random.integer(0, 1));
         line.set("w", pick_text(random, {"f32", line.text("in").c_str()}));
       },
       conv_update},
  };
}

}  // namespace tidegate::fuzz
