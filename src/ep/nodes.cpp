// Between nodes: who is where, and the way to the experts.
#include "ep/nodes.h"

#include <algorithm>
#include <cstring>

#include "base/checks.h"
#include "base/expert_ids.h"
#include "ep/agreement.h"
#include "ep/plan.h"
#include "ep/rows.h"
#include "tidegate/ep_nodes.h"
#include "tidegate/quant.h"

namespace tidegate::ep {

NodesBuffer::NodesBuffer(const Config& config, Wire& wire, NodeSums sums) : wire_(wire), sums_(sums), config_(config) {
  constexpr std::string_view op = "ep_nodes";
  const int rank = wire.rank();
  const int ranks = wire.size();
  try {
    check_config(config, rank, ranks);
    check(config.zero_experts + config.copy_experts + config.const_experts == 0, op,
          ": special experts: expected none between nodes, got some");
  } catch (const std::exception& e) {
    gather_nodes(wire, {}, sums, e.what());
    throw;
  }
  const std::vector<std::string> names = gather_nodes(wire, config, sums, {});
  std::vector<std::string> nodes;  // in the order of their first ranks
  std::vector<std::vector<int>> members;
  for (int r = 0; r < ranks; ++r) {
    const auto n = static_cast<std::size_t>(std::find(nodes.begin(), nodes.end(), names[index(r)]) - nodes.begin());
    if (n == nodes.size()) {
      nodes.push_back(names[index(r)]);
      members.emplace_back();
    }
    members[n].push_back(r);
  }
  expert_begin_ = expert_shares(config, ranks);
  expert_node_.resize(index(config.experts));
  expert_number_.resize(index(config.experts));
  Config local = config;
  int my_index = 0;
  std::size_t my_node = 0;
  for (std::size_t n = 0; n < members.size(); ++n) {
    std::vector<std::int64_t> begin(1, 0);
    for (const int r : members[n]) {
      for (std::int64_t e = expert_begin_[index(r)]; e < expert_begin_[index(r) + 1]; ++e) {
        expert_node_[index(e)] = static_cast<std::int32_t>(n);
        expert_number_[index(e)] = static_cast<std::int32_t>(begin.back() + e - expert_begin_[index(r)]);
      }
      begin.push_back(begin.back() + expert_begin_[index(r) + 1] - expert_begin_[index(r)]);
    }
    if (names[index(rank)] == nodes[n]) {
      my_node = n;
      node_ = static_cast<std::int32_t>(n);
      my_index = static_cast<int>(std::find(members[n].begin(), members[n].end(), rank) - members[n].begin());
      local.experts = std::max<std::int64_t>(begin.back(), 1);
      local.expert_begin = begin.back() > 0 ? begin : std::vector<std::int64_t>{};
    }
  }
  // My tokens for a node go to its ranks in turn, beginning with that of my index: more connections fill a link better.
  // Those for my node stay here.
  std::size_t most = 1;  // ranks of a node
  for (auto list : members) {
    most = std::max(most, list.size());
    std::rotate(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(index(my_index) % list.size()), list.end());
    partners_.push_back(std::move(list));
  }
  partners_[my_node] = {rank};
  const auto here_count = static_cast<std::int64_t>(members[my_node].size());
  local.max_tokens =
      (config.max_tokens + here_count - 1) / here_count * static_cast<std::int64_t>(most * members.size());
  local_ = std::make_unique<Buffer>(local, my_index, static_cast<int>(members[my_node].size()));
  const std::vector<std::string> addresses = wire.all_gather(local_->address());
  std::vector<std::string> here;
  for (const int r : members[my_node]) {
    here.push_back(addresses[index(r)]);
  }
  local_->connect(here);
}

std::int64_t NodesBuffer::first_expert() const { return expert_begin_[index(wire_.rank())]; }
std::int64_t NodesBuffer::local_experts() const { return expert_begin_[index(wire_.rank()) + 1] - first_expert(); }

std::vector<char> NodesBuffer::exchange(const std::vector<char>& send, const std::vector<std::int64_t>& sent,
                                        const std::vector<std::int64_t>& received, std::int64_t item_bytes) {
  const auto bytes = [&](std::vector<std::int64_t> counts) {
    std::transform(counts.begin(), counts.end(), counts.begin(), [&](std::int64_t n) { return n * item_bytes; });
    return counts;
  };
  std::vector<char> came(index(total_of(received) * item_bytes));
  wire_.all_to_all(send.data(), bytes(sent), came.data(), bytes(received));
  return came;
}

// The tokens of a rank, ready for the wire, one after the other for every rank.
struct NodesBuffer::Parcel {
  std::shared_ptr<NodesHandle> handle;
  std::vector<char> meta;  // of every token its experts there, their weights and its scale
  std::vector<char> rows;
  std::int64_t meta_bytes, row_bytes;
  DType dtype;
};

NodesBuffer::Parcel NodesBuffer::pack(const TensorView& x, const TensorView& ids, const TensorView& weights, bool int8,
                                      const TensorView& smooth_scale) const {
  constexpr std::string_view op = "ep_dispatch";
  check_rank(op, {"x", x}, 2);
  if (int8) {
    check_kernel_type(op, {"x", x});
  } else {
    check_data_type(op, {"x", x});
  }
  check_inner_stride(op, {"x", x});
  check_row_bytes(op, config_, {"x", x});
  check(x.sizes[0] <= config_.max_tokens, op, ": x: expected at most ", config_.max_tokens,
        " tokens (max_tokens of the buffer), got ", x.sizes[0]);
  check_rank(op, {"ids", ids}, 2);
  check_shape(op, {"ids", ids}, {x.sizes[0], ids.sizes[1]});
  check(ids.sizes[1] >= 1 && ids.sizes[1] <= config_.slots, op, ": ids: expected 1 to ", config_.slots,
        " slots (slots of the buffer), got ", ids.sizes[1]);
  if (smooth_scale.defined()) {
    check(int8, op, ": smooth_scale: expected none without int8, got a tensor");
    check_smooth_scale(op, config_, smooth_scale, x.sizes[1]);
  }
  auto h = std::make_shared<NodesHandle>();
  h->tokens = x.sizes[0];
  h->slots = ids.sizes[1];
  const std::int64_t K = h->slots;
  read_weights(op, {"weights", weights}, h->tokens, K, h->weights);
  Scratch scratch;
  const std::int32_t* list = read_expert_ids(op, {"ids", ids}, config_.experts, ExpertIds::kPlain, scratch);

  h->sent.resize(index(wire_.size()));
  h->pair_rank.assign(index(h->tokens * K), -1);
  h->order.resize(index(h->tokens * K));
  for (std::int64_t t = 0; t < h->tokens; ++t) {
    slots_by_expert(list + t * K, K, h->order.data() + t * K);
    for (std::int64_t p = t * K; p < (t + 1) * K; ++p) {
      if (list[p] >= 0) {
        const std::vector<int>& there = partners_[index(expert_node_[index(list[p])])];
        const int r = there[index(t) % there.size()];
        h->pair_rank[index(p)] = r;
        auto& tokens = h->sent[index(r)];
        if (tokens.empty() || tokens.back() != t) {
          tokens.push_back(static_cast<std::int32_t>(t));
        }
      }
    }
  }
  TensorView tokens = x;
  std::vector<std::int8_t> quantised;
  std::vector<float> scales(index(h->tokens), 1.0f);
  if (int8 && !smooth_scale.defined()) {
    quantised.resize(index(x.numel()));
    tokens = contiguous(quantised.data(), DType::kI8, {h->tokens, x.sizes[1]});
    quantize(x, tokens, contiguous(scales.data(), DType::kF32, {h->tokens}));
  }
  Parcel parcel{h, {}, {}, 8 * K + 4, x.sizes[1] * dtype_bytes(tokens.dtype), tokens.dtype};
  const std::int64_t count = total_of(counts_of(h->sent));
  parcel.meta.resize(index(count * parcel.meta_bytes));
  parcel.rows.resize(index(count * parcel.row_bytes));
  std::int64_t i = 0;
  for (int r = 0; r < wire_.size(); ++r) {
    for (const std::int32_t t : h->sent[index(r)]) {
      auto* number = reinterpret_cast<std::int32_t*>(parcel.meta.data() + i * parcel.meta_bytes);
      auto* weight = reinterpret_cast<float*>(number + K);
      for (std::int64_t k = 0; k < K; ++k) {
        const std::size_t p = index(t * K + k);
        number[k] = h->pair_rank[p] == r ? expert_number_[index(list[p])] : -1;
        weight[k] = h->weights.empty() ? 1.0f : h->weights[p];
      }
      weight[K] = scales[index(t)];
      std::memcpy(parcel.rows.data() + i++ * parcel.row_bytes, row_at(tokens, t), index(parcel.row_bytes));
    }
  }
  return parcel;
}

// The factors of the experts of this node, by their numbers here.
std::vector<float> NodesBuffer::factors_of_node(const TensorView& smooth_scale) const {
  const std::int64_t width = smooth_scale.sizes[1];
  std::vector<float> factors(index(local_->config().experts * width));
  for (std::int64_t e = 0; e < config_.experts; ++e) {
    if (expert_node_[index(e)] == node_) {
      std::memcpy(factors.data() + expert_number_[index(e)] * width, row_at(smooth_scale, e), index(4 * width));
    }
  }
  return factors;
}

NodesHandlePtr NodesBuffer::dispatch(const TensorView& x, const TensorView& ids, const TensorView& weights, bool int8,
                                     const TensorView& smooth_scale) {
  const Parcel parcel = announced(wire_, [&] { return pack(x, ids, weights, int8, smooth_scale); });
  const std::shared_ptr<NodesHandle>& h = parcel.handle;
  const std::int64_t K = h->slots;
  const std::vector<std::int64_t> sent = counts_of(h->sent);
  Terms terms = terms_of(Op::kDispatch, parcel.row_bytes, parcel.dtype);
  terms.field[2] = static_cast<std::uint64_t>(K);
  terms.field[4] = int8 ? 1 : 0;
  terms.field[8] = smooth_scale.defined() ? 1 : 0;
  h->received = agree("ep_dispatch", config_.name, wire_, terms, sent);
  h->number = ++dispatches_;
  const std::vector<char> meta = exchange(parcel.meta, sent, h->received, parcel.meta_bytes);
  const std::vector<char> rows = exchange(parcel.rows, sent, h->received, parcel.row_bytes);
  const std::int64_t came = total_of(h->received);
  h->numbers.resize(index(came * K));
  std::vector<float> row_weights(index(came * K)), scales(index(came));
  for (std::int64_t t = 0; t < came; ++t) {
    const char* of_token = meta.data() + t * parcel.meta_bytes;
    std::memcpy(h->numbers.data() + t * K, of_token, index(4 * K));
    std::memcpy(row_weights.data() + t * K, of_token + 4 * K, index(4 * K));
    std::memcpy(&scales[index(t)], of_token + 8 * K, sizeof(float));
  }
  DispatchOptions options;
  options.weights = contiguous(row_weights.data(), DType::kF32, {came, K});
  options.int8 = int8;
  std::vector<float> factors;
  if (smooth_scale.defined()) {
    factors = factors_of_node(smooth_scale);
    options.smooth_scale = contiguous(factors.data(), DType::kF32, {local_->config().experts, x.sizes[1]});
  } else if (int8) {
    options.x_scale = contiguous(scales.data(), DType::kF32, {came});
  }
  h->inner = local_->dispatch(contiguous(rows.data(), parcel.dtype, {came, x.sizes[1]}),
                              contiguous(h->numbers.data(), DType::kI32, {came, K}), options);
  return h;
}

void NodesBuffer::expand(const NodesHandle& handle, const TensorView& out, const TensorView& scales,
                         const TensorView& smooth_scale) const {
  if (!smooth_scale.defined()) {
    local_->expand(*handle.inner, out, scales);
    return;
  }
  check_rank("ep_expand", {"out", out}, 2);
  check_smooth_scale("ep_expand", config_, smooth_scale, out.sizes[1]);
  const std::vector<float> factors = factors_of_node(smooth_scale);
  local_->expand(*handle.inner, out, scales,
                 contiguous(factors.data(), DType::kF32, {local_->config().experts, smooth_scale.sizes[1]}));
}
TensorView NodesBuffer::window_rows(std::int64_t rows, std::int64_t width, DType dtype) const {
  return local_->window_rows(rows, width, dtype);
}

}  // namespace tidegate::ep
