// moe_init_routing, moe_permute, moe_unpermute_fwd and _bwd: checks, partition, dispatch.
#include <cstring>

#include "base/arena.h"
#include "base/checks.h"
#include "base/element.h"
#include "base/expert_ids.h"
#include "base/float_environment.h"
#include "base/row_views.h"
#include "ops/moe_routing/kernel.h"
#include "ops/moe_routing/reference.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {
namespace {

using namespace moe_routing;

char* row_bytes(const TensorView& t, std::int64_t r) {
  return static_cast<char*>(t.data) + r * t.strides[0] * dtype_bytes(t.dtype);
}

void check_rows(std::string_view op, Named t) {
  check_rank(op, t, 2);
  check_data_type(op, t);
  check_inner_stride(op, t);
}

// Places of the pairs [T,k]; a place that two pairs share would be written twice.
const std::int32_t* places(std::string_view op, const TensorView& pos, std::int64_t rows, Scratch& scratch) {
  check_rank(op, {"pos", pos}, 2);
  const std::int32_t* list = read_places(op, {"pos", pos}, rows, scratch);
  auto* taken = static_cast<std::uint8_t*>(scratch.bytes(static_cast<std::size_t>(rows) + 1));
  std::memset(taken, 0, static_cast<std::size_t>(rows));
  for (std::int64_t i = 0; i < pos.numel(); ++i) {
    if (list[i] >= 0) {
      check(taken[list[i]]++ == 0, op, ": pos[", i / pos.sizes[1], ",", i % pos.sizes[1],
            "]: expected a place of its own, got ", list[i], " again");
    }
  }
  return list;
}

// Weights [T,k] of any float type as dense fp32; null if absent.
const float* weight_list(const TensorView& weights, Scratch& scratch) {
  if (!weights.defined()) {
    return nullptr;
  }
  float* list = scratch.floats(weights.numel());
  for (std::int64_t i = 0; i < weights.numel(); ++i) {
    list[i] = static_cast<float>(read_element(weights, offset_of(weights, i / weights.sizes[1], i % weights.sizes[1])));
  }
  return list;
}

void check_pair_weights(std::string_view op, Named w, const TensorView& pos) {
  if (w.tensor.defined()) {
    check_shape(op, w, {pos.sizes[0], pos.sizes[1]});
    check_float(op, w);
  }
}

Args arguments(const TensorView& y, const TensorView& out, const TensorView& pos, const std::int32_t* list) {
  Args args{};
  args.y = y.data;
  args.y_row = y.strides[0];
  args.out = out.data;
  args.out_row = out.strides[0];
  args.width = out.sizes[1];
  args.slots = pos.sizes[1];
  args.pos = list;
  return args;
}

template <class F>
void for_tokens(std::int64_t tokens, std::int64_t width, F run) {
  const std::int64_t step = rows_per_task(width);
  parallel_for(task_count(tokens, step),
               [&](std::int64_t task) { run(task * step, std::min(tokens, (task + 1) * step)); });
}

}  // namespace

void moe_init_routing(const TensorView& ids, const TensorView& counts, const TensorView& src, const TensorView& pos,
                      ExpertIds convention) {
  constexpr std::string_view op = "moe_init_routing";
  check_rank(op, {"ids", ids}, 2);
  check_rank(op, {"counts", counts}, 1);
  check_index_type(op, {"counts", counts});
  check_shape(op, {"src", src}, {ids.numel()});
  check_index_type(op, {"src", src});
  check_shape(op, {"pos", pos}, {ids.sizes[0], ids.sizes[1]});
  check_index_type(op, {"pos", pos});
  check_outputs(op, {{"counts", counts}, {"src", src}, {"pos", pos}}, {{"ids", ids}});
  Scratch scratch;
  const std::int64_t E = counts.sizes[0];
  const Routing r = sort_pairs(read_expert_ids(op, {"ids", ids}, E, convention, scratch), ids.numel(), E, scratch);
  for (std::int64_t e = 0; e < E; ++e) {
    write_index(counts, e * counts.strides[0], r.offsets[e + 1] - r.offsets[e]);
  }
  for (std::int64_t i = 0; i < r.pairs; ++i) {
    write_index(src, i * src.strides[0], r.src[i]);
    write_index(pos, offset_of(pos, i / pos.sizes[1], i % pos.sizes[1]), r.pos[i]);
  }
}

void moe_permute(const TensorView& x, const TensorView& src, const TensorView& y, std::int64_t k) {
  constexpr std::string_view op = "moe_permute";
  check_rows(op, {"x", x});
  check_rank(op, {"src", src}, 1);
  check(k >= 1, op, ": k: expected at least 1, got ", k);
  check_shape(op, {"y", y}, {src.sizes[0], x.sizes[1]});
  check_same_dtype(op, {"y", y}, {"x", x});
  check_inner_stride(op, {"y", y});
  check_outputs(op, {{"y", y}}, {{"x", x}, {"src", src}});
  Scratch scratch;
  const std::int32_t* list = read_places(op, {"src", src}, x.sizes[0] * k, scratch);
  const auto bytes = static_cast<std::size_t>(x.sizes[1] * dtype_bytes(x.dtype));
  for_tokens(src.sizes[0], x.sizes[1], [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t j = first; j < last; ++j) {
      if (list[j] >= 0) {
        std::memcpy(row_bytes(y, j), row_bytes(x, list[j] / k), bytes);
      } else {
        std::memset(row_bytes(y, j), 0, bytes);
      }
    }
  });
}

void moe_unpermute_fwd(const TensorView& y, const TensorView& pos, const TensorView& weights, const TensorView& out) {
  constexpr std::string_view op = "moe_unpermute_fwd";
  const FloatEnvironment environment;
  check_rows(op, {"y", y});
  check_rank(op, {"pos", pos}, 2);
  check_pair_weights(op, {"weights", weights}, pos);
  check_shape(op, {"out", out}, {pos.sizes[0], y.sizes[1]});
  check_same_dtype(op, {"out", out}, {"y", y});
  check_inner_stride(op, {"out", out});
  check_outputs(op, {{"out", out}}, {{"y", y}, {"pos", pos}, {"weights", weights}});
  Scratch scratch;
  const std::int32_t* list = read_places(op, {"pos", pos}, y.sizes[0], scratch);
  if (y.dtype == DType::kF64) {
    reference_unpermute<double>(y, list, pos.sizes[1], weights, out);
    return;
  }
  Args args = arguments(y, out, pos, list);
  args.weights = weight_list(weights, scratch);
  const auto run = moe_routing_kernels_for(active_isa()).unpermute[data_type_index(y.dtype)];
  for_tokens(pos.sizes[0], args.width * args.slots,
             [&](std::int64_t first, std::int64_t last) { run(args, first, last); });
}

void moe_unpermute_bwd(const TensorView& dout, const TensorView& y, const TensorView& pos, const TensorView& weights,
                       const TensorView& dy, const TensorView& dweights) {
  constexpr std::string_view op = "moe_unpermute_bwd";
  const FloatEnvironment environment;
  check_rows(op, {"y", y});
  check_rank(op, {"pos", pos}, 2);
  check_pair_weights(op, {"weights", weights}, pos);
  check_shape(op, {"dout", dout}, {pos.sizes[0], y.sizes[1]});
  check_same_dtype(op, {"dout", dout}, {"y", y});
  check_inner_stride(op, {"dout", dout});
  if (dy.defined()) {
    check_same_shape(op, {"dy", dy}, {"y", y});
    check_same_dtype(op, {"dy", dy}, {"y", y});
    check_inner_stride(op, {"dy", dy});
  }
  check_pair_weights(op, {"dweights", dweights}, pos);
  check_outputs(op, {{"dy", dy}, {"dweights", dweights}},
                {{"dout", dout}, {"y", y}, {"pos", pos}, {"weights", weights}});
  Scratch scratch;
  const std::int32_t* list = places(op, pos, y.sizes[0], scratch);
  for (std::int64_t j = 0; dy.defined() && j < dy.sizes[0]; ++j) {
    std::memset(row_bytes(dy, j), 0, static_cast<std::size_t>(dy.sizes[1] * dtype_bytes(dy.dtype)));
  }
  if (y.dtype == DType::kF64) {
    reference_bwd<double>(dout, y, list, pos.sizes[1], weights, dy, dweights);
    return;
  }
  Args args = arguments(y, dout, pos, list);
  args.weights = weight_list(weights, scratch);
  if (dy.defined()) {
    args.dy = dy.data;
    args.dy_row = dy.strides[0];
  }
  args.dweights = dweights.defined() ? scratch.floats(pos.numel()) : nullptr;
  const auto run = moe_routing_kernels_for(active_isa()).bwd[data_type_index(y.dtype)];
  for_tokens(pos.sizes[0], args.width * args.slots,
             [&](std::int64_t first, std::int64_t last) { run(args, first, last); });
  for (std::int64_t i = 0; dweights.defined() && i < pos.numel(); ++i) {
    write_element(dweights, offset_of(dweights, i / args.slots, i % args.slots), args.dweights[i]);
  }
}

}  // namespace tidegate
