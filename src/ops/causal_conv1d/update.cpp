// causal_conv1d_update: the convolution on a pool of state rows, in place.
#include <cstring>
#include <unordered_map>

#include "base/checks.h"
#include "base/float_environment.h"
#include "ops/causal_conv1d/partition.h"
#include "ops/causal_conv1d/problem.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {
namespace {

using namespace causal_conv1d;
using Options = CausalConv1dUpdateOptions;
constexpr std::string_view op = "causal_conv1d_update";

StateMode mode_of(const Options& o) {
  check(o.num_accepted_tokens.empty() || o.cache_seqlens.empty(), op,
        ": cache_seqlens: expected none together with num_accepted_tokens, got both");
  check(!o.state_anchor_head || (o.num_accepted_tokens.empty() && o.cache_seqlens.empty()), op,
        ": state_anchor: expected tail together with num_accepted_tokens or cache_seqlens, got head");
  if (!o.num_accepted_tokens.empty()) return StateMode::kSpeculative;
  if (!o.cache_seqlens.empty()) return StateMode::kCircular;
  return o.state_anchor_head ? StateMode::kHead : StateMode::kTail;
}

template <class Span>
void check_length(std::string_view name, const Span& values, std::int64_t count) {
  check(values.empty() || static_cast<std::int64_t>(values.size()) == count, op, ": ", name, ": expected ", count,
        " entries (one per sequence), got ", values.size());
}

// The pool row of every sequence, -1 where the sequence is skipped. Every index is checked before memory is touched.
std::vector<UpdateRow> check_rows(const Options& o, const SeqLens& seq, StateMode mode, std::int64_t slots,
                                  std::int64_t S, std::int64_t W) {
  check_length("cache_indices", o.cache_indices, seq.count());
  check_length("has_initial_state", o.has_initial_state, seq.count());
  check_length("num_accepted_tokens", o.num_accepted_tokens, seq.count());
  check_length("cache_seqlens", o.cache_seqlens, seq.count());
  check(!o.cache_indices.empty() || slots >= seq.count(), op, ": conv_state: expected at least ", seq.count(),
        " rows (sequences), got ", slots);
  std::vector<UpdateRow> rows;
  std::unordered_map<std::int64_t, std::int64_t> owner;
  for (std::int64_t n = 0; n < seq.count(); ++n) {
    const auto i = static_cast<std::size_t>(n);
    UpdateRow row{o.cache_indices.empty() ? n : o.cache_indices[i],
                  !o.has_initial_state.empty() && o.has_initial_state[i] == 0, 0};
    const std::int64_t length = seq[n].length();
    if (!o.cache_indices.empty()) {
      if (row.slot == o.pad_slot_id) {
        row.slot = -1;
        rows.push_back(row);
        continue;
      }
      check(slots > 0, op, ": cache_indices[", n, "]: expected ", o.pad_slot_id, " in a pool of 0 rows, got ",
            row.slot);
      check(row.slot >= 0 && row.slot < slots, op, ": cache_indices[", n, "]: expected ", o.pad_slot_id, " or 0 to ",
            slots - 1, ", got ", row.slot);
      if (length > 0) {
        const auto [first, fresh] = owner.emplace(row.slot, n);
        check(fresh, op, ": cache_indices[", n, "]: expected a row of its own, got ", row.slot, " as in [",
              first->second, "]");
      }
    }
    if (mode == StateMode::kSpeculative && length > 0) {
      row.count = o.num_accepted_tokens[i];
      check(row.count >= 1 && row.count <= S - W + 2, op, ": num_accepted_tokens[", n, "]: expected 1 to ", S - W + 2,
            " (state length ", S, "), got ", row.count);
      check(length <= S - W + 2, op, ": conv_state: expected state length >= ", W - 2 + length, " for ", length,
            " tokens of sequence ", n, ", got ", S);
    } else if (mode == StateMode::kCircular) {
      check(o.cache_seqlens[i] >= 0, op, ": cache_seqlens[", n, "]: expected >= 0, got ", o.cache_seqlens[i]);
      row.count = o.cache_seqlens[i] % S;  // only the column matters; the count plus a token could overflow
    }
    rows.push_back(row);
  }
  return rows;
}

// y of a skipped sequence is 0.
void zero_tokens(const Grid& y, const Sequence& s, std::int64_t channels, std::int64_t bytes) {
  for (std::int64_t t = s.begin; t < s.end; ++t) {
    for (std::int64_t c = 0; c < channels; c += y.width) {
      char* p = static_cast<char*>(y.data) + (s.row * y.batch + c / y.width * y.head + t * y.token) * bytes;
      std::memset(p, 0, static_cast<std::size_t>(std::min(y.width, channels - c) * bytes));
    }
  }
}

}  // namespace

void causal_conv1d_update(const TensorView& x, const TensorView& conv_state, const TensorView& weight,
                          const TensorView& bias, const TensorView& y, const SeqLens& seq, const Options& options) {
  const FloatEnvironment environment;
  check(!is_head_major(options.layout), op, ": layout: expected TND or BSND, got a head-major one");
  const Problem p = check_inputs(op, x, weight, bias, seq, options.layout, options.activation);
  check(x.dtype != DType::kF64, op, ": x: expected dtype float32, bfloat16 or float16, got dtype float64");
  check_present(op, {"conv_state", conv_state});
  check_rank(op, {"conv_state", conv_state}, 3);
  check_state(op, "conv_state", conv_state, x, p, conv_state.size(0), p.taps - 1);
  check_output_side(op, "y", y, x, p, options.layout, options.head_num);
  const StateMode mode = mode_of(options);
  const std::vector<UpdateRow> rows = check_rows(options, seq, mode, conv_state.size(0), conv_state.size(2), p.taps);
  check_outputs(op, {{"y", y}, {"conv_state", conv_state}},
                {{"x", x},
                 {"weight", weight},
                 {"bias", bias},
                 {"cache_indices", list_view(options.cache_indices)},
                 {"has_initial_state", list_view(options.has_initial_state)},
                 {"num_accepted_tokens", list_view(options.num_accepted_tokens)},
                 {"cache_seqlens", list_view(options.cache_seqlens)}});

  UpdateArgs args{};
  args.x = grid_of(x, options.layout, 0, p.channels);
  args.y = grid_of(y, options.layout, options.head_num, p.channels);
  args.pool = state_of(conv_state);
  args.mode = mode;
  args.silu = options.activation == Activation::kSilu;
  Scratch scratch;
  const Kernels& kernels = causal_conv1d_kernels_for(active_isa());
  const auto run = kernels.update[data_type_index(x.dtype)][static_cast<std::size_t>(p.taps - 2)];
  args.order = order_of(args.x, args.y, p.channels, kernels.group);
  const bool pair_odd = args.order == Order::kPaired && x.dtype == DType::kBF16;
  const PackedWeights packed = pack_weights(weight, bias, p, kernels, pair_odd, scratch);
  const std::int64_t columns = channel_blocks(p.channels);
  const std::int64_t bytes = dtype_bytes(x.dtype);
  const std::int64_t blocks = update_blocks(seq.count(), columns);
  const std::int64_t parts = (columns + blocks - 1) / blocks;
  parallel_for(seq.count() * parts, [&](std::int64_t task) {
    const std::int64_t n = task / parts;
    const Sequence& s = seq[n];
    const UpdateRow& row = rows[static_cast<std::size_t>(n)];
    const std::int64_t begin = task % parts * blocks * kChannelBlock;
    const std::int64_t end = std::min(begin + blocks * kChannelBlock, p.channels);
    if (row.slot < 0 && begin == 0) {
      zero_tokens(args.y, s, p.channels, bytes);
    }
    for (std::int64_t channel = begin; channel < end && row.slot >= 0 && s.length() > 0; channel += kChannelBlock) {
      const std::int64_t channel_end = std::min(channel + kChannelBlock, end);
      run(args, {n, s.row, s.begin, s.end, s.begin, s.end, channel, channel_end}, row, packed.block(channel));
    }
  });
}

}  // namespace tidegate
