// moe_route_fwd and _bwd: checks, partition, dispatch.
#include <cmath>
#include <vector>

#include "base/arena.h"
#include "base/checks.h"
#include "base/element.h"
#include "base/expert_ids.h"
#include "base/float_environment.h"
#include "base/row_views.h"
#include "ops/moe_route/kernel.h"
#include "ops/moe_route/reference.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {
namespace {

using namespace moe_route;

DType wide(const TensorView& logits) { return logits.dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

void check_logits(std::string_view op, const TensorView& logits, const MoeRouteOptions& options) {
  check_rank(op, {"logits", logits}, 2);
  check_data_type(op, {"logits", logits});
  check_inner_stride(op, {"logits", logits});
  check(!options.logits_rounding || is_float(*options.logits_rounding), op,
        ": logits_rounding: expected dtype float32, bfloat16 or float16, got dtype ",
        options.logits_rounding.value_or(DType::kF32));
}

// Weights and their gradients have the type of the logits, or fp32.
void check_weights(std::string_view op, Named w, const TensorView& logits, std::int64_t k) {
  check_shape(op, w, {logits.sizes[0], k});
  check_inner_stride(op, w);
  if (w.tensor.dtype != wide(logits)) {
    check_same_dtype(op, w, {"logits", logits});
  }
}

void check_probs(std::string_view op, Named p, const TensorView& logits) {
  if (p.tensor.defined()) {
    check_same_shape(op, p, {"logits", logits});
    check_dtype(op, p, wide(logits));
    check_inner_stride(op, p);
  }
}

TypedRows matrix(const TensorView& t) {
  return t.defined() ? TypedRows{t.data, t.strides[0], data_type_index(t.dtype)} : TypedRows{};
}

// Before anything is written: a row that cannot be routed, the first of all.
void refuse(std::string_view op, const TensorView& logits, const Refusal& bad, std::int64_t k) {
  if (bad.why == kNone) {
    return;
  }
  std::int64_t above = 0;
  double worst = INFINITY;
  for (std::int64_t e = 0; e < logits.sizes[1]; ++e) {
    const double z = read_element(logits, offset_of(logits, bad.row, e));
    above += z > -INFINITY ? 1 : 0;
    worst = z < INFINITY ? worst : z;
  }
  check(bad.why != kNotBelowInfinity, op, ": logits[", bad.row, "]: expected numbers below +inf, got ", worst);
  check(bad.why != kTooFew, op, ": logits[", bad.row, "]: expected at least ", k, " above -inf, got ", above);
  check(false, op, ": replay_ids[", bad.row, "]: expected an expert above -inf, got none");
}

Refusal refusal_of(const TensorView& logits, const std::int32_t* replay, std::int64_t k) {
  for (std::int64_t t = 0; t < logits.sizes[0]; ++t) {
    std::int64_t above = 0;
    for (std::int64_t e = 0; e < logits.sizes[1]; ++e) {
      const double z = read_element(logits, offset_of(logits, t, e));
      if (!(z < INFINITY)) {
        return {t, kNotBelowInfinity};
      }
      above += z > -INFINITY ? 1 : 0;
    }
    if (replay == nullptr && above < k) {
      return {t, kTooFew};
    }
    bool any = false;
    bool open = false;
    for (std::int64_t s = 0; replay != nullptr && s < k; ++s) {
      const std::int32_t id = replay[t * k + s];
      any = any || id >= 0;
      open = open || (id >= 0 && read_element(logits, offset_of(logits, t, id)) > -INFINITY);
    }
    if (any && !open) {
      return {t, kMasked};
    }
  }
  return {-1, kNone};
}

template <class F>
void for_tokens(std::int64_t tokens, const Args& args, const Kernels& kernels, F run) {
  const std::int64_t step = rows_per_task(args.experts);
  parallel_for(task_count(tokens, step), [&](std::int64_t task) {
    Scratch own;
    run(task, task * step, std::min(tokens, (task + 1) * step), own.floats(kernels.room(args.experts, args.slots)));
  });
}

}  // namespace

void moe_route_fwd(const TensorView& logits, const TensorView& replay_ids, const TensorView& ids,
                   const TensorView& weights, const TensorView& probs, const MoeRouteOptions& options) {
  constexpr std::string_view op = "moe_route_fwd";
  const FloatEnvironment environment;
  check_logits(op, logits, options);
  check_rank(op, {"weights", weights}, 2);
  const std::int64_t T = logits.sizes[0];
  const std::int64_t E = logits.sizes[1];
  const std::int64_t k = weights.sizes[1];
  check(k >= 1 && k <= E, op, ": k: expected 1 to ", E, " (experts), got ", k);
  check_weights(op, {"weights", weights}, logits, k);
  check_shape(op, {"ids", ids}, {T, k});
  check_index_type(op, {"ids", ids});
  check_probs(op, {"probs", probs}, logits);
  check_outputs(op, {{"ids", ids}, {"weights", weights}, {"probs", probs}},
                {{"logits", logits}, {"replay_ids", replay_ids}});
  Scratch scratch;
  auto* chosen = static_cast<std::int32_t*>(scratch.bytes(static_cast<std::size_t>(T * k) * sizeof(std::int32_t)));
  if (replay_ids.defined()) {
    check_shape(op, {"replay_ids", replay_ids}, {T, k});
    const std::int32_t* replayed = read_expert_ids(op, {"replay_ids", replay_ids}, E, ExpertIds::kPlain, scratch);
    std::copy(replayed, replayed + T * k, chosen);
  }
  const auto write_ids = [&] {
    for (std::int64_t i = 0; i < T * k; ++i) {
      write_index(ids, offset_of(ids, i / k, i % k), chosen[i]);
    }
  };
  if (logits.dtype == DType::kF64) {
    refuse(op, logits, refusal_of(logits, replay_ids.defined() ? chosen : nullptr, k), k);
    if (!replay_ids.defined()) {
      reference_choose<double>(logits, k, options, chosen);
    }
    reference_weigh<double>(logits, chosen, weights, probs, options);
    write_ids();
    return;
  }
  Args args{};
  args.logits = matrix(logits);
  args.weights = matrix(weights);
  args.probs = matrix(probs);
  args.experts = E;
  args.slots = k;
  args.rounding = options.logits_rounding ? data_type_index(*options.logits_rounding) % kDataTypes : 0;
  args.chosen = chosen;
  args.renormalise = options.renormalise;
  args.replay = replay_ids.defined();
  const Kernels& kernels = moe_route_kernels_for(active_isa());
  const std::int64_t tasks = task_count(T, rows_per_task(E));
  auto* bad = static_cast<Refusal*>(scratch.bytes(static_cast<std::size_t>(tasks) * sizeof(Refusal)));
  for_tokens(T, args, kernels, [&](std::int64_t task, std::int64_t first, std::int64_t last, float* room) {
    bad[task] = kernels.choose(args, first, last, room);
  });
  for (std::int64_t task = 0; task < tasks; ++task) {
    refuse(op, logits, bad[task], k);
  }
  for_tokens(T, args, kernels, [&](std::int64_t, std::int64_t first, std::int64_t last, float* room) {
    kernels.weigh(args, first, last, room);
  });
  write_ids();
}

void moe_route_bwd(const TensorView& dweights, const TensorView& dprobs, const TensorView& logits,
                   const TensorView& ids, const TensorView& dlogits, const MoeRouteOptions& options) {
  constexpr std::string_view op = "moe_route_bwd";
  const FloatEnvironment environment;
  check_logits(op, logits, options);
  check_rank(op, {"ids", ids}, 2);
  const std::int64_t T = logits.sizes[0];
  const std::int64_t k = ids.sizes[1];
  check_shape(op, {"ids", ids}, {T, k});
  if (dweights.defined()) {
    check_weights(op, {"dweights", dweights}, logits, k);
  }
  check_probs(op, {"dprobs", dprobs}, logits);
  check_same_shape(op, {"dlogits", dlogits}, {"logits", logits});
  check_same_dtype(op, {"dlogits", dlogits}, {"logits", logits});
  check_inner_stride(op, {"dlogits", dlogits});
  check_outputs(op, {{"dlogits", dlogits}},
                {{"dweights", dweights}, {"dprobs", dprobs}, {"logits", logits}, {"ids", ids}});
  Scratch scratch;
  const std::int32_t* chosen = read_expert_ids(op, {"ids", ids}, logits.sizes[1], ExpertIds::kPlain, scratch);
  if (logits.dtype == DType::kF64) {
    reference_bwd<double>(dweights, dprobs, logits, chosen, k, dlogits, options);
    return;
  }
  Args args{};
  args.logits = matrix(logits);
  args.weights = matrix(dweights);
  args.probs = matrix(dprobs);
  args.dlogits = matrix(dlogits);
  args.experts = logits.sizes[1];
  args.slots = k;
  args.rounding = options.logits_rounding ? data_type_index(*options.logits_rounding) % kDataTypes : 0;
  args.chosen = const_cast<std::int32_t*>(chosen);
  args.renormalise = options.renormalise;
  const Kernels& kernels = moe_route_kernels_for(active_isa());
  for_tokens(T, args, kernels, [&](std::int64_t, std::int64_t first, std::int64_t last, float* room) {
    kernels.bwd(args, first, last, room);
  });
}

}  // namespace tidegate
