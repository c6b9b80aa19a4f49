#include "toolkit.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <numbers>
#include <set>
#include <sstream>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "base/element.h"
#include "tidegate/error.h"

namespace tidegate::test {
namespace {

std::mutex tensors_mutex;
std::set<const Tensor*>& tensors() {
  static std::set<const Tensor*> all;
  return all;
}

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

void write_any(const TensorView& t, std::int64_t offset, double value) {
  if (t.dtype == DType::kI64) {
    t.as<std::int64_t>()[offset] = static_cast<std::int64_t>(value);
  } else if (t.dtype == DType::kI32) {
    t.as<std::int32_t>()[offset] = static_cast<std::int32_t>(value);
  } else {
    write_element(t, offset, value);
  }
}

}  // namespace

double Random::uniform() {
  state_ += 0x9e3779b97f4a7c15u;
  std::uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
}
double Random::normal() {
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
  return radius * std::cos(2.0 * std::numbers::pi * uniform());
}
std::int64_t Random::integer(std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(uniform() * static_cast<double>(high - low + 1));
}

Form padded(std::int64_t gap) {
  Form form;
  form.gap = gap;
  return form;
}
Form reversed(std::int64_t gap) {
  Form form = padded(gap);
  form.reversed = true;
  return form;
}
Form permuted(std::vector<int> order, std::int64_t gap) {
  Form form = padded(gap);
  form.order = std::move(order);
  return form;
}
Form low(Form form) {
  form.low = true;
  return form;
}

Tensor::Tensor(DType dtype, const Sizes& sizes, const Form& form) : form_(form) {
  view_.dtype = dtype;
  view_.rank = static_cast<int>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), view_.sizes);
  std::vector<int> order = form.order;
  for (int d = 0; d < view_.rank && form.order.empty(); ++d) {
    order.push_back(d);
  }
  std::int64_t stride = 1;
  std::int64_t first = 0;  // element 0 lies behind what negative strides reach
  std::int64_t last = 0;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    const std::int64_t n = view_.sizes[*d];
    const std::int64_t reach = std::max<std::int64_t>(n - 1, 0) * stride;
    const bool backwards = form.reversed && d != order.rbegin();
    view_.strides[*d] = backwards ? -stride : stride;
    (backwards ? first : last) += reach;
    stride = stride * std::max<std::int64_t>(n, 1) + form.gap;
  }
  const auto element = static_cast<std::size_t>(dtype_bytes(dtype));
  byte_count_ = view_.numel() == 0 ? 0 : static_cast<std::size_t>(first + last + 1) * element;
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t inside = (byte_count_ + page - 1) / page * page;
  map_bytes_ = inside + 2 * page;
  void* map = mmap(nullptr, map_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) {
    throw std::bad_alloc();
  }
  map_ = static_cast<unsigned char*>(map);
  if (inside != 0 && mprotect(map_ + page, inside, PROT_READ | PROT_WRITE) != 0) {
    throw std::bad_alloc();
  }
  bytes_ = map_ + page + (form.low ? 0 : inside - byte_count_);
  std::memset(bytes_, 0xFF, byte_count_);
  view_.data = bytes_ + static_cast<std::size_t>(first) * element;
  const std::lock_guard lock(tensors_mutex);
  tensors().insert(this);
}

Tensor::Tensor(const Tensor& other) {
  if (other.defined()) {
    Tensor copy(other.view_.dtype, other.sizes(), other.form_);
    std::memcpy(copy.bytes_, other.bytes_, other.byte_count_);
    swap(copy);
  }
}

Tensor::~Tensor() {
  if (map_ != nullptr) {
    munmap(map_, map_bytes_);
    const std::lock_guard lock(tensors_mutex);
    tensors().erase(this);
  }
}

void Tensor::swap(Tensor& other) noexcept {
  const std::lock_guard lock(tensors_mutex);
  std::swap(view_, other.view_);
  std::swap(form_, other.form_);
  std::swap(map_, other.map_);
  std::swap(map_bytes_, other.map_bytes_);
  std::swap(bytes_, other.bytes_);
  std::swap(byte_count_, other.byte_count_);
  for (const Tensor* t : {this, &other}) {
    if (t->map_ != nullptr) {
      tensors().insert(t);
    } else {
      tensors().erase(t);
    }
  }
}

double Tensor::get(std::int64_t i) const { return read_element(view_, offset_at(view_, i)); }
Tensor& Tensor::set(std::int64_t i, double value) {
  write_any(view_, offset_at(view_, i), value);
  return *this;
}
Tensor& Tensor::fill(double value) {
  return fill([value](std::int64_t) { return value; });
}
Tensor& Tensor::fill(const std::function<double(std::int64_t)>& value) {
  for (std::int64_t i = 0; i < view_.numel(); ++i) {
    set(i, value(i));
  }
  return *this;
}

bool Tensor::gaps_untouched() const {
  const auto element = static_cast<std::size_t>(dtype_bytes(view_.dtype));
  std::vector<bool> owned(byte_count_ / element, false);
  const auto first =
      static_cast<std::int64_t>((view_.as<unsigned char>() - bytes_) / static_cast<std::ptrdiff_t>(element));
  for (std::int64_t i = 0; i < view_.numel(); ++i) {
    owned[static_cast<std::size_t>(first + offset_at(view_, i))] = true;
  }
  for (std::size_t b = 0; b < byte_count_; ++b) {
    if (!owned[b / element] && bytes_[b] != 0xFF) {
      return false;
    }
  }
  return true;
}

Tensor normal(Random& random, DType dtype, const Sizes& sizes, const Form& form, double scale) {
  Tensor t(dtype, sizes, form);
  return t.fill([&](std::int64_t) { return scale * random.normal(); });
}
Tensor uniform(Random& random, DType dtype, const Sizes& sizes, double from, double to, const Form& form) {
  Tensor t(dtype, sizes, form);
  return t.fill([&](std::int64_t) { return from + (to - from) * random.uniform(); });
}
Tensor converted(const Tensor& t, DType dtype) {
  if (!t.defined()) {
    return {};
  }
  Tensor out(dtype, t.sizes());
  return out.fill([&](std::int64_t i) { return t.get(i); });
}
Tensor copied(const TensorView& t) {
  Tensor out(t.dtype, Sizes(t.sizes, t.sizes + t.rank));
  return out.fill([&](std::int64_t i) { return read_element(t, offset_at(t, i)); });
}
Tensor like(const Tensor& t) { return t.defined() ? Tensor(t.view().dtype, t.sizes(), t.form()) : Tensor(); }
Tensor like(const Tensor& t, DType dtype, const Form& form) { return Tensor(dtype, t.sizes(), form); }

std::int64_t offset_at(const TensorView& t, std::int64_t i) {
  std::int64_t offset = 0;
  for (int d = t.rank - 1; d >= 0; --d) {
    offset += i % t.sizes[d] * t.strides[d];
    i /= t.sizes[d];
  }
  return offset;
}
std::vector<double> values(const TensorView& t) {
  std::vector<double> v;
  v.reserve(static_cast<std::size_t>(t.numel()));
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    v.push_back(read_element(t, offset_at(t, i)));
  }
  return v;
}
TensorView part(const TensorView& t, int dimension, std::int64_t begin, std::int64_t end) {
  TensorView out = t;
  out.data = t.as<char>() + begin * t.strides[dimension] * dtype_bytes(t.dtype);
  out.sizes[dimension] = end - begin;
  return out;
}
TensorView exchanged(const TensorView& t, int a, int b) {
  TensorView out = t;
  std::swap(out.sizes[a], out.sizes[b]);
  std::swap(out.strides[a], out.strides[b]);
  return out;
}

TensorView ranked(TensorView t, int rank) {
  t.rank = rank;
  return t;
}
TensorView typed(TensorView t, DType dtype) {
  t.dtype = dtype;
  return t;
}
TensorView sized(TensorView t, int dimension, std::int64_t size) {
  t.sizes[dimension] = size;
  return t;
}
TensorView strided(TensorView t, int dimension, std::int64_t stride) {
  t.strides[dimension] = stride;
  return t;
}

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

double rounding_of(DType dtype) {
  return dtype == DType::kBF16 ? 0x1p-8 : dtype == DType::kF16 ? 0x1p-11 : dtype == DType::kF32 ? 0x1p-24 : 0x1p-53;
}
double stored(DType dtype, double fp32_bound) {
  return dtype == DType::kBF16 ? 1.8e-3 : dtype == DType::kF16 ? 1.8e-3 / 8 : fp32_bound;
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

// FNV over the bytes of all tensors.
std::uint64_t checksum_of_all_tensors() {
  const std::lock_guard lock(tensors_mutex);
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const Tensor* t : tensors()) {
    for (std::size_t i = 0; i < t->byte_count_; ++i) {
      hash = (hash ^ t->bytes_[i]) * 0x100000001b3u;
    }
  }
  return hash;
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
