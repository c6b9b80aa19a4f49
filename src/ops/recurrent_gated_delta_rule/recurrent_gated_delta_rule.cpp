// recurrent_gated_delta_rule and its functional form: from checked arguments to kernels.
#include <cmath>
#include <cstring>

#include "base/element.h"
#include "base/float_environment.h"
#include "base/shares.h"
#include "ops/chunk_gated_delta_rule/problem.h"
#include "ops/recurrent_gated_delta_rule/kernel.h"
#include "ops/recurrent_gated_delta_rule/partition.h"
#include "ops/recurrent_gated_delta_rule/problem.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {
namespace recurrence {
namespace {

States states_of(const TensorView& t) {
  return t.defined() ? States{t.data, t.strides[0], t.strides[1], t.strides[2]} : States{};
}

Gate gate_of(const TensorView& t, Layout layout) { return {gates_of(t, layout), static_cast<int>(t.dtype)}; }

Args make_args(const Problem& p, const Tensors& t, const Options& options, Scratch& scratch) {
  Args a{};
  a.q = heads_of(t.q, p.layout);
  a.k = heads_of(t.k, p.layout);
  a.v = heads_of(t.v, p.layout);
  a.o = heads_of(t.o, p.layout);
  a.g = gate_of(t.g, p.layout);
  a.gk = gate_of(t.gk, p.layout);
  a.beta = gate_of(t.beta, p.layout);
  a.beta_per_channel = p.beta_per_channel;
  a.from = states_of(t.from);
  a.to = states_of(t.to);
  a.group = p.sizes.group();
  a.K = p.sizes.K;
  a.V = p.sizes.V;
  a.scale = static_cast<float>(p.scale);
  a.beta_scale = static_cast<float>(options.beta_scale);
  a.use_qk_l2norm = options.use_qk_l2norm;
  a.beta_sigmoid = options.beta_sigmoid;
  a.v_first = options.state_v_first;
  if (options.A_log.defined()) {
    float* rate = scratch.floats(p.sizes.HV);
    float* bias = scratch.floats(p.sizes.HV);
    std::memset(bias, 0, static_cast<std::size_t>(p.sizes.HV) * sizeof(float));
    for (std::int64_t h = 0; h < p.sizes.HV; ++h) {
      rate[h] = static_cast<float>(std::exp(read_element(options.A_log, h * options.A_log.strides[0])));
    }
    if (options.dt_bias.defined()) {
      copy_parameter(options.dt_bias, bias);
    }
    a.rate = rate;
    a.dt_bias = bias;
  }
  return a;
}

// The output of a sequence that is skipped.
void clear_output(const Args& a, const DeltaSizes& z, const Sequence& s, int bytes) {
  for (std::int64_t t = s.begin; t < s.end; ++t) {
    for (std::int64_t h = 0; h < z.HV; ++h) {
      const std::int64_t offset = s.row * a.o.row + t * a.o.token + h * a.o.head;
      std::memset(static_cast<char*>(a.o.data) + offset * bytes, 0, static_cast<std::size_t>(z.V * bytes));
    }
  }
}

// What an empty sequence leaves behind is where it began; only where states are given and returned.
void copy_state(const Tensors& t, std::int64_t start, std::int64_t slot) {
  const auto bytes = static_cast<std::size_t>(t.to.size(3) * dtype_bytes(t.to.dtype));
  for (std::int64_t h = 0; h < t.to.size(1); ++h) {
    for (std::int64_t r = 0; r < t.to.size(2); ++r) {
      char* to = t.to.as<char>() + offset_of(t.to, slot, h, r) * dtype_bytes(t.to.dtype);
      if (start < 0) {
        std::memset(to, 0, bytes);
      } else {
        std::memcpy(to, t.from.as<char>() + offset_of(t.from, start, h, r) * dtype_bytes(t.to.dtype), bytes);
      }
    }
  }
}

// Where a unit begins to read.
const void* first_state(const TensorView& from, const Unit& u, std::int64_t group) {
  return u.start < 0 ? nullptr
                     : from.as<const char>() + offset_of(from, u.start, u.key_head * group) * dtype_bytes(from.dtype);
}

// A sequence for the chunk form: long, and without what only the recurrence knows.
bool takes_chunks(const Problem& p, const Tensors& t, const Sequence& s) {
  return s.length() > kTokenByToken && !p.per_token && !p.beta_per_channel && t.g.defined() && !t.gk.defined();
}

// All sequences that take chunks, in one call of the fused operator.
void run_chunks(const Problem& p, const Tensors& t, const SeqLens& seq, const Options& options) {
  chunk_gated_delta_rule::Problem chunks{p.sizes, p.layout, p.layout, p.scale, {}};
  for (std::int64_t n = 0; n < seq.count(); ++n) {
    const bool mine = p.start[n] != kSkipped && takes_chunks(p, t, seq[n]);
    chunks.slots.push_back(!mine ? -2 : p.start[n] >= 0 ? p.start[n] : std::max<std::int64_t>(p.slots_of(n)[0], 0));
  }
  ChunkGatedDeltaRuleOptions o = chunk_options(options);
  o.has_initial_state = options.has_initial_state;
  chunk_gated_delta_rule::run(chunks, {t.q, t.k, t.v, t.g, t.beta, t.from, t.o, t.to, {}}, seq, o);
}

}  // namespace

void run(const Problem& p, const Tensors& t, const SeqLens& seq, const Options& options, Scratch& scratch) {
  if (t.k.dtype == DType::kF64) {
    reference<double>(p, t, seq, options);
    return;
  }
  const Args args = make_args(p, t, options, scratch);
  auto* live = static_cast<std::int64_t*>(scratch.bytes(static_cast<std::size_t>(seq.count()) * sizeof(std::int64_t)));
  std::int64_t count = 0;
  bool chunks = false;
  for (std::int64_t n = 0; n < seq.count(); ++n) {
    if (p.start[n] == kSkipped) {
      clear_output(args, p.sizes, seq[n], dtype_bytes(t.o.dtype));
    } else if (takes_chunks(p, t, seq[n])) {
      chunks = true;
    } else if (seq[n].length() > 0) {
      live[count++] = n;
    } else if (p.slots_of(n)[0] != kDropped) {
      copy_state(t, p.start[n], p.slots_of(n)[0]);
    }
  }
  if (chunks) {
    run_chunks(p, t, seq, options);
  }
  const std::int64_t tiles = p.sizes.group() * ((p.sizes.V + kColumns - 1) / kColumns);
  const Partition cut = partition(count, p.sizes.HK, tiles, parallel_threads());
  const Kernels& kernels = recurrent_gated_delta_rule_kernels_for(active_isa());
  const TensorView& states = t.to.defined() ? t.to : t.from;
  const auto kernel = kernels.run[data_type_index(t.k.dtype)][states.dtype == DType::kBF16 ? 1 : 0];
  const std::int64_t units = cut.units();
  const auto unit_at = [&](std::int64_t i) {
    const Place place = place_of(cut, i);
    const std::int64_t n = live[place.sequence];
    const Sequence& s = seq[n];
    return Unit{s.row,      s.begin,    s.end,         place.key_head,      place.first,
                place.last, p.start[n], p.slots_of(n), p.per_token ? 1 : 0, nullptr};
  };
  Shares shares(units, parallel_threads());
  parallel_for(shares.workers(), [&](std::int64_t worker) {
    Scratch own;
    float* workspace = own.floats(kernels.workspace(args));
    for (std::int64_t i = shares.take(worker); i >= 0; i = shares.take(worker)) {
      Unit unit = unit_at(i);
      if (i + 1 < units && cut.parts == 1) {
        unit.ahead = first_state(t.from, unit_at(i + 1), p.sizes.group());
      }
      kernel(args, unit, workspace);
    }
  });
}

}  // namespace recurrence

std::int64_t recurrent_tokens() { return recurrence::kTokenByToken; }

void recurrent_gated_delta_rule(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& g,
                                const TensorView& gk, const TensorView& beta, const TensorView& state,
                                const TensorView& o, const SeqLens& seq,
                                const RecurrentGatedDeltaRuleOptions& options) {
  const FloatEnvironment environment;
  Scratch scratch;
  const recurrence::Tensors t{q, k, v, g, gk, beta, state, state, o};
  const auto p = check_pool("recurrent_gated_delta_rule", t, seq, options, scratch);
  run(p, t, seq, options, scratch);
}

void recurrent_gated_delta_rule_fwd(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& g,
                                    const TensorView& gk, const TensorView& beta, const TensorView& initial_state,
                                    const TensorView& o, const TensorView& final_state, const SeqLens& seq,
                                    const RecurrentGatedDeltaRuleOptions& options) {
  const FloatEnvironment environment;
  Scratch scratch;
  const recurrence::Tensors t{q, k, v, g, gk, beta, initial_state, final_state, o};
  const auto p = check_fwd("recurrent_gated_delta_rule_fwd", t, seq, options, scratch);
  run(p, t, seq, options, scratch);
}

}  // namespace tidegate
