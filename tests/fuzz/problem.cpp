#include "fuzz/problem.h"

#include <cmath>
#include <cstdio>
#include <cstring>

#include "base/element.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate::fuzz {
namespace {

std::vector<Tensor> tensors_of(const std::vector<Part>& parts) {
  std::vector<Tensor> tensors;
  for (const Part& p : parts) {
    tensors.push_back(p.tensor);
  }
  return tensors;
}

Tensor in_fp64(const Tensor& t) { return t.defined() && is_float(t.view().dtype) ? test::wide(t) : t; }

std::vector<Tensor> truth_of(const Problem& p) {
  std::vector<Tensor> in, out;
  for (const Part& part : p.in) {
    in.push_back(in_fp64(part.tensor));
  }
  for (const Part& part : p.out) {
    out.push_back(in_fp64(part.tensor));
  }
  (p.truth ? p.truth : p.call)(test::views_of(in), test::views_of(out), p.seq);
  return out;
}

std::string place(const TensorView& t, std::int64_t i) {
  std::string text;
  for (int d = t.rank - 1; d >= 0; --d) {
    text = std::to_string(i % t.sizes[d]) + (text.empty() ? "" : ",") + text;
    i /= t.sizes[d];
  }
  return "[" + text + "]";
}

bool same_element(const TensorView& a, const TensorView& b, std::int64_t i) {
  const int bytes = dtype_bytes(a.dtype);
  return std::memcmp(a.as<const char>() + test::offset_at(a, i) * bytes,
                     b.as<const char>() + test::offset_at(b, i) * bytes, static_cast<std::size_t>(bytes)) == 0;
}

std::string first_difference(const std::string& name, const TensorView& a, const TensorView& b) {
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    if (!same_element(a, b, i)) {
      return name + place(a, i) + ": " + std::to_string(read_element(a, test::offset_at(a, i))) + " and " +
             std::to_string(read_element(b, test::offset_at(b, i)));
    }
  }
  return "";
}

// Every element within its rounding plus 10 fp32 bounds of the scale, as the tests of the operators demand; NaN where
// and only where the truth is NaN (what is not written is NaN in both).
std::string far_off(const Part& part, const TensorView& got, const TensorView& truth) {
  double largest = part.scale;
  for (std::int64_t i = 0; i < truth.numel(); ++i) {
    const double t = std::abs(read_element(truth, test::offset_at(truth, i)));
    largest = t > largest ? t : largest;
  }
  const double step = got.dtype == DType::kF16 ? 0x1p-24 : 0.0;
  for (std::int64_t i = 0; i < truth.numel(); ++i) {
    const double g = read_element(got, test::offset_at(got, i)), t = read_element(truth, test::offset_at(truth, i));
    const double limit = test::rounding_of(got.dtype) * std::abs(t) * 1.01 + step + 10.0 * part.bound * largest;
    if (std::isnan(g) != std::isnan(t) || std::abs(g - t) > limit) {
      char text[200];
      std::snprintf(text, sizeof text, ": got %.9g, fp64 %.9g, off by %.3g, allowed %.3g", g, t, g - t, limit);
      return part.name + place(truth, i) + text;
    }
  }
  return "";
}

// The indices of a sequence along a part's dimension.
std::pair<std::int64_t, std::int64_t> range(const Problem& p, const Part& part, std::int64_t n) {
  if (part.span == Span::kStates || p.seq.rows() > 1) {
    return {n, n + 1};
  }
  if (part.span == Span::kTokens) {
    return {p.seq[n].begin, p.seq[n].end};
  }
  std::int64_t first = 0, last = 0;
  for (const Chunk& chunk : p.seq.chunks(p.chunk_size)) {
    first += chunk.sequence < n ? 1 : 0;
    last += chunk.sequence <= n ? 1 : 0;
  }
  return {first, last};
}
TensorView piece(const Problem& p, const Part& part, const Tensor& t, std::int64_t n) {
  const auto [begin, end] = range(p, part, n);
  const bool rows = part.span == Span::kStates || p.seq.rows() > 1;
  return test::part(t, rows ? 0 : part.dimension, begin, end);
}

// One sequence full of NaN leaves every bit of the others as it was.
std::string leak(const Problem& p, const std::vector<Tensor>& before) {
  std::int64_t sick = -1;
  for (std::int64_t n = 0; n < p.seq.count(); ++n) {
    sick = p.seq[n].length() > 0 && (sick < 0 || n % 2 == 0) ? n : sick;
  }
  if (sick < 0 || p.seq.count() < 2) {
    return "";
  }
  std::vector<Tensor> in = tensors_of(p.in), out = tensors_of(p.out);
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (p.in[i].span != Span::kWhole && in[i].defined() && is_float(in[i].view().dtype)) {
      const TensorView bad = piece(p, p.in[i], in[i], sick);
      for (std::int64_t e = 0; e < bad.numel(); ++e) {
        write_element(bad, test::offset_at(bad, e), std::nan(""));
      }
    }
  }
  p.call(test::views_of(in), test::views_of(out), p.seq);
  for (std::size_t i = 0; i < out.size(); ++i) {
    for (std::int64_t n = 0; n < p.seq.count() && p.out[i].span != Span::kWhole && out[i].defined(); ++n) {
      if (n != sick) {
        const std::string where =
            first_difference(p.out[i].name, piece(p, p.out[i], before[i], n), piece(p, p.out[i], out[i], n));
        if (!where.empty()) {
          return "sequence " + std::to_string(n) + " sees sequence " + std::to_string(sick) + ": " + where;
        }
      }
    }
  }
  return "";
}

}  // namespace

std::vector<Tensor> results(const Problem& p) {
  const std::vector<Tensor> in = tensors_of(p.in);
  std::vector<Tensor> out = tensors_of(p.out);
  p.call(test::views_of(in), test::views_of(out), p.seq);
  return out;
}

std::string different_bits(const Problem& p, const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    const std::string where = a[i].defined() ? first_difference(p.out[i].name, a[i], b[i]) : "";
    if (!where.empty()) {
      return where;
    }
  }
  return "";
}

std::string judge(const Line& line, const Problem& p, Tally& tally, std::int64_t repeats) {
  set_isa(line.text("isa"));
  set_num_threads(static_cast<int>(line.integer("thr", 1, 64)));
  const std::vector<Tensor> in = tensors_of(p.in);
  std::uint64_t before = 0;
  for (const Tensor& t : in) {
    before = t.checksum(before);
  }
  std::vector<Tensor> got = tensors_of(p.out);
  p.call(test::views_of(in), test::views_of(got), p.seq);
  std::uint64_t after = 0;
  for (const Tensor& t : in) {
    after = t.checksum(after);
  }
  if (after != before) {
    return "an input was written";
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i].defined() && !got[i].gaps_untouched()) {
      return p.out[i].name + ": memory between its elements was written";
    }
  }
  if (p.exact) {
    std::vector<Tensor> want = tensors_of(p.out);
    p.exact(test::views_of(in), test::views_of(want), p.seq);
    if (const std::string where = different_bits(p, got, want); !where.empty()) {
      return "not the bits of the definition: " + where;
    }
  } else {
    const std::vector<Tensor> truth = truth_of(p);
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (!got[i].defined()) {
        continue;
      }
      Part part = p.out[i];
      if (part.sum_of >= 0) {
        double squares = 0.0;
        for (const double x : test::values(truth[static_cast<std::size_t>(part.sum_of)])) {
          squares += x * x;
        }
        part.scale = std::max(part.scale, std::sqrt(squares));
      }
      if (const std::string where = far_off(part, got[i], truth[i]); !where.empty()) {
        return where;
      }
      tally.add(line, got[i], truth[i], p.out[i]);
    }
  }
  for (std::int64_t i = 0; i < repeats; ++i) {
    set_num_threads(repeats > 1 ? static_cast<int>(1 + i % 4) : line.is("thr", "1") ? 2 : 1);
    if (const std::string where = different_bits(p, got, results(p)); !where.empty()) {
      return "other bits with another number of threads: " + where;
    }
  }
  return leak(p, got);
}

double rounded_to(DType type, double value) {
  double bits = 0.0;
  const TensorView one = contiguous(&bits, type, {1});
  write_element(one, 0, value);
  return read_element(one, 0);
}

void Tally::add(const Line& line, const TensorView& got, const TensorView& truth, const Part& part) {
  Sums& s = sums_[line.driver() + " " + part.name + " " + std::string(dtype_name(got.dtype))];
  const double before = s.error;
  for (std::int64_t i = 0; i < truth.numel(); ++i) {
    const double g = read_element(got, test::offset_at(got, i)), t = read_element(truth, test::offset_at(truth, i));
    if (std::isfinite(t)) {
      const double rounded = rounded_to(got.dtype, t);
      s.error += (g - t) * (g - t);
      s.rounding += std::isfinite(rounded) ? (rounded - t) * (rounded - t) : 0.0;
      s.truth += t * t;
      ++s.elements;
    }
  }
  if (s.error - before > s.most) {
    s.most = s.error - before;
    s.worst = line.print();
  }
  s.type = got.dtype;
  s.bound = std::max(s.bound, part.rms > 0.0 ? part.rms : test::stored(got.dtype, part.bound));
}

bool Tally::print(const std::string& prefix) const {
  bool good = true;
  for (const auto& [name, s] : sums_) {
    const double norm = s.truth > 0.0 ? std::sqrt(s.truth) : 1.0;
    const double rms = std::sqrt(s.error) / norm, rounding = std::sqrt(s.rounding) / norm;
    const double usual = 0.425 * test::rounding_of(s.type);  // of mantissas that are evenly spread
    const double bound = s.bound + std::max(0.0, rounding - usual);
    // Some hundred elements have no rms error to speak of.
    const bool above = s.elements >= 10000 && rms > bound;
    std::printf("%s%-44s %10lld elements, rms error %.2e (rounding %.2e), bound %.2e%s\n", prefix.c_str(), name.c_str(),
                static_cast<long long>(s.elements), rms, rounding, bound, above ? "  ABOVE" : "");
    if (above) {
      std::printf("%s  most of it: %s\n", prefix.c_str(), s.worst.c_str());
    }
    good = good && !above;
  }
  return good;
}

}  // namespace tidegate::fuzz
