#include "ops/recurrent_gated_delta_rule/problem.h"

#include <algorithm>
#include <cstring>

#include "ops/chunk_gated_delta_rule/problem.h"

namespace tidegate::recurrence {
namespace {

std::int64_t* integers(Scratch& scratch, std::int64_t n) {
  return static_cast<std::int64_t*>(scratch.bytes(static_cast<std::size_t>(n) * sizeof(std::int64_t)));
}

// Everything but the states.
Problem check_inputs(std::string_view op, const Tensors& t, const SeqLens& seq, const Options& options) {
  const chunk_gated_delta_rule::Tensors inputs{t.q, t.k, t.v, {}, {}, {}, t.o, {}, {}};
  const auto base = chunk_gated_delta_rule::check_inputs(op, inputs, seq, chunk_options(options));
  Problem p{};
  p.sizes = base.sizes;
  p.layout = base.layout;
  p.scale = base.scale;
  const Named k{"k", t.k};
  if (t.g.defined()) {
    check_gate(op, {"g", t.g}, k, p.layout, p.sizes);
  }
  check(t.g.defined() || !options.A_log.defined(), op, ": g: expected a tensor with A_log, got none");
  if (t.gk.defined()) {
    check_tokens_heads(op, {"gk", t.gk}, p.layout, p.sizes, p.sizes.HV, p.sizes.K);
    check_float(op, {"gk", t.gk});
    check_wide(op, {"gk", t.gk}, k);
  }
  p.beta_per_channel = t.beta.rank == t.v.rank;
  if (p.beta_per_channel) {
    check_tokens_heads(op, {"beta", t.beta}, p.layout, p.sizes, p.sizes.HV, p.sizes.V);
    check_float(op, {"beta", t.beta});
    check_wide(op, {"beta", t.beta}, k);
  } else {
    check_gate(op, {"beta", t.beta}, k, p.layout, p.sizes);
  }
  check_tokens_heads(op, {"o", t.o}, p.layout, p.sizes, p.sizes.HV, p.sizes.V);
  check_same_dtype(op, {"o", t.o}, k);
  return p;
}

void check_state(std::string_view op, Named t, const Tensors& all, const Problem& p, std::int64_t count,
                 std::string_view what, bool v_first) {
  check_states(op, t, {"k", all.k}, p.sizes, count, what, v_first);
  check_stored(op, t);
  check_inner_stride(op, t);
}

void check_memory(std::string_view op, const Tensors& t, const Options& options, Named state, Named initial) {
  check_outputs(op, {{"o", t.o}, state},
                {{"q", t.q},
                 {"k", t.k},
                 {"v", t.v},
                 {"g", t.g},
                 {"gk", t.gk},
                 {"beta", t.beta},
                 initial,
                 {"A_log", options.A_log},
                 {"dt_bias", options.dt_bias},
                 {"state_indices", list_view(options.state_indices)},
                 {"num_accepted_tokens", list_view(options.num_accepted_tokens)},
                 {"has_initial_state", list_view(options.has_initial_state)}});
}

template <class Span>
void check_count(std::string_view op, std::string_view name, const Span& values, std::int64_t count) {
  check(values.empty() || static_cast<std::int64_t>(values.size()) == count, op, ": ", name, ": expected ", count,
        " entries (one per sequence), got ", values.size());
}

// How an entry of state_indices is called.
struct Entry {
  std::string_view op;
  std::int64_t n, m;
  bool per_token;
  template <class... Parts>
  void expect(bool ok, const Parts&... parts) const {
    if (per_token) {
      check(ok, op, ": state_indices[", n, "][", m, "]: expected ", parts...);
    } else {
      check(ok, op, ": state_indices[", n, "]: expected ", parts...);
    }
  }
};

// Slots that a sequence reads or writes belong to it: nobody else may write them. Several may read one (a fork).
class Owners {
 public:
  Owners(const Problem& p, const SeqLens& seq, std::int64_t slots, Scratch& scratch) : p_(p), seq_(seq) {
    const auto bytes = static_cast<std::size_t>(slots + 7) / 8;
    written_ = static_cast<unsigned char*>(scratch.bytes(bytes));
    std::memset(written_, 0, bytes);
  }
  // Entries of sequence n that are written to.
  std::int64_t writes(std::int64_t n) const {
    if (p_.start[n] == kSkipped || seq_[n].length() == 0) {
      return 0;
    }
    return p_.per_token ? seq_[n].length() : 1;
  }
  bool is_written(std::int64_t slot) const { return (written_[slot / 8] >> (slot % 8) & 1) != 0; }
  void write(std::int64_t slot) { written_[slot / 8] |= static_cast<unsigned char>(1 << slot % 8); }
  bool writes(std::int64_t n, std::int64_t slot) const {
    return std::find(p_.slots_of(n), p_.slots_of(n) + writes(n), slot) != p_.slots_of(n) + writes(n);
  }
  // Some sequence other than n that writes the slot; -1 if there is none.
  std::int64_t other(std::int64_t n, std::int64_t slot) const {
    for (std::int64_t i = 0; i < seq_.count(); ++i) {
      if (i != n && writes(i, slot)) {
        return i;
      }
    }
    return -1;
  }

 private:
  const Problem& p_;
  const SeqLens& seq_;
  unsigned char* written_;
};

void check_owners(std::string_view op, const Problem& p, const SeqLens& seq, const Options& options, std::int64_t slots,
                  Scratch& scratch) {
  Owners owners(p, seq, slots, scratch);
  const auto own = [&](std::int64_t n, std::int64_t m, std::int64_t slot) {
    const std::int64_t other = owners.other(n, slot);
    Entry{op, n, m, p.per_token}.expect(other < 0, "a slot of its own, got ", slot, " (also of sequence ", other, ")");
  };
  for (std::int64_t n = 0; n < seq.count(); ++n) {
    for (std::int64_t m = 0; m < owners.writes(n); ++m) {
      const std::int64_t slot = p.slots_of(n)[m];
      if (slot == kDropped) {
        continue;
      }
      if (owners.is_written(slot)) {
        own(n, m, slot);
      }
      owners.write(slot);
    }
  }
  for (std::int64_t n = 0; n < seq.count(); ++n) {
    const std::int64_t slot = p.start[n];
    if (slot >= 0 && owners.writes(n) > 0 && owners.is_written(slot) && !owners.writes(n, slot)) {
      own(n, options.num_accepted_tokens.empty() ? 0 : options.num_accepted_tokens[static_cast<std::size_t>(n)] - 1,
          slot);
    }
  }
}

}  // namespace

void check_indices(std::string_view op, Problem& p, const SeqLens& seq, const Options& options, std::int64_t slots,
                   Scratch& scratch) {
  const std::int64_t N = seq.count();
  check(options.states_per_sequence >= 0, op, ": states_per_sequence: expected >= 0, got ",
        options.states_per_sequence);
  p.per_token = options.states_per_sequence > 0;
  p.width = p.per_token ? options.states_per_sequence : 1;
  check(static_cast<std::int64_t>(options.state_indices.size()) == N * p.width, op, ": state_indices: expected ",
        N * p.width, " entries (", p.width, " per sequence), got ", options.state_indices.size());
  check_count(op, "num_accepted_tokens", options.num_accepted_tokens, N);
  check_count(op, "has_initial_state", options.has_initial_state, N);
  std::int64_t* start = integers(scratch, N);
  std::int64_t* list = integers(scratch, N * p.width);
  p.start = start;
  p.slots = list;
  for (std::int64_t n = 0; n < N; ++n) {
    const auto at = static_cast<std::size_t>(n);
    for (std::int64_t m = 0; m < p.width; ++m) {
      const std::int64_t slot =
          options.state_indices[at * static_cast<std::size_t>(p.width) + static_cast<std::size_t>(m)];
      const bool null = slot == options.null_slot;
      Entry{op, n, m, p.per_token}.expect(null || (slot >= 0 && slot < slots), "0 to ", slots - 1, " or ",
                                          options.null_slot, " (null slot), got ", slot);
      list[n * p.width + m] = null ? kDropped : slot;
    }
    const std::int64_t length = seq[n].length();
    start[n] = kSkipped;
    if (length == 0) {
      continue;
    }
    check(!p.per_token || length <= p.width, op, ": state_indices: expected at least ", length,
          " entries for sequence ", n, " (its tokens), got ", p.width);
    const std::int64_t accepted = options.num_accepted_tokens.empty() ? 1 : options.num_accepted_tokens[at];
    check(accepted >= 1 && accepted <= p.width, op, ": num_accepted_tokens[", n, "]: expected 1 to ", p.width,
          " (states per sequence), got ", accepted);
    const std::int64_t slot = list[n * p.width + accepted - 1];
    if (slot != kDropped) {
      start[n] = options.has_initial_state.empty() || options.has_initial_state[at] != 0 ? slot : kFromZero;
    }
  }
  check_owners(op, p, seq, options, slots, scratch);
}

ChunkGatedDeltaRuleOptions chunk_options(const Options& options) {
  ChunkGatedDeltaRuleOptions o;
  o.scale = options.scale;
  o.use_qk_l2norm = options.use_qk_l2norm;
  o.A_log = options.A_log;
  o.dt_bias = options.dt_bias;
  o.beta_sigmoid = options.beta_sigmoid;
  o.beta_scale = options.beta_scale;
  o.state_v_first = options.state_v_first;
  o.layout = options.layout;
  return o;
}

Problem check_pool(std::string_view op, const Tensors& t, const SeqLens& seq, const Options& options,
                   Scratch& scratch) {
  Problem p = check_inputs(op, t, seq, options);
  check_rank(op, {"state", t.to}, 4);
  check_state(op, {"state", t.to}, t, p, t.to.size(0), "slots", options.state_v_first);
  check_indices(op, p, seq, options, t.to.size(0), scratch);
  check_memory(op, t, options, {"state", t.to}, {"state", {}});
  return p;
}

Problem check_fwd(std::string_view op, const Tensors& t, const SeqLens& seq, const Options& options, Scratch& scratch) {
  check(options.state_indices.empty() && options.states_per_sequence == 0 && options.num_accepted_tokens.empty() &&
            options.has_initial_state.empty(),
        op, ": options: expected none about a pool, got one");
  Problem p = check_inputs(op, t, seq, options);
  const std::int64_t N = seq.count();
  constexpr std::string_view what = "one per sequence";
  check_state(op, {"initial_state", t.from}, t, p, N, what, options.state_v_first);
  check_state(op, {"final_state", t.to}, t, p, N, what, options.state_v_first);
  if (t.from.defined() && t.to.defined()) {
    check_same_dtype(op, {"initial_state", t.from}, {"final_state", t.to});
  }
  check_memory(op, t, options, {"final_state", t.to}, {"initial_state", t.from});
  std::int64_t* start = integers(scratch, N);
  std::int64_t* list = integers(scratch, N);
  for (std::int64_t n = 0; n < N; ++n) {
    start[n] = t.from.defined() ? n : kFromZero;
    list[n] = t.to.defined() ? n : kDropped;
  }
  p.start = start;
  p.slots = list;
  p.width = 1;
  return p;
}

}  // namespace tidegate::recurrence
