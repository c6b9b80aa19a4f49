// A rotation problem of the tests: the numbers that describe it, its tensors, and the calls on them.
#pragma once

#include "ops/partial_rope/reference.h"
#include "tidegate/rope.h"
#include "toolkit.h"

namespace tidegate::test {

struct RopeCase {
  std::int64_t B = 2, T = 5, H = 3, D = 8, R = 8;
  DType dtype = DType::kF32;
  DType table_type = DType::kF32;
  Layout layout = Layout::kBNSD;
  Rounding rounding = Rounding::kFp32;
  bool batch_tables = true;  // [B,T,R], else [T,R]
  Form form = {};

  Sizes sizes() const {
    Sizes s = is_head_major(layout) ? Sizes{H, T, D} : Sizes{T, H, D};
    s.insert(s.begin(), has_batch(layout) ? 1 : 0, B);
    return s;
  }
  Sizes table_sizes() const { return batch_tables && has_batch(layout) ? Sizes{B, T, R} : Sizes{T, R}; }
  PartialRopeOptions options() const { return {layout, rounding}; }
};

struct Rope {
  RopeCase c;
  Tensor x, cos, sin;  // x: the input of either direction

  // Head h of token t in row b, channel i.
  std::int64_t at(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t i) const {
    const std::int64_t inner = is_head_major(c.layout) ? h * c.T + t : t * c.H + h;
    return (b * c.T * c.H + inner) * c.D + i;
  }
  std::int64_t table_at(std::int64_t b, std::int64_t t, std::int64_t i) const {
    return ((cos.view().rank == 3 ? b * c.T : 0) + t) * c.R + i;
  }
  std::int64_t rows() const { return has_batch(c.layout) ? c.B : 1; }
};

// All four factors of a pair are different numbers, so that a wrong index shows.
inline Rope make_rope(Random& random, const RopeCase& c) {
  return {c, normal(random, c.dtype, c.sizes(), c.form), uniform(random, c.table_type, c.table_sizes(), -1.0, 1.0),
          uniform(random, c.table_type, c.table_sizes(), -1.0, 1.0)};
}
inline Rope wide(const Rope& v) {
  Rope w{v.c, wide(v.x), wide(v.cos), wide(v.sin)};
  w.c.form = {};
  w.c.dtype = w.c.table_type = DType::kF64;
  return w;
}

inline Tensor forward(const Rope& v) {
  Tensor y = like(v.x);
  partial_rope_fwd(v.x, v.cos, v.sin, y, v.c.options());
  return y;
}
inline Tensor backward(const Rope& v) {
  Tensor dx = like(v.x);
  partial_rope_bwd(v.x, v.cos, v.sin, dx, v.c.options());
  return dx;
}
// Plain loops in fp32 on the same types.
inline Tensor plain(const Rope& v, bool transpose) {
  Tensor y = like(v.x);
  partial_rope::reference<float>(v.x, v.cos, v.sin, y, v.c.layout, transpose);
  return y;
}

}  // namespace tidegate::test
