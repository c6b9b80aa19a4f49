// gdn_segment_map and gdn_segment_combine: a sequence cut in two gives the state of one run.
#include <gtest/gtest.h>

#include "ops/chunk_gated_delta_rule/test_case.h"
#include "ops/gdn_segment_combine/problem.h"
#include "toolkit.h"

namespace tidegate::test {
namespace {

struct Map {
  Tensor phi, s;
};
Map map_of(const Rule& r, std::int64_t begin, std::int64_t end) {
  const auto cut = [&](const Tensor& t) { return tokens_of(t, r.c.layout, begin, end); };
  const std::int64_t HV = r.c.HK * r.c.G;
  const DType type = r.c.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  Map m{Tensor(type, {1, HV, r.c.K, r.c.K}), Tensor(type, {1, HV, r.c.K, r.c.V})};
  const std::int64_t lengths[] = {end - begin};
  gdn_segment_map(cut(r.k), cut(r.v), cut(r.g), cut(r.beta), m.phi, m.s, SeqLens::from_lengths(lengths), r.options);
  return m;
}
Map combine(const Map& first, const Map& then) {
  Map m{like(first.phi), like(first.s)};
  gdn_segment_combine(first.phi, first.s, then.phi, then.s, m.phi, m.s);
  return m;
}
double relative_error(const Tensor& got, const Tensor& truth) {
  double error = 0.0;
  double size = 0.0;
  for (std::int64_t i = 0; i < truth.view().numel(); ++i) {
    error += (got.get(i) - truth.get(i)) * (got.get(i) - truth.get(i));
    size += truth.get(i) * truth.get(i);
  }
  return std::sqrt(error / size);
}
// phi S + s
Tensor apply(const Map& m, const Tensor& state) {
  Tensor out = like(m.s);
  gdn_segment_combine({}, state, m.phi, m.s, {}, out);
  return out;
}

TEST(GdnSegment, MapsOfPartsCombineToTheWhole) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Random random;
    Rule r = make_rule(random, {.lengths = {300}, .HK = 1, .G = 3, .K = 36, .V = 20, .dtype = dtype, .slowest = 0.001});
    const RuleResult truth = forward(wide(r));
    for_each_isa([&] {
      for (const std::int64_t cut : {0, 1, 64, 150, 300}) {
        const Map whole = combine(map_of(r, 0, cut), map_of(r, cut, 300));
        EXPECT_LE(relative_error(apply(whole, r.h0), truth.ht), 1e-6) << cut;
      }
    });
  }
}

// A sequence cut in time inside one call.
TEST(GdnSegment, TimeSegmentsGiveTheSameAnswer) {
  for (const DType dtype : kKernelTypes) {
    Random random;
    Rule r = make_rule(
        random, {.lengths = {300, 0, 5, 1000}, .HK = 1, .G = 2, .K = 36, .V = 20, .dtype = dtype, .slowest = 0.001});
    const std::uint8_t has[] = {1, 1, 0, 1};
    r.options.has_initial_state = has;
    r.options.use_qk_l2norm = true;
    const RuleResult truth = forward(wide(r));
    for_each_isa([&] {
      for (const std::int64_t segments : {2, 3, 100}) {
        r.options.time_segments = segments;
        const RuleResult got = forward(r);
        EXPECT_LE(relative_error(got.o, truth.o), stored(dtype, 1e-6)) << segments;
        EXPECT_LE(relative_error(got.ht, truth.ht), 1e-6) << segments;
        for_each_thread_count([&] { EXPECT_TRUE(same_bits(forward(r).o, got.o)); });
      }
      r.options.time_segments = 1;
    });
  }
}

TEST(GdnSegment, ResetForgetsWhatCameBefore) {
  Random random;
  Rule r = make_rule(random, {.lengths = {100}, .K = 12, .V = 8});
  r.g.set(40, -1000.0);
  for_each_isa([&] {
    const Map m = map_of(r, 0, 100);
    for (std::int64_t i = 0; i < m.phi.view().numel(); ++i) {
      ASSERT_EQ(m.phi.get(i), 0.0);
    }
  });
}

TEST(GdnSegment, CombineMatchesFp64) {
  for (const std::int64_t K : {1, 7, 16, 33, 128}) {
    Random random;
    Map a{normal(random, DType::kF32, {2, 3, K, K}, padded()), normal(random, DType::kF32, {2, 3, K, 19}, reversed())};
    Map b{normal(random, DType::kF32, {2, 3, K, K}), normal(random, DType::kF32, {2, 3, K, 19})};
    const Map truth = combine({wide(a.phi), wide(a.s)}, {wide(b.phi), wide(b.s)});
    Map plain{like(a.phi), like(a.s)};
    segment_combine::reference<float>(b.phi, a.phi, {}, plain.phi);
    segment_combine::reference<float>(b.phi, a.s, b.s, plain.s);
    for_each_isa([&] {
      Accuracy phi, s;
      const Map got = combine(a, b);
      phi.add(got.phi, plain.phi, truth.phi, 1e-6);
      s.add(got.s, plain.s, truth.s, 1e-6);
      phi.expect("phi", 1e-6);
      s.expect("s", 1e-6);
    });
  }
}

TEST(GdnSegment, Errors) {
  Random random;
  const Map a{normal(random, DType::kF32, {1, 2, 4, 4}), normal(random, DType::kF32, {1, 2, 4, 6})};
  const Map out{like(a.phi), like(a.s)};
  const auto call = [&](const TensorView& phi1, const TensorView& s1, const TensorView& phi2, const TensorView& s2,
                        const TensorView& phi,
                        const TensorView& s) { return [=] { gdn_segment_combine(phi1, s1, phi2, s2, phi, s); }; };
  const std::string op = "gdn_segment_combine: ";
  expect_error(call({}, a.s, a.phi, a.s, out.phi, out.s), op + "phi1: expected a tensor, got none");
  expect_error(call(a.phi, a.s, a.phi, a.s, {}, out.s), op + "phi: expected a tensor, got none");
  expect_error(call(typed(a.phi, DType::kBF16), a.s, a.phi, a.s, out.phi, out.s),
               op + "phi1: expected dtype float32 or float64, got bfloat16");
  expect_error(call(sized(a.phi, 3, 3), a.s, a.phi, a.s, out.phi, out.s),
               op + "phi1: expected square matrices, got [1, 2, 4, 3]");
  expect_error(call({}, a.s, sized(a.phi, 3, 3), a.s, {}, out.s),
               op + "phi2: expected square matrices, got [1, 2, 4, 3]");
  expect_error(call({}, a.s, {}, a.s, {}, out.s), op + "phi2: expected a tensor, got none");
  expect_error(call(a.phi, a.s, a.phi, a.s, a.phi, out.s),
               op + "phi: expected memory of its own, got an overlap with phi1");
}

}  // namespace
}  // namespace tidegate::test
