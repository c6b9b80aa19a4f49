// Decode: the recurrence on a pool of states with verification and roll-back, and a whole layer's step.
#include <algorithm>

#include "base/element.h"
#include "fuzz/drivers.h"
#include "ops/chunk_gated_delta_rule/test_case.h"
#include "ops/gdn_packed_decode/test_case.h"

namespace tidegate::fuzz {
namespace {

using test::normal;

Sizes draw_accepted(Random& random, const Sizes& lengths, std::int64_t M) {
  Sizes accepted;
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    accepted.push_back(random.integer(1, M));
  }
  return accepted;
}

// spec=0: one slot a sequence. spec=M: M slots; the state to start from is one of them, token t writes slot t.
Problem decode(const Line& line) {
  Random random = numbers(line);
  const std::int64_t M = line.integer("spec", 0, 8);
  test::RuleCase c;
  c.lengths = line.lengths();
  for (std::int64_t& n : c.lengths) {
    n = M > 0 ? std::min(n, M) : n;
  }
  c.HK = line.size("HK");
  c.G = line.size("G");
  c.K = line.size("K");
  c.V = line.size("V");
  c.dtype = line.dtype();
  c.form = line.form();
  c.initial = false;
  const test::Rule r = make_rule(random, c);
  const std::size_t used = c.lengths.size() * static_cast<std::size_t>(std::max<std::int64_t>(M, 1));
  const std::int64_t slots = static_cast<std::int64_t>(used) + line.integer("spare", 0, 4);
  const Sizes where = draw_slots(random, slots, used),
              accepted = draw_accepted(random, c.lengths, std::max<std::int64_t>(M, 1));
  const bool v_first = line.flag("v_first");
  Problem p;
  p.seq = c.seq();
  p.in = {{"q", r.q, Span::kTokens, 0},
          {"k", r.k, Span::kTokens, 0},
          {"v", r.v, Span::kTokens, 0},
          {"g", r.g, Span::kTokens, 0},
          {"beta", r.beta, Span::kTokens, 0}};
  const Sizes state = v_first ? Sizes{slots, c.HK * c.G, c.V, c.K} : Sizes{slots, c.HK * c.G, c.K, c.V};
  p.out = {{"o", test::like(r.v), Span::kTokens, 0, 1e-6},
           {"pool", normal(random, DType::kF32, state), Span::kWhole, 0, 1e-6}};
  if (line.is("form", "chunk")) {
    if (M > 0) {
      throw LineError("decode: form: expected recurrent where spec is not 0, got chunk");
    }
    p.call = [where, v_first](const Views& in, const Views& out, const SeqLens& seq) {
      ChunkGatedDeltaRuleOptions o;
      o.layout = Layout::kTND;
      o.state_indices = where;
      o.state_v_first = v_first;
      chunk_gated_delta_rule_pool(in[0], in[1], in[2], in[3], in[4], out[1], out[0], seq, o);
    };
    return p;
  }
  p.call = [where, accepted, M, v_first](const Views& in, const Views& out, const SeqLens& seq) {
    RecurrentGatedDeltaRuleOptions o;
    o.state_indices = where;
    o.states_per_sequence = M;
    o.num_accepted_tokens = M > 0 ? std::span<const std::int64_t>(accepted) : std::span<const std::int64_t>();
    o.state_v_first = v_first;
    recurrent_gated_delta_rule(in[0], in[1], in[2], in[3], {}, in[4], out[1], out[0], seq, o);
  };
  return p;
}

// The step of a layer has the bits of its operators, called one after the other.
Problem layer(const Line& line) {
  Random random = numbers(line);
  test::LayerCase c;
  c.lengths = line.lengths();
  const std::int64_t M = line.integer("spec", 0, 4);
  for (std::int64_t& n : c.lengths) {
    n = std::min<std::int64_t>(n, M > 0 ? M : 3);
  }
  c.HK = line.size("HK");
  c.G = line.size("G");
  c.K = line.size("K");
  c.V = line.size("V");
  c.W = line.integer("W", 2, 4);
  c.S = M > 0 ? c.W - 2 + M : c.W - 1;
  c.dtype = line.dtype();
  c.storage = line.is("state", "bf16") ? DType::kBF16 : DType::kF32;
  c.bias = line.flag("bias");
  c.v_first = line.flag("v_first");
  c.projection = line.is("proj", "qkvz_ba") ? Projection::kQkvzBa : Projection::kQkv;
  const std::size_t used = c.lengths.size() * static_cast<std::size_t>(std::max<std::int64_t>(M, 1));
  c.slots = static_cast<std::int64_t>(used) + 1;
  const test::Layer l = make_layer(random, c);
  const Sizes where = draw_slots(random, c.slots, used),
              accepted = draw_accepted(random, c.lengths, std::max<std::int64_t>(M, 1));
  const test::Projected in = project(l);
  Problem p;
  p.seq = SeqLens::from_lengths(c.lengths);
  p.in = {{"mixed", in.mixed, Span::kTokens},
          {"z", in.z, Span::kTokens},
          {"a", in.a, Span::kTokens},
          {"b", in.b, Span::kTokens},
          {"conv_weight", l.conv_weight},
          {"conv_bias", l.conv_bias},
          {"A_log", l.A_log},
          {"dt_bias", l.dt_bias},
          {"norm_weight", l.norm_weight}};
  p.out = {{"y", Tensor(c.dtype, {c.tokens(), c.HV() * c.V}), Span::kTokens},
           {"conv_state", l.conv_state},
           {"state", l.state}};
  const auto options_of = [where, accepted, M](GdnPackedDecodeOptions o) {
    o.state_indices = where;
    o.states_per_sequence = M;
    o.num_accepted_tokens = M > 0 ? std::span<const std::int64_t>(accepted) : std::span<const std::int64_t>();
    return o;
  };
  const GdnPackedDecodeOptions options = l.options;
  p.call = [options, options_of](const Views& in, const Views& out, const SeqLens& seq) {
    gdn_packed_decode(in[0], in[1], in[2], in[3], out[1], in[4], in[5], in[6], in[7], out[2], in[8], out[0], seq,
                      options_of(options));
  };
  p.exact = [l, options_of](const Views&, const Views& out, const SeqLens& seq) {
    test::Layer own = l;  // its pools are copies, which become the outputs
    own.options = options_of(own.options);
    const Tensor y = test::decode_separately(own, seq);
    const Tensor* results[] = {&y, &own.conv_state, &own.state};
    for (std::size_t k = 0; k < 3; ++k) {
      for (std::int64_t i = 0; i < out[k].numel(); ++i) {
        write_element(out[k], test::offset_at(out[k], i), results[k]->get(i));
      }
    }
  };
  return p;
}

void draw_heads(Random& random, Line& line) {
  line.set("cu", random.integer(0, 1) == 0 ? equal_cu(random.integer(1, 6), 1) : draw_cu(random, 40));
  line.set("HK", random.integer(1, 3));
  line.set("G", random.integer(1, 3));
  line.set("K", draw_width(random, 64));
  line.set("V", draw_width(random, 64));
  line.set("spec", pick<std::int64_t>(random, {0, 0, 1, 2, 4}));
  line.set("v_first", random.integer(0, 1));
}

}  // namespace

std::vector<Driver> decode_drivers() {
  return {
      {"decode",
       "the recurrence on a pool of states, with verification and roll-back",
       {{"cu", "0,1,2,3"},
        {"HK", "1"},
        {"G", "2"},
        {"K", "32"},
        {"V", "32"},
        {"spec", "0"},
        {"spare", "1"},
        {"v_first", "0"},
        {"form", "recurrent", "recurrent|chunk"}},
       [](Random& random, Line& line) {
         draw_heads(random, line);
         line.set("spare", random.integer(0, 2));
         line.set("form", line.is("spec", "0") ? pick_text(random, {"recurrent", "chunk"}) : "recurrent");
       },
       decode},
      {"layer",
       "a layer between its projections, one step",
       {{"cu", "0,1,2"},
        {"HK", "1"},
        {"G", "2"},
        {"K", "32"},
        {"V", "32"},
        {"W", "4"},
        {"spec", "0"},
        {"bias", "1"},
        {"v_first", "0"},
        {"state", "f32", "f32|bf16"},
        {"proj", "qkv", "qkv|qkvz_ba"}},
       [](Random& random, Line& line) {
         draw_heads(random, line);
         line.set("W", random.integer(2, 4));
         line.set("bias", random.integer(0, 1));
         line.set("state", pick_text(random, {"f32", "f32", "bf16"}));
         line.set("proj", pick_text(random, {"qkv", "qkvz_ba"}));
       },
       layer},
  };
}

}  // namespace tidegate::fuzz
