// Between nodes: the way back.
#include <cstring>

#include "base/checks.h"
#include "ep/agreement.h"
#include "ep/nodes.h"
#include "ep/rows.h"
#include "tidegate/ep_nodes.h"
#include "tidegate/moe.h"

namespace tidegate::ep {
namespace {

void check_combine(const Config& config, int ranks, const TensorView& y, const NodesHandle& h, const TensorView& out) {
  constexpr std::string_view op = "ep_combine";
  check(h.inner != nullptr && h.sent.size() == index(ranks), op, ": handle: expected one of this buffer, got one of ",
        h.sent.size(), " ranks");
  check_rank(op, {"y", y}, 2);
  check_data_type(op, {"y", y});
  check_inner_stride(op, {"y", y});
  check_shape(op, {"y", y}, {h.inner->shape_rows, y.sizes[1]});
  check_row_bytes(op, config, {"y", y});
  check_shape(op, {"out", out}, {h.tokens, y.sizes[1]});
  check_same_dtype(op, {"out", out}, {"y", y});
  check_inner_stride(op, {"out", out});
}

}  // namespace

void NodesBuffer::combine(const TensorView& y, const NodesHandle& h, const TensorView& out) {
  announced(wire_, [&] { check_combine(config_, wire_.size(), y, h, out); });
  const std::int64_t K = h.slots;
  const std::int64_t row_bytes = y.sizes[1] * dtype_bytes(y.dtype);
  Terms terms = terms_of(Op::kCombine, row_bytes, y.dtype);
  terms.field[7] = h.number;
  agree("ep_combine", config_.name, wire_, terms, std::vector<std::int64_t>(h.sent.size(), 0));
  const std::int64_t came = total_of(h.received);
  const auto ranks = static_cast<std::int64_t>(h.sent.size());
  // Rows that go back to each rank, those that return, and where each stands for my tokens.
  std::vector<std::int64_t> back(h.received), home = counts_of(h.sent);
  const std::int64_t columns = sums_ == NodeSums::kExact ? K : ranks;
  std::vector<std::int32_t> pos(index(h.tokens * columns), -1);
  std::vector<char> rows;
  std::int32_t next = 0;
  if (sums_ == NodeSums::kFast) {
    rows.resize(index(came * row_bytes));
    local_->combine(y, *h.inner, contiguous(rows.data(), y.dtype, {came, y.sizes[1]}));
    for (std::int64_t r = 0; r < ranks; ++r) {
      for (const std::int32_t t : h.sent[index(r)]) {
        pos[index(t * ranks + r)] = next++;
      }
    }
  } else {
    rows.resize(index(came * K * row_bytes));
    local_->collect(y, *h.inner, contiguous(rows.data(), y.dtype, {came * K, y.sizes[1]}));
    std::int64_t kept = 0;
    std::int64_t t = 0;
    for (std::int64_t r = 0; r < ranks; ++r) {  // only pairs of experts of this node
      const std::int64_t before = kept;
      for (const std::int64_t end = t + h.received[index(r)]; t < end; ++t) {
        for (std::int64_t p = t * K; p < (t + 1) * K; ++p) {
          if (h.numbers[index(p)] >= 0) {
            std::memmove(rows.data() + kept++ * row_bytes, rows.data() + p * row_bytes, index(row_bytes));
          }
        }
      }
      back[index(r)] = kept - before;
    }
    rows.resize(index(kept * row_bytes));
    for (std::int64_t r = 0; r < ranks; ++r) {
      home[index(r)] = 0;
      for (const std::int32_t token : h.sent[index(r)]) {
        for (std::int64_t p = token * K; p < (token + 1) * K; ++p) {
          if (h.pair_rank[index(p)] == r) {
            pos[index(p)] = next++;
            ++home[index(r)];
          }
        }
      }
    }
  }
  const std::vector<char> returned = exchange(rows, back, home, row_bytes);
  std::vector<float> weights;
  if (sums_ == NodeSums::kExact) {  // in the order of experts
    const std::vector<std::int32_t> by_slot = pos;
    weights = h.weights;
    for (std::int64_t p = 0; p < h.tokens * K; ++p) {
      const std::int64_t slot = p / K * K + h.order[index(p)];
      pos[index(p)] = by_slot[index(slot)];
      if (!weights.empty()) {
        weights[index(p)] = h.weights[index(slot)];
      }
    }
  }
  moe_unpermute_fwd(contiguous(returned.data(), y.dtype, {next, y.sizes[1]}),
                    contiguous(pos.data(), DType::kI32, {h.tokens, columns}),
                    weights.empty() ? TensorView{} : contiguous(weights.data(), DType::kF32, {h.tokens, K}), out);
}

}  // namespace tidegate::ep
