// causal_conv1d_fwd and _bwd: checks, partition, dispatch. The update has its own file.
#include <cstring>

#include "base/arena.h"
#include "base/checks.h"
#include "base/element.h"
#include "base/float_environment.h"
#include "ops/causal_conv1d/partition.h"
#include "ops/causal_conv1d/problem.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {

using namespace causal_conv1d;

void causal_conv1d_fwd(const TensorView& x, const TensorView& weight, const TensorView& bias,
                       const TensorView& initial_state, const TensorView& y, const TensorView& final_state,
                       const SeqLens& seq, const CausalConv1dOptions& options) {
  constexpr std::string_view op = "causal_conv1d_fwd";
  const FloatEnvironment environment;
  const Problem p = check_inputs(op, x, weight, bias, seq, options.layout, options.activation);
  check_state(op, "initial_state", initial_state, x, p, seq.count(), p.taps - 1);
  check_output_side(op, "y", y, x, p, options.layout, options.head_num);
  check_state(op, "final_state", final_state, x, p, seq.count(), p.taps - 1);
  check_outputs(op, {{"y", y}, {"final_state", final_state}},
                {{"x", x}, {"weight", weight}, {"bias", bias}, {"initial_state", initial_state}});

  FwdArgs args{};
  args.x = grid_of(x, options.layout, 0, p.channels);
  if (x.dtype == DType::kF64) {
    reference_fwd<double>(x, weight, bias, initial_state, y, seq, options);
    write_final_state(x, args.x, initial_state, final_state, seq, p.channels);
    return;
  }
  args.y = grid_of(y, options.layout, options.head_num, p.channels);
  args.initial = state_of(initial_state);
  args.silu = options.activation == Activation::kSilu;
  args.stream = should_stream(y, args.y, args.x);

  Scratch scratch;
  const int type = data_type_index(x.dtype);
  const auto width = static_cast<std::size_t>(p.taps - 2);
  const Kernels& kernels = causal_conv1d_kernels_for(active_isa());
  const auto run = kernels.fwd[type][width];
  args.order = order_of(args.x, args.y, p.channels, kernels.group);
  const bool pair_odd = args.order == Order::kPaired && x.dtype == DType::kBF16;
  const PackedWeights packed = pack_weights(weight, bias, p, kernels, pair_odd, scratch);
  const std::vector<TokenBlock> blocks = token_blocks(seq, kTokenBlock);
  const std::int64_t columns = channel_blocks(p.channels);
  parallel_for(static_cast<std::int64_t>(blocks.size()) * columns, [&](std::int64_t task) {
    const TokenBlock& b = blocks[static_cast<std::size_t>(task / columns)];
    const Sequence& s = seq[b.sequence];
    const std::int64_t channel = task % columns * kChannelBlock;
    const std::int64_t channel_end = std::min(channel + kChannelBlock, p.channels);
    run(args, {b.sequence, s.row, s.begin, s.end, b.first, b.last, channel, channel_end}, packed.block(channel));
  });
  write_final_state(x, args.x, initial_state, final_state, seq, p.channels);
}

void causal_conv1d_bwd(const TensorView& dy, const TensorView& x, const TensorView& weight, const TensorView& bias,
                       const TensorView& initial_state, const TensorView& dfinal_state, const TensorView& dx,
                       const TensorView& dweight, const TensorView& dbias, const TensorView& dinitial_state,
                       const SeqLens& seq, const CausalConv1dOptions& options) {
  constexpr std::string_view op = "causal_conv1d_bwd";
  const FloatEnvironment environment;
  const Problem p = check_inputs(op, x, weight, bias, seq, options.layout, options.activation);
  check_output_side(op, "dy", dy, x, p, options.layout, options.head_num);
  check_state(op, "initial_state", initial_state, x, p, seq.count(), p.taps - 1);
  check_state(op, "dfinal_state", dfinal_state, x, p, seq.count(), p.taps - 1);
  if (dx.defined()) {
    check_output_side(op, "dx", dx, x, p, options.layout, 0);
  }
  const DType sum_type = x.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  if (dweight.defined()) {
    check_shape(op, {"dweight", dweight}, {p.channels, p.taps});
    check_dtype(op, {"dweight", dweight}, sum_type);
  }
  if (dbias.defined()) {
    check_shape(op, {"dbias", dbias}, {p.channels});
    check_dtype(op, {"dbias", dbias}, sum_type);
  }
  check_state(op, "dinitial_state", dinitial_state, x, p, seq.count(), p.taps - 1);
  if (dinitial_state.defined() && initial_state.defined()) {
    check_same_shape(op, {"dinitial_state", dinitial_state}, {"initial_state", initial_state});
  }
  check_outputs(op, {{"dx", dx}, {"dweight", dweight}, {"dbias", dbias}, {"dinitial_state", dinitial_state}},
                {{"dy", dy},
                 {"x", x},
                 {"weight", weight},
                 {"bias", bias},
                 {"initial_state", initial_state},
                 {"dfinal_state", dfinal_state}});
  if (x.dtype == DType::kF64) {
    reference_bwd<double>(dy, x, weight, bias, initial_state, dfinal_state, dx, dweight, dbias, dinitial_state, seq,
                          options);
    return;
  }

  Scratch scratch;
  BwdArgs args{};
  args.x = grid_of(x, options.layout, 0, p.channels);
  args.dy = grid_of(dy, options.layout, options.head_num, p.channels);
  args.dx = grid_of(dx, options.layout, 0, p.channels);
  args.initial = state_of(initial_state);
  args.dinitial = state_of(dinitial_state);
  args.dfinal = state_of(dfinal_state);
  args.channels = p.channels;
  args.silu = options.activation == Activation::kSilu;
  const bool sums = dweight.defined() || dbias.defined();
  if (sums) {
    args.dweight = scratch.floats(p.taps * p.channels);
    args.dbias = scratch.floats(p.channels);
    std::memset(args.dweight, 0, static_cast<std::size_t>(p.taps * p.channels) * sizeof(float));
    std::memset(args.dbias, 0, static_cast<std::size_t>(p.channels) * sizeof(float));
  }
  std::vector<Span> spans;
  for (const Sequence& s : seq.sequences()) {
    spans.push_back({s.row, s.begin, s.end});
  }
  const int type = data_type_index(x.dtype);
  const auto width = static_cast<std::size_t>(p.taps - 2);
  const Kernels& kernels = causal_conv1d_kernels_for(active_isa());
  const auto run = kernels.bwd[type][width];
  const PackedWeights packed = pack_weights(weight, bias, p, kernels, false, scratch);
  // One task a channel block; every task has its own scratch, taken here so that a task cannot fail.
  const std::int64_t columns = channel_blocks(p.channels);
  const std::int64_t need = bwd_scratch(p.taps, kChannelBlock);
  const std::int64_t need_sums = bwd_sums(p.taps, kChannelBlock);
  float* work = scratch.floats(columns * need);
  auto* totals = static_cast<double*>(scratch.bytes(static_cast<std::size_t>(columns * need_sums) * sizeof(double)));
  parallel_for(columns, [&](std::int64_t task) {
    const std::int64_t channel = task * kChannelBlock;
    const std::int64_t channel_end = std::min(channel + kChannelBlock, p.channels);
    run(args, spans.data(), static_cast<std::int64_t>(spans.size()), channel, channel_end, packed.block(channel),
        work + task * need, totals + task * need_sums);
  });
  for (std::int64_t c = 0; c < p.channels && sums; ++c) {
    for (std::int64_t j = 0; j < p.taps && dweight.defined(); ++j) {
      dweight.as<float>()[offset_of(dweight, c, j)] = args.dweight[j * p.channels + c];
    }
    if (dbias.defined()) {
      dbias.as<float>()[offset_of(dbias, c)] = args.dbias[c];
    }
  }
}

}  // namespace tidegate
