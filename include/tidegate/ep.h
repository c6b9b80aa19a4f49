// Expert parallelism inside a node: tokens go to the ranks that hold their experts, and the experts' results come back.
//
//   auto buffer = ep::Buffer::create({.experts = 256, .slots = 8, .max_tokens = 1024, .row_bytes = 14336}, bootstrap);
//   const ep::HandlePtr h = buffer->dispatch(x, ids, {.weights = w});  // every rank, also one without tokens
//   buffer->expand(*h, rows);                                          // [h->rows, H], sorted by expert
//   ... y = experts(rows, h->expert_rows) ...
//   buffer->combine(y, *h, out);                                       // out[t] = sum over k of w y, in order of ids
//
// Each rank has a window of shared memory that the others read: nothing is pushed, no counts are exchanged beforehand.
// Every call is collective: all ranks make the same calls in the same order. A buffer belongs to one thread at a time.
// T tokens of this rank, H channels, E experts, K slots a token.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tidegate/tensor.h"

namespace tidegate::ep {

// Another rank failed, died or did not come, or the ranks disagree. The buffer is then poisoned: every call throws this
// until reset(). Wrong arguments throw tidegate::Error, and poison the buffer too, because the other ranks wait.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// How ranks find each other: something that every program of several processes has.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Every rank gives some bytes and gets those of all ranks, in their order.
  virtual std::vector<std::string> all_gather(const std::string& mine) = 0;
};

// Equal on all ranks (checked), except node_id.
struct Config {
  std::string name = "moe";     // of the group, for messages
  std::int64_t experts = 0;     // E
  std::int64_t slots = 0;       // largest K
  std::int64_t max_tokens = 0;  // largest T of any rank; memory is taken only for what is used
  std::int64_t row_bytes = 0;   // of the widest row: H times the bytes of an element
  std::vector<std::int64_t>
      expert_begin{};  // rank r holds the experts expert_begin[r] .. [r + 1]; default: even shares
  // Ids from E on: zero_experts that give 0, then copy_experts that give the token, then const_experts that give
  // alpha1 * token + alpha2 * v. They never travel.
  std::int64_t zero_experts = 0, copy_experts = 0, const_experts = 0;
  double timeout_seconds = 60.0;  // the longest wait for another rank
  std::string node_id{};          // default: TIDEGATE_NODE_ID, else host name and boot id
};

// Which node this process runs on: the configured id, or TIDEGATE_NODE_ID, or host name and boot id.
std::string node_id(const std::string& configured = {});

// Rank r of R holds the experts [r E / R, (r + 1) E / R).
std::vector<std::int64_t> even_shares(std::int64_t experts, std::int64_t ranks);

// Bytes of address space that the window of one rank takes.
std::int64_t window_bytes(const Config& config, std::int64_t ranks);

// What a dispatch leaves behind. It holds no pointer into a window, so it serves backward and recomputation at any
// time. Pair t * K + k is slot k of token t.
struct Handle {
  std::uint64_t signature = 0;  // equal on all ranks
  std::int64_t tokens = 0, slots = 0, rows = 0;
  std::int64_t shape_rows = 0;            // of expand's out and combine's y: rows, or more with static_shape
  std::vector<std::int32_t> ids;          // [T*K], -1: not routed; special experts keep their ids
  std::vector<float> weights;             // [T*K], or empty
  std::vector<std::int32_t> rank, place;  // [T*K]: the rank of the pair's expert and the row there, -1: does not travel
  std::vector<std::int64_t> expert_rows;  // [local experts]: rows received for each
  std::vector<std::int64_t> source_rows;  // [ranks][local experts]
  std::vector<std::int64_t> source_tokens;  // [ranks]: T of every rank
  // Received rows, in the order of local expert, source rank, token, slot: where each came from.
  std::vector<std::int32_t> row_rank, row_pair;
  std::vector<float> row_weights;  // [rows], or empty
};
using HandlePtr = std::shared_ptr<const Handle>;

struct DispatchOptions {
  TensorView weights{};  // [T,K]: routing weights, travel with the tokens
  TensorView mask{};     // bool [T] or [T,K]: false does not travel, as id -1
  bool int8 = false;     // rows travel as int8 with one scale a token (see quantize in quant.h)
  TensorView x_scale{};  // fp32 [T], with int8: x is int8 already, and these are its scales
  // fp32 [E,H], with int8: an expert's rows are multiplied by its factors before they are quantised. A token serves
  // several experts, so rows travel as they are, and expand, which takes the same tensor, quantises them.
  TensorView smooth_scale{};
  bool needs_backward = false;  // must be equal on all ranks: a rank without backward would hang the others
  // Rows of a number that does not depend on the routing: sum over ranks of T * min(K, local experts). Those behind the
  // ones that came are 0 and belong to no expert. A token may not name more pairs of a rank than that has experts.
  bool static_shape = false;
  std::int64_t static_tokens = 0;  // of all ranks, if there are more than this buffer's (other nodes)
};

struct CombineOptions {
  bool weighted = true;   // false: a plain sum of the rows that travelled, which is the gradient of a dispatch
  TensorView weights{};   // [T,K]; default: those given to dispatch, else 1
  TensorView shared_x{};  // [T,H], added with weight 1 after the slots
  // For every received row one fp32 number goes back beside it: row_values [shape_rows] -> pair_values [T,K], 0 where a
  // pair did not travel.
  TensorView row_values{}, pair_values{};
  // Of special experts: the tokens, and for const experts alpha1, alpha2 [n] and v [n,H].
  TensorView ori_x{}, alpha1{}, alpha2{}, v{};
  bool needs_backward = false;  // as in DispatchOptions
};

class Group;

class Buffer {
 public:
  // Collective: makes the window and maps those of the others.
  static std::unique_ptr<Buffer> create(const Config& config, Bootstrap& bootstrap);
  // The same in two steps, for callers who exchange addresses themselves.
  Buffer(const Config& config, int rank, int ranks);
  std::string address() const;
  void connect(const std::vector<std::string>& addresses);
  ~Buffer();

  int rank() const;
  int ranks() const;
  const Config& config() const;
  std::int64_t first_expert() const, local_experts() const;

  // x [T,H] of any float type, ids [T,K] int32 or int64: -1 or below E plus the special experts.
  HandlePtr dispatch(const TensorView& x, const TensorView& ids, const DispatchOptions& options = {});
  // Other rows along the same way: the order of `handle`, no metadata.
  void dispatch(const TensorView& x, const Handle& handle);

  // The rows that the last dispatch brought, which must have been that of `handle`: a copy [shape_rows,H] (int8: with
  // `scales` fp32 [shape_rows]), or where they are. Pointers are good until the next call of dispatch or combine.
  void expand(const Handle& handle, const TensorView& out, const TensorView& scales = {},
              const TensorView& smooth_scale = {}) const;
  std::vector<const void*> row_pointers(const Handle& handle) const;

  // Memory of the window for the next dispatch or combine: x or y that were written here are not copied.
  TensorView window_rows(std::int64_t rows, std::int64_t width, DType dtype) const;

  // out[t] = sum over k of weights[t,k] * y[row of (t,k)] + shared_x[t] in fp32, in the order of the ids, rounded once.
  // y [shape_rows,H]; y and out may be absent together: only row_values go back.
  void combine(const TensorView& y, const Handle& handle, const TensorView& out, const CombineOptions& options = {});
  // The rows of y themselves, unsummed: out [T*K,H], 0 where a pair did not travel.
  void collect(const TensorView& y, const Handle& handle, const TensorView& out);

  // Microseconds waited while each rank was missing, since the buffer was made.
  std::vector<std::int64_t> waited_microseconds() const;
  // For a caller that fails between two calls: the other ranks hear of it at once, rather than wait for this one.
  void poison(const std::string& why) noexcept;
  // Throws what poisoned the buffer, if anything did.
  void check_healthy() const;
  // Collective, after a failure: new windows, the same configuration.
  void reset(Bootstrap& bootstrap);

 private:
  std::unique_ptr<Group> group_;
};

}  // namespace tidegate::ep
