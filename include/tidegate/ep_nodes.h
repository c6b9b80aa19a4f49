// Expert parallelism over several nodes: one row for every (token, node) on the wire, ep.h inside each node.
//
// A token goes once to every node that holds one of its experts, to one of the ranks there in turn, which deals it out
// through that node's windows. Calls are collective, as those of ep.h. Names as there.
//
// Arguments are checked before anything travels. A rank that is given wrong ones throws tidegate::Error, the others
// ep::Failure, which names it and says why; so do all if they disagree. Buffer and handles can be used on.
#pragma once

#include "tidegate/ep.h"

namespace tidegate::ep {

// What carries rows between nodes: MPI (ep_mpi.h) or anything else that has this collective.
class Wire : public Bootstrap {
 public:
  // Bytes for every rank, one after the other, and those that came from every rank.
  virtual void all_to_all(const char* send, const std::vector<std::int64_t>& sent, char* receive,
                          const std::vector<std::int64_t>& received) = 0;
};

enum class NodeSums : std::uint8_t {
  kExact,  // results come back unsummed: the bits of one process
  kFast,   // one row for every token and node, summed in fp32 and rounded once more
};

struct NodesHandle {
  HandlePtr inner;           // of the rows that came to this rank from its node
  std::uint64_t number = 0;  // of the dispatch, equal on all ranks
  std::int64_t tokens = 0, slots = 0;
  std::vector<std::vector<std::int32_t>> sent;  // [ranks]: tokens that went to each
  std::vector<std::int64_t> received;           // [ranks]: tokens that came from each
  std::vector<std::int32_t> pair_rank;          // [T*K]: the rank that got the pair's token, -1: not routed
  std::vector<std::int32_t> numbers;  // [received tokens * K]: the expert among those of this node, -1: elsewhere
  std::vector<float> weights;         // [T*K], or empty
  std::vector<std::int64_t> order;    // [T*K]: the slots of a token in the order of their experts
};
using NodesHandlePtr = std::shared_ptr<const NodesHandle>;

class NodesBuffer {
 public:
  // config.node_id says which node this rank is on (or see ep::node_id). Special experts are not offered here.
  NodesBuffer(const Config& config, Wire& wire, NodeSums sums = NodeSums::kExact);

  std::int64_t nodes() const { return static_cast<std::int64_t>(partners_.size()); }
  std::int64_t first_expert() const, local_experts() const;

  // int8 and smooth_scale [E,H]: as in DispatchOptions; without factors a token is quantised once, by its own rank.
  NodesHandlePtr dispatch(const TensorView& x, const TensorView& ids, const TensorView& weights = {}, bool int8 = false,
                          const TensorView& smooth_scale = {});
  // As of Buffer, for the rows of handle.inner.
  void expand(const NodesHandle& handle, const TensorView& out, const TensorView& scales = {},
              const TensorView& smooth_scale = {}) const;
  TensorView window_rows(std::int64_t rows, std::int64_t width, DType dtype) const;
  // out[t] = sum over k of weights[t,k] y, in fp32, in the order of experts (kFast: of nodes).
  void combine(const TensorView& y, const NodesHandle& handle, const TensorView& out);

 private:
  struct Parcel;
  Parcel pack(const TensorView& x, const TensorView& ids, const TensorView& weights, bool int8,
              const TensorView& smooth_scale) const;
  std::vector<float> factors_of_node(const TensorView& smooth_scale) const;
  std::vector<char> exchange(const std::vector<char>& send, const std::vector<std::int64_t>& sent,
                             const std::vector<std::int64_t>& received, std::int64_t item_bytes);

  Wire& wire_;
  NodeSums sums_;
  Config config_;
  std::vector<std::int64_t> expert_begin_;                 // [ranks + 1]
  std::vector<std::int32_t> expert_node_, expert_number_;  // [E]
  std::int32_t node_ = 0;                                  // mine
  std::vector<std::vector<int>> partners_;                 // [nodes]: the ranks there that get my tokens, in turn
  std::unique_ptr<Buffer> local_;
  std::uint64_t dispatches_ = 0;
};

}  // namespace tidegate::ep
