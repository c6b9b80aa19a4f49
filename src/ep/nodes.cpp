#include <algorithm>
#include <cstring>
#include <sstream>

#include "base/checks.h"
#include "base/expert_ids.h"
#include "ep/plan.h"
#include "ep/rows.h"
#include "tidegate/ep_nodes.h"
#include "tidegate/moe.h"
#include "tidegate/quant.h"

namespace tidegate::ep {
namespace {

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

std::vector<std::int64_t> counts_of(const std::vector<std::vector<std::int32_t>>& lists) {
  std::vector<std::int64_t> counts;
  counts.reserve(lists.size());
  for (const auto& list : lists) {
    counts.push_back(static_cast<std::int64_t>(list.size()));
  }
  return counts;
}
std::int64_t total_of(const std::vector<std::int64_t>& counts) {
  std::int64_t total = 0;
  for (const std::int64_t n : counts) {
    total += n;
  }
  return total;
}

}  // namespace

NodesBuffer::NodesBuffer(const Config& config, Wire& wire, NodeSums sums) : wire_(wire), sums_(sums), config_(config) {
  constexpr std::string_view op = "ep_nodes";
  const int rank = wire.rank();
  const int ranks = wire.size();
  check_config(config, rank, ranks);
  check(config.zero_experts + config.copy_experts + config.const_experts == 0, op,
        ": special experts: expected none between nodes, got some");
  std::string mine = node_id(config.node_id);
  mine.resize(256);
  const std::vector<std::string> names = wire.all_gather(mine);
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

// How many tokens come from each rank. With the counts travels what decides how everything after them is read: a rank
// that says something else would be misread.
std::vector<std::int64_t> NodesBuffer::exchange_counts(const std::vector<std::int64_t>& sent, std::int64_t slots,
                                                       std::int64_t row_bytes, DType dtype, bool int8) {
  constexpr std::int64_t kNumbers = 5;
  constexpr std::string_view names[kNumbers] = {"count", "slots", "bytes of a row", "dtype", "int8"};
  const std::vector<std::int64_t> one(sent.size(), 1);
  std::vector<std::int64_t> mine;
  for (const std::int64_t n : sent) {
    mine.insert(mine.end(), {n, slots, row_bytes, static_cast<std::int64_t>(dtype), int8 ? 1 : 0});
  }
  std::vector<char> bytes(mine.size() * sizeof(std::int64_t));
  std::memcpy(bytes.data(), mine.data(), bytes.size());
  bytes = exchange(bytes, one, one, kNumbers * static_cast<std::int64_t>(sizeof(std::int64_t)));
  std::vector<std::int64_t> theirs(mine.size()), counts;
  std::memcpy(theirs.data(), bytes.data(), bytes.size());
  for (std::size_t r = 0; r < sent.size(); ++r) {
    counts.push_back(theirs[r * kNumbers]);
    for (std::size_t i = 1; i < kNumbers; ++i) {
      if (mine[i] != theirs[r * kNumbers + i]) {
        std::ostringstream text;
        text << "ep_dispatch: group " << config_.name << ": rank " << wire_.rank() << " and rank " << r
             << " disagree: " << names[i] << " is " << mine[i] << " on rank " << wire_.rank() << " and "
             << theirs[r * kNumbers + i] << " on rank " << r;
        throw Failure(text.str());
      }
    }
  }
  return counts;
}

NodesHandlePtr NodesBuffer::dispatch(const TensorView& x, const TensorView& ids, const TensorView& weights, bool int8) {
  constexpr std::string_view op = "ep_dispatch";
  check_rank(op, {"x", x}, 2);
  if (int8) {
    check_kernel_type(op, {"x", x});
  } else {
    check_data_type(op, {"x", x});
  }
  check_inner_stride(op, {"x", x});
  check_rank(op, {"ids", ids}, 2);
  check_shape(op, {"ids", ids}, {x.sizes[0], ids.sizes[1]});
  check(x.sizes[0] <= config_.max_tokens, op, ": x: expected at most ", config_.max_tokens,
        " tokens (max_tokens of the buffer), got ", x.sizes[0]);
  auto h = std::make_shared<NodesHandle>();
  h->tokens = x.sizes[0];
  h->slots = ids.sizes[1];
  const std::int64_t K = h->slots;
  read_weights(op, {"weights", weights}, h->tokens, K, h->weights);
  Scratch scratch;
  const std::int32_t* list = read_expert_ids(op, {"ids", ids}, config_.experts, ExpertIds::kPlain, scratch);

  const int ranks = wire_.size();
  h->sent.resize(index(ranks));
  h->pair_rank.assign(index(h->tokens * K), -1);
  for (std::int64_t t = 0; t < h->tokens; ++t) {
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
  // Counts, then for every token its experts there, their weights and its scale, then the rows.
  const std::vector<std::int64_t> sent = counts_of(h->sent);
  TensorView tokens = x;
  std::vector<std::int8_t> quantised;
  std::vector<float> scales(int8 ? index(h->tokens) : 0);
  if (int8) {
    quantised.resize(index(x.numel()));
    tokens = contiguous(quantised.data(), DType::kI8, {h->tokens, x.sizes[1]});
    quantize(x, tokens, contiguous(scales.data(), DType::kF32, {h->tokens}));
  }
  const std::int64_t row_bytes = x.sizes[1] * dtype_bytes(tokens.dtype);
  h->received = exchange_counts(sent, K, row_bytes, tokens.dtype, int8);
  const std::int64_t meta_bytes = 8 * K + 4;
  std::vector<char> meta(index(total_of(sent) * meta_bytes)), rows(index(total_of(sent) * row_bytes));
  std::int64_t i = 0;
  for (int r = 0; r < ranks; ++r) {
    for (const std::int32_t t : h->sent[index(r)]) {
      auto* number = reinterpret_cast<std::int32_t*>(meta.data() + i * meta_bytes);
      auto* weight = reinterpret_cast<float*>(number + K);
      for (std::int64_t k = 0; k < K; ++k) {
        const std::size_t p = index(t * K + k);
        number[k] = h->pair_rank[p] == r ? expert_number_[index(list[p])] : -1;
        weight[k] = h->weights.empty() ? 1.0f : h->weights[p];
      }
      weight[K] = int8 ? scales[index(t)] : 1.0f;
      std::memcpy(rows.data() + i++ * row_bytes, row_at(tokens, t), index(row_bytes));
    }
  }
  meta = exchange(meta, sent, h->received, meta_bytes);
  rows = exchange(rows, sent, h->received, row_bytes);
  const std::int64_t came = total_of(h->received);
  h->numbers.resize(index(came * K));
  std::vector<float> row_weights(index(came * K));
  scales.resize(index(came));
  for (std::int64_t t = 0; t < came; ++t) {
    std::memcpy(h->numbers.data() + t * K, meta.data() + t * meta_bytes, index(4 * K));
    std::memcpy(row_weights.data() + t * K, meta.data() + t * meta_bytes + 4 * K, index(4 * K));
    std::memcpy(&scales[index(t)], meta.data() + t * meta_bytes + 8 * K, sizeof(float));
  }
  DispatchOptions options;
  options.weights = contiguous(row_weights.data(), DType::kF32, {came, K});
  options.int8 = int8;
  if (int8) {
    options.x_scale = contiguous(scales.data(), DType::kF32, {came});
  }
  h->inner = local_->dispatch(contiguous(rows.data(), tokens.dtype, {came, x.sizes[1]}),
                              contiguous(h->numbers.data(), DType::kI32, {came, K}), options);
  return h;
}

void NodesBuffer::expand(const NodesHandle& handle, const TensorView& out, const TensorView& scales) const {
  local_->expand(*handle.inner, out, scales);
}
TensorView NodesBuffer::window_rows(std::int64_t rows, std::int64_t width, DType dtype) const {
  return local_->window_rows(rows, width, dtype);
}

void NodesBuffer::combine(const TensorView& y, const NodesHandle& h, const TensorView& out) {
  constexpr std::string_view op = "ep_combine";
  check_rank(op, {"y", y}, 2);
  check_shape(op, {"out", out}, {h.tokens, y.sizes[1]});
  check_same_dtype(op, {"out", out}, {"y", y});
  const std::int64_t K = h.slots;
  const std::int64_t row_bytes = y.sizes[1] * dtype_bytes(y.dtype);
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
  const bool weighted = sums_ == NodeSums::kExact && !h.weights.empty();
  moe_unpermute_fwd(contiguous(returned.data(), y.dtype, {next, y.sizes[1]}),
                    contiguous(pos.data(), DType::kI32, {h.tokens, columns}),
                    weighted ? contiguous(h.weights.data(), DType::kF32, {h.tokens, K}) : TensorView{}, out);
}

}  // namespace tidegate::ep
