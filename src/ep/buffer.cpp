// Dispatch: every rank puts its tokens and their sorted pairs into its window, and reads those of all windows.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/checks.h"
#include "base/element.h"
#include "base/expert_ids.h"
#include "base/float_environment.h"
#include "base/row_checks.h"
#include "ep/group.h"
#include "ep/rows.h"
#include "tidegate/quant.h"

namespace tidegate::ep {
namespace {

std::int64_t all_experts(const Config& c) { return c.experts + c.zero_experts + c.copy_experts + c.const_experts; }

void check_tokens(std::string_view op, const Group& g, const TensorView& x, const DispatchOptions& o = {}) {
  check_rank(op, {"x", x}, 2);
  if (o.x_scale.defined()) {
    check(o.int8, op, ": x_scale: expected none without int8, got a tensor");
    check_dtype(op, {"x", x}, DType::kI8);
    check_shape(op, {"x_scale", o.x_scale}, {x.sizes[0]});
    check_dtype(op, {"x_scale", o.x_scale}, DType::kF32);
  } else if (o.int8) {
    check_kernel_type(op, {"x", x});
  } else {
    check_data_type(op, {"x", x});
  }
  if (o.smooth_scale.defined()) {
    check(o.int8 && !o.x_scale.defined(), op,
          ": smooth_scale: expected none without int8 or with x_scale, got a tensor");
    check_smooth_scale(op, g.config, o.smooth_scale, x.sizes[1]);
  }
  check_inner_stride(op, {"x", x});
  check_row_bytes(op, g.config, {"x", x});
  if (x.sizes[0] > g.config.max_tokens) [[unlikely]] {
    Config larger = g.config;
    larger.max_tokens = x.sizes[0];
    check(false, op, ": x: expected at most ", g.config.max_tokens, " tokens (max_tokens of the buffer), got ",
          x.sizes[0], "; a buffer for them has windows of ", window_bytes(larger, g.ranks), " bytes instead of ",
          g.layout.bytes);
  }
}

// Ids of pairs that are masked become -1.
void apply_mask(std::string_view op, const TensorView& mask, std::int64_t T, std::int64_t K, std::int32_t* ids) {
  if (!mask.defined()) {
    return;
  }
  check_dtype(op, {"mask", mask}, DType::kBool);
  if (mask.rank == 1) {
    check_shape(op, {"mask", mask}, {T});
  } else {
    check_shape(op, {"mask", mask}, {T, K});
  }
  for (std::int64_t i = 0; i < T * K; ++i) {
    const std::int64_t at = mask.rank == 1 ? i / K * mask.strides[0] : offset_of(mask, i / K, i % K);
    ids[i] = mask.as<const std::uint8_t>()[at] != 0 ? ids[i] : -1;
  }
}

// Pairs of a token on one rank are at most as many as that rank's experts, so that a static shape holds them.
void check_static_shape(std::string_view op, const Group& g, const Handle& h) {
  std::vector<std::int64_t> pairs(static_cast<std::size_t>(g.ranks));
  for (std::int64_t t = 0; t < h.tokens; ++t) {
    std::fill(pairs.begin(), pairs.end(), 0);
    for (std::int64_t p = t * h.slots; p < (t + 1) * h.slots; ++p) {
      const std::int32_t id = h.ids[static_cast<std::size_t>(p)];
      if (id < 0 || id >= g.config.experts) {
        continue;
      }
      const auto end = std::upper_bound(g.expert_begin.begin(), g.expert_begin.end(), id);
      const auto owner = static_cast<std::size_t>(end - g.expert_begin.begin() - 1);
      const std::int64_t most = *end - g.expert_begin[owner];
      check(++pairs[owner] <= most, op, ": ids: expected at most ", most, " experts of rank ", owner,
            " in a token (static_shape), got ", pairs[owner], " in token ", t);
    }
  }
}

// My pairs sorted by expert, as the others read them.
void write_pairs(const Group& g, const Handle& h, char* slot) {
  Scratch scratch;
  auto* real = take<std::int32_t>(scratch, static_cast<std::int64_t>(h.ids.size()) + 1);
  for (std::size_t i = 0; i < h.ids.size(); ++i) {
    real[i] = h.ids[i] < g.config.experts ? h.ids[i] : -1;
  }
  const Routing r = sort_pairs(real, static_cast<std::int64_t>(h.ids.size()), g.config.experts, scratch);
  auto* offsets = reinterpret_cast<std::int32_t*>(slot + g.layout.offsets);
  for (std::int64_t e = 0; e <= g.config.experts; ++e) {
    offsets[e] = static_cast<std::int32_t>(r.offsets[e]);
  }
  std::memcpy(slot + g.layout.src, r.src, static_cast<std::size_t>(r.routed()) * sizeof *r.src);
  if (!h.weights.empty()) {
    std::memcpy(slot + g.layout.weights, h.weights.data(), h.weights.size() * sizeof(float));
  }
}

// As what rows stand in the windows.
DType travelling_type(const TensorView& x, const DispatchOptions& o) {
  return o.int8 && !o.smooth_scale.defined() ? DType::kI8 : x.dtype;
}

void write_tokens(const Group& g, const TensorView& x, const DispatchOptions& o, char* slot) {
  const TensorView rows = window_view(g, slot, x.sizes[0], x.sizes[1], travelling_type(x, o));
  const TensorView scales = contiguous(slot + g.layout.scales, DType::kF32, {x.sizes[0]});
  if (rows.dtype != x.dtype) {
    quantize(x, rows, scales);
    return;
  }
  copy_rows(x, rows);
  for (std::int64_t t = 0; o.x_scale.defined() && t < x.sizes[0]; ++t) {
    scales.as<float>()[t] = o.x_scale.as<const float>()[t * o.x_scale.strides[0]];
  }
}

Terms terms_of(Op op, const TensorView& x, const DispatchOptions& o) {
  Terms t;
  t.field[0] = static_cast<std::uint64_t>(op);
  t.field[1] = static_cast<std::uint64_t>(x.sizes[1] * dtype_bytes(travelling_type(x, o)));
  t.field[3] = static_cast<std::uint64_t>(x.dtype);
  t.field[4] = o.int8 ? 1 : 0;
  t.field[8] = o.smooth_scale.defined() ? 1 : 0;
  return t;
}

// What expand has to know of the rows that the windows hold now.
void remember_rows(Group& g, const TensorView& x, const DispatchOptions& o, std::uint64_t signature) {
  g.signature = signature;
  g.dtype = travelling_type(x, o);
  g.row_bytes = x.sizes[1] * dtype_bytes(g.dtype);
  g.int8 = g.dtype == DType::kI8;
  g.smooth = o.smooth_scale.defined();
}

}  // namespace

std::unique_ptr<Buffer> Buffer::create(const Config& config, Bootstrap& bootstrap) {
  auto buffer = std::make_unique<Buffer>(config, bootstrap.rank(), bootstrap.size());
  buffer->connect(bootstrap.all_gather(buffer->address()));
  return buffer;
}
Buffer::Buffer(const Config& config, int rank, int ranks) : group_(std::make_unique<Group>(config, rank, ranks)) {}
Buffer::~Buffer() = default;
std::string Buffer::address() const { return group_->address(); }
void Buffer::connect(const std::vector<std::string>& addresses) { group_->connect(addresses); }
int Buffer::rank() const { return group_->rank; }
int Buffer::ranks() const { return group_->ranks; }
const Config& Buffer::config() const { return group_->config; }
std::int64_t Buffer::first_expert() const { return group_->expert_begin[static_cast<std::size_t>(group_->rank)]; }
std::int64_t Buffer::local_experts() const {
  return group_->expert_begin[static_cast<std::size_t>(group_->rank) + 1] - first_expert();
}
std::vector<std::int64_t> Buffer::waited_microseconds() const { return group_->waited; }
void Buffer::check_healthy() const { group_->check_healthy(); }
void Buffer::poison(const std::string& why) noexcept { group_->poison("ep_buffer", why); }
void Buffer::reset(Bootstrap& bootstrap) {
  const Config config = group_->config;
  const int rank = group_->rank;
  const int ranks = group_->ranks;
  group_ = std::make_unique<Group>(config, rank, ranks);
  group_->connect(bootstrap.all_gather(group_->address()));
}

HandlePtr Buffer::dispatch(const TensorView& x, const TensorView& ids, const DispatchOptions& o) {
  constexpr std::string_view op = "ep_dispatch";
  const FloatEnvironment environment;
  Group& g = *group_;
  return g.operation(op, [&]() -> HandlePtr {
    check_tokens(op, g, x, o);
    check_rank(op, {"ids", ids}, 2);
    check_shape(op, {"ids", ids}, {x.sizes[0], ids.sizes[1]});
    check(ids.sizes[1] >= 1 && ids.sizes[1] <= g.config.slots, op, ": ids: expected 1 to ", g.config.slots,
          " slots (slots of the buffer), got ", ids.sizes[1]);
    auto h = std::make_shared<Handle>();
    h->tokens = x.sizes[0];
    h->slots = ids.sizes[1];
    {
      Scratch scratch;
      const std::int32_t* list = read_expert_ids(op, {"ids", ids}, all_experts(g.config), ExpertIds::kPlain, scratch);
      h->ids.assign(list, list + h->tokens * h->slots);
    }
    apply_mask(op, o.mask, h->tokens, h->slots, h->ids.data());
    read_weights(op, {"weights", o.weights}, h->tokens, h->slots, h->weights);
    if (o.static_shape) {
      check_static_shape(op, g, *h);
    }

    char* slot = g.next_slot();
    write_pairs(g, *h, slot);
    write_tokens(g, x, o, slot);
    Terms terms = terms_of(Op::kDispatch, x, o);
    terms.field[2] = static_cast<std::uint64_t>(h->slots);
    terms.field[5] = o.needs_backward ? 1 : 0;
    terms.field[6] = o.weights.defined() ? 1 : 0;
    terms.field[9] = o.static_shape ? 1 : 0;
    g.exchange(op, Op::kDispatch, terms, h->tokens);

    std::vector<SourcePairs> sources;
    for (int r = 0; r < g.ranks; ++r) {
      const char* from = g.current(r);
      sources.push_back({g.header(r).tokens, reinterpret_cast<const std::int32_t*>(from + g.layout.offsets),
                         reinterpret_cast<const std::int32_t*>(from + g.layout.src),
                         o.weights.defined() ? reinterpret_cast<const float*>(from + g.layout.weights) : nullptr});
    }
    place_rows(*h, g.rank, g.expert_begin, sources);
    h->shape_rows = h->rows;
    if (o.static_shape) {
      const auto& list = h->source_tokens;
      const std::int64_t here = std::accumulate(list.begin(), list.end(), std::int64_t{0});
      h->shape_rows = std::max(here, o.static_tokens) * std::min(h->slots, local_experts());
    }
    h->signature = hash_bytes(&g.generation, sizeof g.generation, g.epoch | 1);
    remember_rows(g, x, o, h->signature);
    return h;
  });
}

void Buffer::dispatch(const TensorView& x, const Handle& h) {
  constexpr std::string_view op = "ep_dispatch";
  Group& g = *group_;
  g.operation(op, [&] {
    check_tokens(op, g, x);
    check_shape(op, {"x", x}, {h.tokens, x.sizes[1]});
    check_handle(op, g, h);
    write_tokens(g, x, {}, g.next_slot());
    Terms terms = terms_of(Op::kCachedDispatch, x, {});
    terms.field[7] = h.signature;
    g.exchange(op, Op::kCachedDispatch, terms, h.tokens);
    remember_rows(g, x, {}, h.signature);
  });
}

TensorView Buffer::window_rows(std::int64_t rows, std::int64_t width, DType dtype) const {
  constexpr std::string_view op = "ep_window_rows";
  const Group& g = *group_;
  g.check_healthy();
  check(rows >= 0 && rows <= g.layout.row_capacity, op, ": rows: expected 0..", g.layout.row_capacity, ", got ", rows);
  const TensorView view = window_view(g, g.next_slot(), rows, width, dtype);
  check_row_bytes(op, g.config, {"rows", view});
  return view;
}

}  // namespace tidegate::ep
