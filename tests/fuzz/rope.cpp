// Rotary embedding and its tables.
#include "tidegate/rope.h"

#include <algorithm>
#include <cmath>

#include "base/element.h"
#include "fuzz/drivers.h"

namespace tidegate::fuzz {
namespace {

using test::normal;
using test::uniform;

Problem rope(const Line& line) {
  Random random = numbers(line);
  const Layout layout = line.layout();
  const std::int64_t B = line.size("B"), T = line.size("T", 0), H = line.size("H"), D = line.size("D", 2);
  const std::int64_t R = line.integer("R", 0, D) / 2 * 2;
  Sizes sizes = is_head_major(layout) ? Sizes{H, T, D} : Sizes{T, H, D};
  sizes.insert(sizes.begin(), has_batch(layout) ? 1 : 0, B);
  const bool tables_of_rows = has_batch(layout) && line.flag("tables");
  const Sizes table = tables_of_rows ? Sizes{B, T, R} : Sizes{T, R};
  PartialRopeOptions options{layout, line.is("round", "hf") ? Rounding::kHf : Rounding::kFp32};
  const Tensor cos = uniform(random, line.dtype("w"), table, -1.0, 1.0);
  const Tensor sin = uniform(random, line.dtype("w"), table, -1.0, 1.0);
  const Tensor x = normal(random, line.dtype(), sizes, line.form());
  const bool hf = options.rounding == Rounding::kHf && line.dtype() != DType::kF32;
  const double bound = hf ? test::stored(line.dtype(), 0.0) : 2e-7;
  Problem p;
  p.in = {{"x", x}, {"cos", cos}, {"sin", sin}};
  p.out = {{"y", test::like(x), Span::kWhole, 0, bound, 0.0, std::sqrt(3.0) * test::stored(line.dtype(), 2e-7)}};
  const bool back = line.is("dir", "bwd");
  p.call = [options, back](const Views& in, const Views& out, const SeqLens&) {
    back ? partial_rope_bwd(in[0], in[1], in[2], out[0], options)
         : partial_rope_fwd(in[0], in[1], in[2], out[0], options);
  };
  return p;
}

// The definition forms angles in fp32, so the truth does too; only what comes after them is fp64.
Problem mrope(const Line& line) {
  Random random = numbers(line);
  const std::int64_t B = line.size("B"), T = line.size("T", 0), half = line.size("half");
  const bool axes = line.flag("axes");
  const std::int64_t most = line.integer("most", 0, 1 << 20);
  Tensor ids(line.is("idt", "i32") ? DType::kI32 : DType::kI64, axes ? Sizes{3, B, T} : Sizes{B, T}, line.form());
  ids.fill([&](std::int64_t) { return static_cast<double>(random.integer(0, most)); });
  Tensor frequency(DType::kF32, {half});
  frequency.fill([&](std::int64_t i) { return std::pow(1e7, -static_cast<double>(i) / static_cast<double>(half)); });
  const Sizes section = {random.integer(0, half), random.integer(0, half), random.integer(0, half)};
  const double scaling = 1.25;
  Problem p;
  p.in = {{"position_ids", ids}, {"inv_freq", frequency}};
  // Numbers like 1.25 cos(0) are frequent: the rms error of a rounding is that of its worst place, not of all places.
  const double rounding = std::max(2e-7, test::rounding_of(line.dtype()) / std::sqrt(3.0));
  for (const char* name : {"cos", "sin"}) {
    const Tensor table(line.dtype(), {B, T, 2 * half}, line.form());
    p.out.push_back({name, table, Span::kWhole, 0, 2e-7, scaling, rounding});
  }
  p.call = [section, scaling](const Views& in, const Views& out, const SeqLens&) {
    mrope_cos_sin(in[0], in[1], section.data(), scaling, out[0], out[1]);
  };
  p.truth = [section, scaling, axes, B, T, half](const Views& in, const Views& out, const SeqLens&) {
    for (std::int64_t i = 0; i < B * T * 2 * half; ++i) {
      const std::int64_t token = i / (2 * half), f = i % half;
      const bool own = axes && f % 3 != 0 && f < 3 * section[static_cast<std::size_t>(f % 3)];
      const std::int64_t at = test::offset_at(in[0], (own ? f % 3 * B * T : 0) + token);
      const float angle = static_cast<float>(read_element(in[0], at)) * static_cast<float>(read_element(in[1], f));
      write_element(out[0], i, scaling * std::cos(static_cast<double>(angle)));
      write_element(out[1], i, scaling * std::sin(static_cast<double>(angle)));
    }
  };
  return p;
}

}  // namespace

std::vector<Driver> rope_drivers() {
  return {
      {"rope",
       "rotary embedding of the first R channels",
       {{"dir", "fwd", "fwd|bwd"},
        {"B", "1"},
        {"T", "7"},
        {"H", "2"},
        {"D", "64"},
        {"R", "32"},
        {"layout", "ntd"},
        {"w", "f32"},
        {"tables", "0"},
        {"round", "fp32", "fp32|hf"}},
       [](Random& random, Line& line) {
         line.set("dir", pick_text(random, {"fwd", "bwd"}));
         line.set("layout", pick_text(random, {"tnd", "ntd", "bsnd", "bnsd"}));
         line.set("B", has_batch(line.layout()) ? random.integer(1, 3) : 1);
         line.set("T", pick<std::int64_t>(random, {0, 1, 2, 17, 65}));
         line.set("H", random.integer(1, 4));
         const std::int64_t D = draw_width(random, 256, 2);
         line.set("D", D);
         line.set("R", random.integer(1, D / 2) * 2);
         line.set("round", pick_text(random, {"fp32", "hf"}));
         // hf rounds products of x's type: the tables have it too.
         const char* own = line.text("in").c_str();
         line.set("w", line.is("round", "hf") ? own : pick_text(random, {"f32", own}));
         line.set("tables", random.integer(0, 1));
       },
       rope},
      {"mrope",
       "tables of angles from positions on three axes",
       {{"B", "1"}, {"T", "7"}, {"half", "32"}, {"axes", "1"}, {"most", "4096"}, {"idt", "i64", "i32|i64"}},
       [](Random& random, Line& line) {
         line.set("B", random.integer(1, 3));
         line.set("T", pick<std::int64_t>(random, {0, 1, 2, 17, 65}));
         line.set("half", draw_width(random, 64));
         line.set("axes", random.integer(0, 1));
         line.set("most", pick<std::int64_t>(random, {0, 100, 4096, 1 << 20}));
         line.set("idt", pick_text(random, {"i32", "i64"}));
       },
       mrope},
  };
}

}  // namespace tidegate::fuzz
