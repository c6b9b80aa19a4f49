// The gated delta rule over sequences: chunks, the recurrence, gradients, the map of a segment.
#include <cmath>

#include "fuzz/drivers.h"
#include "ops/chunk_gated_delta_rule/test_case.h"
#include "tidegate/recurrent.h"

namespace tidegate::fuzz {
namespace {

using test::normal;
using test::uniform;

test::RuleCase case_of(const Line& line) {
  test::RuleCase c;
  c.lengths = line.lengths();
  c.HK = line.size("HK");
  c.G = line.size("G");
  c.K = line.size("K");
  c.V = line.size("V");
  c.dtype = line.dtype();
  c.layout = line.layout();
  c.initial = line.flag("h0");
  c.form = line.form();
  for (const std::int64_t n : c.lengths) {
    if (has_batch(c.layout) && n != c.lengths[0]) {
      throw LineError("gdn: cu: expected sequences of one length in a layout with rows");
    }
  }
  return c;
}

int token_dimension(Layout layout) { return (has_batch(layout) ? 1 : 0) + (is_head_major(layout) ? 1 : 0); }

// gate=plain: unit rows, gates and strengths as numbers; softplus: raw projections, everything formed inside.
// gate=reset: some gates forget everything.
struct Made {
  test::Rule rule;
  Tensor A_log, dt_bias;
};
Made make(Random& random, const Line& line, const test::RuleCase& c) {
  Made m{make_rule(random, c), {}, {}};
  if (line.is("gate", "softplus")) {
    m.rule.q = normal(random, c.dtype, m.rule.q.sizes(), c.form, 3.0);
    m.rule.k = normal(random, c.dtype, m.rule.k.sizes(), c.form, 0.2);
    m.rule.g = normal(random, c.dtype, m.rule.g.sizes());
    m.rule.beta = normal(random, c.dtype, m.rule.beta.sizes());
    m.A_log = uniform(random, DType::kF32, {c.HK * c.G}, -4.0, 1.0);
    m.dt_bias = normal(random, DType::kF32, {c.HK * c.G});
  } else if (line.is("gate", "reset")) {
    for (std::int64_t i = 0; i < m.rule.g.view().numel(); ++i) {
      if (random.uniform() < 0.1) {
        m.rule.g.set(i, pick<double>(random, {-INFINITY, -1e38, -104.0, -200.0}));
      }
    }
  }
  if (line.flag("v_first") && c.initial) {
    m.rule.h0 = normal(random, DType::kF32, {c.seq().count(), c.HK * c.G, c.V, c.K});
  }
  return m;
}

// Where the tensors of a rule stand in the inputs.
enum In { kQ, kK, kV, kG, kBeta, kH0, kALog, kDtBias, kDo, kDfinal };
std::vector<Part> inputs_of(const Made& m) {
  const int d = token_dimension(m.rule.c.layout);
  return {{"q", m.rule.q, Span::kTokens, d},
          {"k", m.rule.k, Span::kTokens, d},
          {"v", m.rule.v, Span::kTokens, d},
          {"g", m.rule.g, Span::kTokens, d},
          {"beta", m.rule.beta, Span::kTokens, d},
          {"h0", m.rule.h0, Span::kStates},
          {"A_log", m.A_log},
          {"dt_bias", m.dt_bias}};
}

template <class Options>
Options options_of(const Line& line) {
  Options o;
  o.layout = line.layout();
  o.use_qk_l2norm = line.is("gate", "softplus");
  o.beta_sigmoid = line.is("gate", "softplus");
  o.beta_scale = line.is("gate", "softplus") ? 2.0 : 1.0;
  o.state_v_first = line.flag("v_first");
  return o;
}

Sizes state_sizes(const Line& line, const test::RuleCase& c) {
  Sizes s = c.states(c.seq().count());
  if (line.flag("v_first")) {
    std::swap(s[2], s[3]);
  }
  return s;
}

Problem gdn(const Line& line) {
  Random random = numbers(line);
  const test::RuleCase c = case_of(line);
  const Made m = make(random, line, c);
  const int d = token_dimension(c.layout);
  const Sizes states = state_sizes(line, c);
  Problem p;
  p.seq = c.seq();
  p.in = inputs_of(m);
  if (line.is("dir", "fwd")) {
    const bool recurrent = line.is("form", "recurrent");
    p.out = {{"o", Tensor(c.dtype, c.heads(c.HK * c.G, c.V), c.form), Span::kTokens, d, recurrent ? 5e-7 : 1e-6},
             {"ht", Tensor(DType::kF32, states), Span::kStates, 0, 1e-6}};
    if (recurrent) {
      const auto options = options_of<RecurrentGatedDeltaRuleOptions>(line);
      p.call = [options](const Views& in, const Views& out, const SeqLens& seq) {
        auto o = options;
        o.A_log = in[kALog];
        o.dt_bias = in[kDtBias];
        recurrent_gated_delta_rule_fwd(in[kQ], in[kK], in[kV], in[kG], {}, in[kBeta], in[kH0], out[0], out[1], seq, o);
      };
    } else {
      const auto options = options_of<ChunkGatedDeltaRuleOptions>(line);
      p.call = [options](const Views& in, const Views& out, const SeqLens& seq) {
        auto o = options;
        o.A_log = in[kALog];
        o.dt_bias = in[kDtBias];
        chunk_gated_delta_rule_fwd(in[kQ], in[kK], in[kV], in[kG], in[kBeta], in[kH0], out[0], out[1], {}, seq, o);
      };
    }
    return p;
  }
  p.in.push_back({"do", normal(random, c.dtype, c.heads(c.HK * c.G, c.V), c.form), Span::kTokens, d});
  p.in.push_back({"dht", line.flag("dht") ? normal(random, DType::kF32, states, {}, 0.3) : Tensor(), Span::kStates});
  const std::int64_t HV = c.HK * c.G;
  constexpr double kBound = 3e-6;
  // dg of a sequence's last token has a sum over all of the state in it, products of h0 and dht (0.3 large) times the
  // decay. Where that is all of dg it may be a small rest.
  double decay = line.is("gate", "plain") ? 0.0 : 1.0;
  for (std::int64_t i = 0; i < m.rule.g.view().numel() && decay < 1.0; ++i) {
    decay = std::max(decay, std::exp(std::min(m.rule.g.get(i), 0.0)));
  }
  const double state_sum =
      c.initial && line.flag("dht") ? 0.3 * decay * std::sqrt(static_cast<double>(c.K * c.V)) : 0.0;
  p.out = {
      {"dq", test::like(m.rule.q), Span::kTokens, d, kBound},
      {"dk", test::like(m.rule.k), Span::kTokens, d, kBound},
      {"dv", test::like(m.rule.v), Span::kTokens, d, kBound},
      {"dg", test::like(m.rule.g, DType::kF32), Span::kTokens, d, kBound, state_sum},
      {"dbeta", test::like(m.rule.beta, DType::kF32), Span::kTokens, d, kBound},
      {"dh0", c.initial ? Tensor(DType::kF32, states) : Tensor(), Span::kStates, 0, kBound},
      {"dA_log", m.A_log.defined() ? Tensor(DType::kF32, {HV}) : Tensor(), Span::kWhole, 0, kBound, 0.0, 0.0, 3},
      {"ddt_bias", m.A_log.defined() ? Tensor(DType::kF32, {HV}) : Tensor(), Span::kWhole, 0, kBound, 0.0, 0.0, 3}};
  const auto options = options_of<ChunkGatedDeltaRuleOptions>(line);
  p.call = [options](const Views& in, const Views& out, const SeqLens& seq) {
    auto o = options;
    o.A_log = in[kALog];
    o.dt_bias = in[kDtBias];
    chunk_gated_delta_rule_bwd(in[kDo], in[kDfinal], in[kQ], in[kK], in[kV], in[kG], in[kBeta], in[kH0], {},
                               {out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7]}, seq, o);
  };
  return p;
}

Problem segment(const Line& line) {
  Random random = numbers(line);
  test::RuleCase c = case_of(line);
  const Made m = make(random, line, c);
  const std::int64_t HV = c.HK * c.G, N = c.seq().count();
  Problem p;
  p.seq = c.seq();
  p.in = inputs_of(m);
  p.out = {{"phi", Tensor(DType::kF32, {N, HV, c.K, c.K}), Span::kStates, 0, 1e-6},
           {"s", Tensor(DType::kF32, {N, HV, c.K, c.V}), Span::kStates, 0, 1e-6}};
  const Layout layout = c.layout;
  p.call = [layout](const Views& in, const Views& out, const SeqLens& seq) {
    ChunkGatedDeltaRuleOptions o;
    o.layout = layout;
    gdn_segment_map(in[kK], in[kV], in[kG], in[kBeta], out[0], out[1], seq, o);
  };
  return p;
}

Problem combine(const Line& line) {
  Random random = numbers(line);
  const std::int64_t N = line.size("N", 0), K = line.size("K"), V = line.size("V");
  const double scale = 1.0 / std::sqrt(static_cast<double>(K));
  Problem p;
  p.in = {{"phi1", normal(random, DType::kF32, {N, K, K}, {}, scale)},
          {"s1", normal(random, DType::kF32, {N, K, V})},
          {"phi2", normal(random, DType::kF32, {N, K, K}, {}, scale)},
          {"s2", normal(random, DType::kF32, {N, K, V})}};
  p.out = {{"phi", Tensor(DType::kF32, {N, K, K}), Span::kWhole, 0, 1e-6},
           {"s", Tensor(DType::kF32, {N, K, V}), Span::kWhole, 0, 1e-6}};
  p.call = [](const Views& in, const Views& out, const SeqLens&) {
    gdn_segment_combine(in[0], in[1], in[2], in[3], out[0], out[1]);
  };
  return p;
}

// Sizes whose plain loops in fp64 take some milliseconds.
void draw_sizes(Random& random, Line& line, std::int64_t least) {
  line.set("layout", pick_text(random, {"tnd", "tnd", "ntd", "bsnd", "bnsd"}));
  line.set("cu",
           has_batch(line.layout()) ? equal_cu(random.integer(1, 3), random.integer(0, 66)) : draw_cu(random, 200));
  line.set("HK", random.integer(1, 2));
  line.set("G", random.integer(1, 3));
  const std::int64_t K = draw_width(random, 128, least);
  line.set("K", K);
  const std::int64_t work = std::max<std::int64_t>(line.list("cu").back(), 1) * line.size("HK") * line.size("G") * K;
  line.set("V", draw_width(random, std::clamp<std::int64_t>(400000 / work, 3, 128)));
  line.set("h0", random.integer(0, 1));
}
const std::vector<Key> kKeys = {{"cu", "0,0,1,65"}, {"HK", "1"},      {"G", "2"},
                                {"K", "32"},        {"V", "32"},      {"layout", "tnd"},
                                {"h0", "1"},        {"v_first", "0"}, {"gate", "plain", "plain|softplus|reset"}};
std::vector<Key> keys(std::initializer_list<Key> first) {
  std::vector<Key> all(first);
  all.insert(all.end(), kKeys.begin(), kKeys.end());
  return all;
}

}  // namespace

std::vector<Driver> rule_drivers() {
  return {
      {"gdn", "the gated delta rule over sequences; form=chunk or recurrent, dir=fwd or bwd",
       keys({{"dir", "fwd", "fwd|bwd"}, {"form", "chunk", "chunk|recurrent"}, {"dht", "1"}}),
       [](Random& random, Line& line) {
         line.set("dir", pick_text(random, {"fwd", "fwd", "bwd"}));
         line.set("form", line.is("dir", "fwd") ? pick_text(random, {"chunk", "recurrent"}) : "chunk");
         // Few key channels make gradients small rests of large terms; the tests of the operator have these.
         draw_sizes(random, line, line.is("dir", "fwd") ? 1 : 16);
         line.set("v_first", random.integer(0, 1));
         line.set("dht", random.integer(0, 1));
         line.set("gate", line.is("dir", "fwd") ? pick_text(random, {"plain", "softplus", "reset"})
                                                : pick_text(random, {"plain", "softplus"}));
       },
       gdn},
      {"segment", "what the tokens of a sequence do to any state before them", keys({}),
       [](Random& random, Line& line) {
         draw_sizes(random, line, 8);
         line.set("layout", "tnd");
         line.set("h0", "0");
       },
       segment},
      {"combine",
       "two such maps as one",
       {{"N", "3"}, {"K", "32"}, {"V", "32"}},
       [](Random& random, Line& line) {
         line.set("N", random.integer(0, 4));
         line.set("K", draw_width(random, 64));
         line.set("V", draw_width(random, 64));
       },
       combine},
  };
}

}  // namespace tidegate::fuzz
