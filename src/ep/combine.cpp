// Combine: expert ranks leave their results in their windows, the owner of a token reads its rows and adds them up.
#include <algorithm>
#include <cstring>

#include "base/arena.h"
#include "base/expert_ids.h"
#include "base/float_environment.h"
#include "base/row_checks.h"
#include "ep/group.h"
#include "ep/kernel.h"
#include "ep/rows.h"
#include "tidegate/cpu.h"

namespace tidegate::ep {
namespace {

constexpr std::string_view kOp = "ep_combine";

void check_results(std::string_view op, const Group& g, const TensorView& y, const Handle& h) {
  check_rank(op, {"y", y}, 2);
  check_data_type(op, {"y", y});
  check_inner_stride(op, {"y", y});
  check_shape(op, {"y", y}, {h.shape_rows, y.sizes[1]});
  check_row_bytes(op, g.config, {"y", y});
}

void check_like_tokens(Named t, const TensorView& y, std::int64_t rows) {
  check_shape(kOp, t, {rows, y.sizes[1]});
  check_same_dtype(kOp, t, {"y", y});
  check_inner_stride(kOp, t);
}

bool has_ids_from(const Handle& h, std::int64_t first) {
  return std::any_of(h.ids.begin(), h.ids.end(), [&](std::int32_t id) { return id >= first; });
}

void check_special(const Group& g, const TensorView& y, const Handle& h, const CombineOptions& o) {
  const Config& c = g.config;
  if (!o.weighted) {
    check(!o.ori_x.defined(), kOp, ": ori_x: expected none in a plain sum, got a tensor");
    return;
  }
  const std::int64_t first_copy = c.experts + c.zero_experts;
  if (has_ids_from(h, first_copy)) {
    check_like_tokens({"ori_x", o.ori_x}, y, h.tokens);
  }
  if (has_ids_from(h, first_copy + c.copy_experts)) {
    check_like_tokens({"v", o.v}, y, c.const_experts);
    for (const Named& t : {Named{"alpha1", o.alpha1}, Named{"alpha2", o.alpha2}}) {
      check_shape(kOp, t, {c.const_experts});
      check_float(kOp, t);
    }
  }
}

const char* result_row(const Group& g, std::int32_t rank, std::int32_t place, std::int64_t row_bytes) {
  return g.current(rank) + g.layout.rows + place * row_pitch(row_bytes);
}

// The rows that make up a token, with their weights, in the order in which they are added.
class TokenRows {
 public:
  TokenRows(const Group& g, const Handle& h, const CombineOptions& o, const float* weights, std::int64_t row_bytes,
            Scratch& scratch)
      : g_(g), h_(h), o_(o), weights_(weights), row_bytes_(row_bytes) {
    const std::int64_t most = 2 * h.slots + 1;  // a const expert has two rows; shared_x
    rows_ = take<const void*>(scratch, most);
    factors_ = scratch.floats(most);
    order_ = take<std::int64_t>(scratch, h.slots);
  }
  void find(std::int64_t t) {
    count_ = 0;
    slots_by_expert(h_.ids.data() + t * h_.slots, h_.slots, order_);
    for (std::int64_t s = 0; s < h_.slots; ++s) {
      const std::int64_t p = t * h_.slots + order_[s];
      const auto i = static_cast<std::size_t>(p);
      const float w = weights_ != nullptr ? weights_[p] : 1.0f;
      if (h_.rank[i] >= 0) {
        add(result_row(g_, h_.rank[i], h_.place[i], row_bytes_), w);
      } else if (o_.weighted && h_.ids[i] >= g_.config.experts) {
        add_special(t, h_.ids[i] - g_.config.experts - g_.config.zero_experts, w);
      }
    }
    if (o_.shared_x.defined()) {
      add(row_at(o_.shared_x, t), 1.0f);
    }
  }
  const void* const* rows() const { return rows_; }
  const float* factors() const { return factors_; }
  std::int64_t count() const { return count_; }

 private:
  void add(const void* row, float factor) {
    rows_[count_] = row;
    factors_[count_++] = factor;
  }
  void add_special(std::int64_t t, std::int64_t number, float w) {
    if (number < 0) {
      return;  // a zero expert
    }
    const std::int64_t constant = number - g_.config.copy_experts;
    if (constant < 0) {
      add(row_at(o_.ori_x, t), w);
      return;
    }
    const auto alpha = [&](const TensorView& a) {
      return static_cast<float>(read_element(a, constant * a.strides[0]));
    };
    add(row_at(o_.ori_x, t), w * alpha(o_.alpha1));
    add(row_at(o_.v, constant), w * alpha(o_.alpha2));
  }

  const Group& g_;
  const Handle& h_;
  const CombineOptions& o_;
  const float* weights_;
  std::int64_t row_bytes_;
  const void** rows_;
  float* factors_;
  std::int64_t* order_;
  std::int64_t count_ = 0;
};

void sum_fp64(const TokenRows& r, void* out, std::int64_t width) {
  for (std::int64_t c = 0; c < width; ++c) {
    double total = 0.0;
    for (std::int64_t i = 0; i < r.count(); ++i) {
      total += static_cast<double>(r.factors()[i]) * static_cast<const double*>(r.rows()[i])[c];
    }
    static_cast<double*>(out)[c] = total;
  }
}

void sum_tokens(const Group& g, const Handle& h, const TensorView& out, const float* weights, const CombineOptions& o) {
  const std::int64_t row_bytes = out.sizes[1] * dtype_bytes(out.dtype);
  const Kernels& kernels = ep_kernels_for(active_isa());
  for_row_tasks(h.tokens, out.sizes[1], [&](std::int64_t first, std::int64_t last, std::int64_t) {
    Scratch scratch;
    TokenRows rows(g, h, o, weights, row_bytes, scratch);
    for (std::int64_t t = first; t < last; ++t) {
      rows.find(t);
      if (out.dtype == DType::kF64) {
        sum_fp64(rows, row_at(out, t), out.sizes[1]);
      } else {
        kernels.sum[data_type_index(out.dtype)](
            {rows.rows(), rows.factors(), rows.count(), row_at(out, t), out.sizes[1]});
      }
    }
  });
}

void fetch_values(const Group& g, const Handle& h, const TensorView& out) {
  for (std::int64_t p = 0; p < h.tokens * h.slots; ++p) {
    const auto i = static_cast<std::size_t>(p);
    out.as<float>()[offset_of(out, p / h.slots, p % h.slots)] =
        h.rank[i] < 0 ? 0.0f : reinterpret_cast<const float*>(g.current(h.rank[i]) + g.layout.values)[h.place[i]];
  }
}

Terms terms_of(Op op, const TensorView& y, const Handle& h, bool values) {
  Terms t;
  t.field[0] = static_cast<std::uint64_t>(op);
  if (y.defined()) {
    t.field[1] = static_cast<std::uint64_t>(y.sizes[1] * dtype_bytes(y.dtype));
    t.field[3] = static_cast<std::uint64_t>(y.dtype);
  }
  t.field[6] = values ? 1 : 0;
  t.field[7] = h.signature;
  return t;
}

}  // namespace

void Buffer::combine(const TensorView& y, const Handle& h, const TensorView& out, const CombineOptions& o) {
  const FloatEnvironment environment;
  Group& g = *group_;
  g.operation(kOp, [&] {
    check_handle(kOp, g, h);
    check(y.defined() == out.defined(), kOp, ": out: expected ", y.defined() ? "a tensor" : "none", " (as y), got ",
          out.defined() ? "a tensor" : "none");
    check(o.row_values.defined() == o.pair_values.defined(), kOp, ": pair_values: expected ",
          o.row_values.defined() ? "a tensor" : "none", " (as row_values), got ",
          o.pair_values.defined() ? "a tensor" : "none");
    if (y.defined()) {
      check_results(kOp, g, y, h);
      check_like_tokens({"out", out}, y, h.tokens);
      if (o.shared_x.defined()) {
        check_like_tokens({"shared_x", o.shared_x}, y, h.tokens);
      }
      check_special(g, y, h, o);
    }
    if (o.row_values.defined()) {
      check_shape(kOp, {"row_values", o.row_values}, {h.shape_rows});
      check_dtype(kOp, {"row_values", o.row_values}, DType::kF32);
      check_shape(kOp, {"pair_values", o.pair_values}, {h.tokens, h.slots});
      check_dtype(kOp, {"pair_values", o.pair_values}, DType::kF32);
    }
    check_outputs(kOp, {{"out", out}, {"pair_values", o.pair_values}},
                  {{"y", y},
                   {"weights", o.weights},
                   {"shared_x", o.shared_x},
                   {"row_values", o.row_values},
                   {"ori_x", o.ori_x},
                   {"v", o.v}});
    check(o.weighted || !o.weights.defined(), kOp, ": weights: expected none in a plain sum, got a tensor");
    std::vector<float> given;
    read_weights(kOp, {"weights", o.weights}, h.tokens, h.slots, given);
    const float* weights = !o.weighted           ? nullptr
                           : o.weights.defined() ? given.data()
                           : h.weights.empty()   ? nullptr
                                                 : h.weights.data();

    char* slot = g.next_slot();
    if (y.defined()) {
      copy_rows(first_rows(y, h.rows), window_view(g, slot, h.rows, y.sizes[1], y.dtype));
    }
    for (std::int64_t j = 0; o.row_values.defined() && j < h.rows; ++j) {
      reinterpret_cast<float*>(slot + g.layout.values)[j] = o.row_values.as<const float>()[j * o.row_values.strides[0]];
    }
    g.signature = 0;
    Terms terms = terms_of(Op::kCombine, y, h, o.row_values.defined());
    terms.field[5] = o.needs_backward ? 1 : 0;
    g.exchange(kOp, Op::kCombine, terms, h.tokens);
    if (y.defined()) {
      sum_tokens(g, h, out, weights, o);
    }
    if (o.pair_values.defined()) {
      fetch_values(g, h, o.pair_values);
    }
  });
}

void Buffer::collect(const TensorView& y, const Handle& h, const TensorView& out) {
  constexpr std::string_view op = "ep_collect";
  Group& g = *group_;
  g.operation(op, [&] {
    check_handle(op, g, h);
    check_results(op, g, y, h);
    check_shape(op, {"out", out}, {h.tokens * h.slots, y.sizes[1]});
    check_same_dtype(op, {"out", out}, {"y", y});
    check_inner_stride(op, {"out", out});
    check_outputs(op, {{"out", out}}, {{"y", y}});
    copy_rows(first_rows(y, h.rows), window_view(g, g.next_slot(), h.rows, y.sizes[1], y.dtype));
    g.signature = 0;
    g.exchange(op, Op::kCollect, terms_of(Op::kCollect, y, h, false), h.tokens);
    const std::int64_t bytes = y.sizes[1] * dtype_bytes(y.dtype);
    for_row_tasks(h.tokens * h.slots, y.sizes[1], [&](std::int64_t first, std::int64_t last, std::int64_t) {
      for (std::int64_t p = first; p < last; ++p) {
        const auto i = static_cast<std::size_t>(p);
        if (h.rank[i] < 0) {
          std::memset(row_at(out, p), 0, static_cast<std::size_t>(bytes));
        } else {
          std::memcpy(row_at(out, p), result_row(g, h.rank[i], h.place[i], bytes), static_cast<std::size_t>(bytes));
        }
      }
    });
  });
}

}  // namespace tidegate::ep
