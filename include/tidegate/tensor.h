// TensorView: memory that somebody else owns, described by type, sizes and strides.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

namespace tidegate {

enum class DType : std::uint8_t { kF32, kBF16, kF16, kF64, kI32, kI64, kI8, kBool };

int dtype_bytes(DType dtype);
std::string_view dtype_name(DType dtype);  // "float32", "bfloat16", ...
inline bool is_float(DType d) { return d <= DType::kF64; }

// Where the heads and the tokens stand. Always said by the caller, never guessed: T == HV is a real case.
//   kBSND [B,T,H,D]   kTND [T,H,D]   token-major, what projections produce
//   kBNSD [B,H,T,D]   kNTD [H,T,D]   head-major, the rows of one head are contiguous
enum class Layout : std::uint8_t { kBSND, kTND, kBNSD, kNTD };
inline bool is_head_major(Layout l) { return l == Layout::kBNSD || l == Layout::kNTD; }
inline bool has_batch(Layout l) { return l == Layout::kBSND || l == Layout::kBNSD; }
Layout parse_layout(std::string_view op, std::string_view name);  // throws Error and lists the valid names

inline constexpr int kMaxRank = 8;

// Strides count elements and may be zero or negative; the innermost one must be 1 unless an operator says otherwise.
// A default-constructed view means "absent": that is how optional tensors are left out.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = -1;
  std::int64_t sizes[kMaxRank] = {};
  std::int64_t strides[kMaxRank] = {};

  bool defined() const { return rank >= 0; }
  std::int64_t size(int d) const { return sizes[d < 0 ? rank + d : d]; }
  std::int64_t stride(int d) const { return strides[d < 0 ? rank + d : d]; }
  std::int64_t numel() const;
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// A dense view: the last dimension is contiguous, each stride the product of the sizes after it.
TensorView contiguous(const void* data, DType dtype, std::initializer_list<std::int64_t> sizes);

// False only where the two provably share no byte: disjoint address ranges, or rows of the same pitch whose columns do
// not meet (slices of one buffer).
bool may_overlap(const TensorView& a, const TensorView& b);

}  // namespace tidegate
