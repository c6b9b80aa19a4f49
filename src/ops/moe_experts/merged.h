// Low-rank additions for the reference: by definition, as weights W + scale b a.
#pragma once

#include <vector>

#include "base/element.h"
#include "tidegate/moe.h"

namespace tidegate::moe_experts {

// One weight [E,N,K] of the experts with its addition, and the gradients of all three from that of the sum.
template <class Acc>
class MergedWeight {
 public:
  MergedWeight(const TensorView& w, const TensorView& a, const TensorView& b, double scale, WeightAxes axes)
      : w_(w), a_(a), b_(b), scale_(static_cast<Acc>(scale)), nk_(axes == WeightAxes::kNK) {
    if (!present()) {
      return;
    }
    sums_ = make(values_);
    for_each([&](std::int64_t e, std::int64_t n, std::int64_t k) {
      Acc total = 0;
      for (std::int64_t r = 0; r < a_.sizes[1]; ++r) {
        total += read(b_, offset_of(b_, e, n, r)) * read(a_, offset_of(a_, e, r, k));
      }
      write_element(sums_, at(sums_, e, n, k), read(w_, at(w_, e, n, k)) + scale_ * total);
    });
  }
  TensorView weight() const { return present() ? sums_ : w_; }
  // What the gradient of the sum is written to, if any of the three is wanted.
  TensorView gradient(const TensorView& dw, const TensorView& da, const TensorView& db) {
    if (!present() || !(dw.defined() || da.defined() || db.defined())) {
      return dw;
    }
    return dsums_ = make(gradients_);
  }
  void finish(const TensorView& dw, const TensorView& da, const TensorView& db) const {
    if (!dsums_.defined()) {
      return;
    }
    std::vector<Acc> sums_a(static_cast<std::size_t>(a_.numel())), sums_b(static_cast<std::size_t>(b_.numel()));
    const std::int64_t ranks = a_.sizes[1];
    for_each([&](std::int64_t e, std::int64_t n, std::int64_t k) {
      const Acc d = read(dsums_, at(dsums_, e, n, k));
      if (dw.defined()) {
        write_element(dw, at(dw, e, n, k), d);
      }
      for (std::int64_t r = 0; r < ranks; ++r) {
        sums_a[static_cast<std::size_t>((e * ranks + r) * a_.sizes[2] + k)] +=
            scale_ * read(b_, offset_of(b_, e, n, r)) * d;
        sums_b[static_cast<std::size_t>((e * b_.sizes[1] + n) * ranks + r)] +=
            scale_ * read(a_, offset_of(a_, e, r, k)) * d;
      }
    });
    store(da, sums_a);
    store(db, sums_b);
  }

 private:
  bool present() const { return a_.defined(); }
  static Acc read(const TensorView& t, std::int64_t offset) { return static_cast<Acc>(read_element(t, offset)); }
  std::int64_t at(const TensorView& t, std::int64_t e, std::int64_t n, std::int64_t k) const {
    return nk_ ? offset_of(t, e, n, k) : offset_of(t, e, k, n);
  }
  TensorView make(std::vector<Acc>& values) const {
    values.assign(static_cast<std::size_t>(w_.numel()), 0);
    return contiguous(values.data(), sizeof(Acc) == 8 ? DType::kF64 : DType::kF32,
                      {w_.sizes[0], w_.sizes[1], w_.sizes[2]});
  }
  template <class F>
  void for_each(F f) const {
    for (std::int64_t e = 0; e < w_.sizes[0]; ++e) {
      for (std::int64_t n = 0; n < b_.sizes[1]; ++n) {
        for (std::int64_t k = 0; k < a_.sizes[2]; ++k) {
          f(e, n, k);
        }
      }
    }
  }
  static void store(const TensorView& t, const std::vector<Acc>& values) {
    for (std::int64_t i = 0; t.defined() && i < t.numel(); ++i) {
      const std::int64_t row = i / t.sizes[2];
      write_element(t, offset_of(t, row / t.sizes[1], row % t.sizes[1], i % t.sizes[2]),
                    values[static_cast<std::size_t>(i)]);
    }
  }
  TensorView w_, a_, b_;
  Acc scale_;
  bool nk_;
  std::vector<Acc> values_, gradients_;
  TensorView sums_, dsums_;
};

}  // namespace tidegate::moe_experts
