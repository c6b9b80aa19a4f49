#include "toolkit.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "base/element.h"
#include "tidegate/error.h"

namespace tidegate::test {
namespace {

std::uint64_t bits_at(const TensorView& t, std::int64_t i) {
  const int bytes = dtype_bytes(t.dtype);
  std::uint64_t bits = 0;
  std::memcpy(&bits, t.as<const char>() + offset_at(t, i) * bytes, static_cast<std::size_t>(bytes));
  return bits;
}

std::string index_text(const TensorView& t, std::int64_t i) {
  std::string text;
  for (int d = t.rank - 1; d >= 0; --d) {
    text = std::to_string(i % t.sizes[d]) + (text.empty() ? "" : ", ") + text;
    i /= t.sizes[d];
  }
  return "[" + text + "]";
}

}  // namespace

testing::AssertionResult same_bits(const TensorView& a, const TensorView& b) {
  if (a.rank != b.rank || a.dtype != b.dtype || !std::equal(a.sizes, a.sizes + std::max(a.rank, 0), b.sizes)) {
    return testing::AssertionFailure() << "tensors of different shape or type";
  }
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    if (bits_at(a, i) != bits_at(b, i)) {
      std::ostringstream text;
      text << "element " << index_text(a, i) << ": " << read_element(a, offset_at(a, i)) << " and "
           << read_element(b, offset_at(b, i)) << std::hex << ", bits " << bits_at(a, i) << " and " << bits_at(b, i);
      return testing::AssertionFailure() << text.str();
    }
  }
  return testing::AssertionSuccess();
}

void Accuracy::add(const TensorView& got, const TensorView& plain, const TensorView& truth, double fp32_bound,
                   double scale) {
  const std::vector<double> g = values(got);
  const std::vector<double> p = values(plain);
  const std::vector<double> t = values(truth);
  ASSERT_EQ(g.size(), t.size());
  ASSERT_EQ(p.size(), t.size());
  double largest = scale;
  for (std::size_t i = 0; i < t.size() && scale == 0.0; ++i) {
    largest = std::max(largest, std::abs(t[i]));
  }
  // The smallest step of fp16 is 2^-24; the other types are fine enough near zero.
  const double step = got.dtype == DType::kF16 ? 0x1p-24 : 0.0;
  for (std::size_t i = 0; i < t.size(); ++i) {
    const double error = std::abs(g[i] - t[i]);
    const double plain_error = std::abs(p[i] - t[i]);
    truth_ += t[i] * t[i];
    got_.error += error * error;
    got_.max = std::max(got_.max, error);
    plain_.error += plain_error * plain_error;
    plain_.max = std::max(plain_.max, plain_error);
    const double limit = rounding_of(got.dtype) * std::abs(t[i]) * 1.01 + step + 10.0 * fp32_bound * largest;
    ASSERT_LE(error, limit) << index_text(truth, static_cast<std::int64_t>(i)) << ": got " << g[i] << ", fp64 " << t[i];
  }
}

void Accuracy::expect(const std::string& name, double bound) const {
  const double scale = truth_ > 0.0 ? 1.0 / std::sqrt(truth_) : 1.0;
  const double rms = std::sqrt(got_.error) * scale;
  const double plain_rms = std::sqrt(plain_.error) * scale;
  std::ostringstream text;
  text << rms << " (bound " << bound << ", plain " << plain_rms << "), max " << got_.max << " (plain " << plain_.max
       << ")";
  testing::Test::RecordProperty(name, text.str());
  EXPECT_LE(rms, bound) << name;
  EXPECT_LE(rms, 2.0 * plain_rms) << name << ": the plain loops are more accurate";
  EXPECT_LE(got_.max, 2.0 * plain_.max) << name << ": the plain loops are more accurate";
}

constexpr std::int64_t kSlide = 8;  // elements from one row to the next
Tensor sliding_source(Random& random, DType dtype, std::int64_t rows, std::int64_t width) {
  return normal(random, dtype, {kSlide * rows + width});
}
TensorView sliding(const Tensor& source, std::int64_t rows, std::int64_t width) {
  return strided(contiguous(source.view().data, source.view().dtype, {rows, width}), 0, kSlide);
}
void expect_streamed_bits(DType dtype, std::int64_t rows, std::int64_t width,
                          const std::function<void(TensorView)>& f) {
  const std::int64_t bytes = rows * width * dtype_bytes(dtype);
  ASSERT_GT(bytes, 16 << 20);
  const Tensor aligned(dtype, {rows, width});
  const Tensor room(dtype, {rows * width + 1}, low());
  ASSERT_EQ(reinterpret_cast<std::uintptr_t>(aligned.view().data) % 64, 0u);
  const TensorView odd = contiguous(room.view().as<char>() + dtype_bytes(dtype), dtype, {rows, width});
  f(aligned);
  f(odd);
  EXPECT_EQ(std::memcmp(aligned.view().data, odd.data, static_cast<std::size_t>(bytes)), 0);
}

void expect_error(const std::function<void()>& f, std::string_view message) {
  const std::uint64_t before = checksum_of_all_tensors();
  std::string got = "no error";
  try {
    f();
  } catch (const Error& e) {
    got = e.what();
  }
  EXPECT_EQ(got, message);
  EXPECT_EQ(checksum_of_all_tensors(), before) << "memory was written before the error: " << message;
}

void expect_gradient(Tensor& input, const Tensor& gradient, const std::function<double()>& loss) {
  constexpr double h = 1e-5;
  for (std::int64_t i = 0; i < input.view().numel(); ++i) {
    const double x = input.get(i);
    input.set(i, x + h);
    const double above = loss();
    input.set(i, x - h);
    const double below = loss();
    input.set(i, x);
    ASSERT_NEAR((above - below) / (2 * h), gradient.get(i), 1e-7) << index_text(input, i);
  }
}
double dot(const Tensor& a, const Tensor& b) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < a.view().numel(); ++i) {
    sum += a.get(i) * b.get(i);
  }
  return sum;
}

void for_each_isa(const std::function<void()>& f) {
  const Isa before = active_isa();
  for (const Isa isa : available_isas()) {
    SCOPED_TRACE(std::string(isa_name(isa)));
    set_isa(isa);
    f();
  }
  set_isa(before);
}

void for_each_thread_count(const std::function<void()>& f) {
  const int before = num_threads();
  for (const int threads : {1, 2, 3, 8}) {
    SCOPED_TRACE(std::to_string(threads) + " threads");
    set_num_threads(threads);
    f();
  }
  set_num_threads(before);
}

void on_eight_callers(const std::function<void(int)>& f) {
  std::vector<std::thread> callers;
  for (int i = 0; i < 8; ++i) {
    callers.emplace_back(f, i);
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
}

#if defined(__x86_64__)
constexpr unsigned kFlushBits = 0x8040;  // FTZ and DAZ
FlushDenormals::FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushBits); }
FlushDenormals::~FlushDenormals() { _mm_setcsr(saved_); }
bool FlushDenormals::still_set() const { return (_mm_getcsr() & kFlushBits) == kFlushBits; }
#else
FlushDenormals::FlushDenormals() = default;
FlushDenormals::~FlushDenormals() = default;
bool FlushDenormals::still_set() const { return true; }
#endif

}  // namespace tidegate::test
