// Mixture of experts: the router, the order of pairs by expert, and the way back to tokens.
#include <cmath>

#include "base/element.h"
#include "fuzz/drivers.h"
#include "tidegate/moe.h"

namespace tidegate::fuzz {

Tensor draw_ids(Random& random, const Line& line, std::int64_t T, std::int64_t k, std::int64_t E) {
  Tensor ids(DType::kI32, {T, k});
  return ids.fill([&](std::int64_t i) {
    return static_cast<double>(line.is("ids", "none")  ? -1
                               : line.is("ids", "one") ? (E - 1) / 2
                                                       : random.integer(i % 5 == 0 ? -1 : 0, E - 1));
  });
}

namespace {

using test::normal;

// Results are sums of products of about this size; one that stands alone may be a small rest of them.
constexpr double kTerm = 0.5;

// The k largest logits of every token one after the other, the first of equal ones.
Tensor plain_choice(const TensorView& logits, std::int64_t k, const MoeRouteOptions& options) {
  const std::int64_t T = logits.sizes[0], E = logits.sizes[1];
  Tensor z = test::converted(test::copied(logits), options.logits_rounding.value_or(logits.dtype));
  Tensor ids(DType::kI32, {T, k});
  for (std::int64_t t = 0; t < T; ++t) {
    std::vector<bool> taken(static_cast<std::size_t>(E), false);
    for (std::int64_t i = 0; i < k; ++i) {
      std::int64_t best = -1;
      for (std::int64_t e = 0; e < E; ++e) {
        if (!taken[static_cast<std::size_t>(e)] && (best < 0 || z.get(t * E + e) > z.get(t * E + best))) {
          best = e;
        }
      }
      taken[static_cast<std::size_t>(best)] = true;
      ids.set(t * k + i, static_cast<double>(best));
    }
  }
  return ids;
}

Problem route(const Line& line) {
  Random random = numbers(line);
  const std::int64_t T = line.size("T", 0), E = line.size("E"), k = line.integer("k", 1, E);
  Tensor logits = normal(random, line.dtype(), {T, E}, line.form(), 2.0);
  MoeRouteOptions options;
  options.renormalise = line.flag("norm");
  if (!line.is("z", "own")) {
    options.logits_rounding = line.dtype("z");
  }
  // Equal logits, and experts that must not be chosen.
  const std::int64_t barred = line.integer("barred", 0, E - k);
  for (std::int64_t i = 0; i < T * E; ++i) {
    const double z = line.flag("ties") ? std::round(2.0 * logits.get(i)) / 2.0 : logits.get(i);
    logits.set(i, i % E < barred ? -INFINITY : z);
  }
  Problem p;
  if (line.is("dir", "fwd") && line.flag("choose")) {
    p.in = {{"logits", logits}};
    p.out = {{"ids", Tensor(DType::kI32, {T, k})},
             {"weights", Tensor(DType::kF32, {T, k}), Span::kWhole, 0, 3e-7},
             {"probs", Tensor(DType::kF32, {T, E}), Span::kWhole, 0, 3e-7}};
    p.call = [options](const Views& in, const Views& out, const SeqLens&) {
      moe_route_fwd(in[0], {}, out[0], out[1], out[2], options);
    };
    p.truth = [options, k](const Views& in, const Views& out, const SeqLens&) {
      moe_route_fwd(in[0], plain_choice(in[0], k, options), out[0], out[1], out[2], options);
    };
    return p;
  }
  // The choice is replayed, so that fp64 and fp32 weigh the same experts.
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

// The pairs sorted by expert, and the rows of x in that order.
Problem order(const Line& line) {
  Random random = numbers(line);
  const std::int64_t T = line.size("T", 0), H = line.size("H"), E = line.size("E"), k = line.integer("k", 1, 16);
  const bool foreign = line.is("conv", "ep");
  Tensor ids = draw_ids(random, line, T, k, E);
  ids = line.is("idt", "i64") ? test::converted(ids, DType::kI64) : ids;
  for (std::int64_t i = 0; i < T * k; i += 2) {
    ids.set(i, foreign && ids.get(i) < 0.0 ? static_cast<double>(E) : ids.get(i));
  }
  Problem p;
  p.in = {{"ids", ids}, {"x", normal(random, line.dtype(), {T, H}, line.form())}};
  p.out = {{"counts", Tensor(DType::kI64, {E})},
           {"src", Tensor(DType::kI32, {T * k})},
           {"pos", Tensor(DType::kI32, {T, k})},
           {"y", Tensor(line.dtype(), {T * k, H}, line.form())}};
  p.call = [foreign, k](const Views& in, const Views& out, const SeqLens&) {
    moe_init_routing(in[0], out[0], out[1], out[2], foreign ? ExpertIds::kTransformersEp : ExpertIds::kPlain);
    moe_permute(in[1], out[1], out[3], k);
  };
  p.exact = [E, H, T, k](const Views& in, const Views& out, const SeqLens&) {
    std::int64_t place = 0;
    const auto put = [&](std::size_t which, std::int64_t i, std::int64_t value) {
      write_element(out[which], test::offset_at(out[which], i), static_cast<double>(value));
    };
    const auto row = [&](std::int64_t j, std::int64_t token) {
      for (std::int64_t c = 0; c < H; ++c) {
        const double value = token < 0 ? 0.0 : read_element(in[1], offset_of(in[1], token, c));
        write_element(out[3], offset_of(out[3], j, c), value);
      }
    };
    for (std::int64_t i = 0; i < T * k; ++i) {
      put(2, i, -1);
    }
    for (std::int64_t e = 0; e < E; ++e) {
      const std::int64_t first = place;
      for (std::int64_t i = 0; i < T * k; ++i) {
        if (read_element(in[0], test::offset_at(in[0], i)) == static_cast<double>(e)) {
          put(1, place, i);
          put(2, i, place);
          row(place++, i / k);
        }
      }
      put(0, e, place - first);
    }
    for (; place < T * k; ++place) {
      put(1, place, -1);
      row(place, -1);
    }
  };
  return p;
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

}  // namespace

std::vector<Driver> routing_drivers() {
  return {
      {"route",
       "the router's weights of chosen experts",
       {{"dir", "fwd", "fwd|bwd"},
        {"T", "5"},
        {"E", "8"},
        {"k", "2"},
        {"norm", "1"},
        {"probs", "1"},
        {"choose", "0"},
        {"ties", "0"},
        {"barred", "0"},
        {"z", "own"}},
       [](Random& random, Line& line) {
         line.set("dir", pick_text(random, {"fwd", "bwd"}));
         line.set("T", pick<std::int64_t>(random, {0, 1, 2, 17, 65}));
         const std::int64_t E = draw_width(random, 256);
         line.set("E", E);
         line.set("k", random.integer(1, std::min<std::int64_t>(E, 10)));
         line.set("norm", random.integer(0, 1));
         line.set("probs", random.integer(0, 1));
         line.set("choose", line.is("dir", "fwd") ? random.integer(0, 1) : 0);
         if (line.flag("choose")) {
           line.set("ties", random.integer(0, 1));
           line.set("barred", pick<std::int64_t>(random, {0, random.integer(0, E - line.size("k"))}));
           line.set("z", pick_text(random, {"own", "bf16", "f16", "f32"}));
         }
       },
       route},
      {"order",
       "pairs sorted by expert, rows in that order",
       {{"T", "5"},
        {"H", "16"},
        {"E", "8"},
        {"k", "2"},
        {"ids", "random", "random|one|none"},
        {"idt", "i32", "i32|i64"},
        {"conv", "plain", "plain|ep"}},
       [](Random& random, Line& line) {
         line.set("T", pick<std::int64_t>(random, {0, 1, 2, 17, 65, 300}));
         line.set("H", draw_width(random, 130));
         line.set("E", random.integer(1, 64));
         line.set("k", random.integer(1, 8));
         line.set("ids", pick_text(random, {"random", "random", "one", "none"}));
         line.set("idt", pick_text(random, {"i32", "i64"}));
         line.set("conv", pick_text(random, {"plain", "ep"}));
       },
       order},
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
  };
}

}  // namespace tidegate::fuzz
