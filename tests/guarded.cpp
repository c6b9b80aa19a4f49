// The tensors of guarded.h; toolkit.cpp has what is expected of them.
#include "guarded.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <numbers>
#include <set>

#include "base/element.h"

namespace tidegate::test {
namespace {

std::mutex tensors_mutex;
std::set<const Tensor*>& tensors() {
  static std::set<const Tensor*> all;
  return all;
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

double rounding_of(DType dtype) {
  return dtype == DType::kBF16 ? 0x1p-8 : dtype == DType::kF16 ? 0x1p-11 : dtype == DType::kF32 ? 0x1p-24 : 0x1p-53;
}
double stored(DType dtype, double fp32_bound) {
  return dtype == DType::kBF16 ? 1.8e-3 : dtype == DType::kF16 ? 1.8e-3 / 8 : fp32_bound;
}

std::uint64_t Tensor::checksum(std::uint64_t hash) const {
  for (std::size_t i = 0; i < byte_count_; ++i) {
    hash = (hash ^ bytes_[i]) * 0x100000001b3u;
  }
  return hash;
}

std::uint64_t checksum_of_all_tensors() {
  const std::lock_guard lock(tensors_mutex);
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const Tensor* t : tensors()) {
    hash = t->checksum(hash);
  }
  return hash;
}

}  // namespace tidegate::test
