// gdn_packed_decode: the kernels of the convolution, the gates, the recurrence and the gated norm, one key head after
// the other, in one parallel region. What one kernel hands to the next is a few rows in the task's own memory.
#include <cmath>
#include <cstring>

#include "base/element.h"
#include "base/float_environment.h"
#include "base/shares.h"
#include "ops/gdn_gating/kernel.h"
#include "ops/gdn_packed_decode/problem.h"
#include "ops/recurrent_gated_delta_rule/kernel.h"
#include "ops/rms_norm_gated/kernel.h"
#include "ops/rms_norm_gated/reference.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {
namespace packed_decode {
namespace {

using causal_conv1d::kChannelBlock;

char* at(const TensorView& t, std::int64_t offset) { return t.as<char>() + offset * dtype_bytes(t.dtype); }

// Rows of a [T, ..] tensor: `heads` rows of `width` elements for every token.
Rows head_rows(char* data, std::int64_t tokens, std::int64_t token_step, std::int64_t heads, std::int64_t width) {
  return {data, 2, {tokens, heads}, {token_step, width}};
}
Rows token_rows(char* data, std::int64_t tokens, std::int64_t token_step) { return {data, 1, {tokens}, {token_step}}; }

// What all tasks share.
struct Step {
  const Problem& p;
  const Tensors& t;
  const Options& o;
  const SeqLens& seq;
  const float *rate, *dt_bias, *norm_weight;
  std::int64_t K = o.K, V = o.V, G = o.HV / o.HK;
  std::int64_t width = 2 * K + G * V;  // conv channels of a key head
  std::int64_t longest = seq.longest();
  DType dtype = t.mixed.dtype;
  int type = data_type_index(dtype);
  int bytes = dtype_bytes(dtype);
  const Isa isa = active_isa();
  const causal_conv1d::Kernels& conv = causal_conv1d_kernels_for(isa);
  const recurrence::Kernels& rule = recurrent_gated_delta_rule_kernels_for(isa);

  recurrence::Args rule_args() const {
    recurrence::Args a{};
    a.group = G;
    a.K = K;
    a.V = V;
    a.scale = static_cast<float>(p.states.scale);
    a.beta_scale = 1.0f;
    a.use_qk_l2norm = true;
    a.v_first = o.state_v_first;
    return a;
  }
};

// One thread's memory, and what it does for one key head.
class Worker {
 public:
  Worker(const Step& step, Scratch& scratch) : s_(step), rule_(step.rule_args()) {
    const auto elements = [&](std::int64_t n) {
      return static_cast<char*>(scratch.bytes(static_cast<std::size_t>(n * s_.bytes)));
    };
    taps_ = scratch.floats((s_.p.taps + 1) * s_.width);
    wide_ = scratch.floats(s_.p.taps * kChannelBlock);
    bias_ = scratch.floats(kChannelBlock);
    std::memset(bias_, 0, kChannelBlock * sizeof(float));
    rows_ = elements(s_.longest * s_.width);
    g_ = scratch.floats(s_.longest * s_.G);
    beta_ = elements(s_.longest * s_.G);
    out_ = elements(s_.longest * s_.G * s_.V);
    rstd_ = scratch.floats(s_.longest * s_.G);
    workspace_ = scratch.floats(s_.rule.workspace(rule_));
  }

  // Packs the taps of a key head. Pairing them costs more than it saves for a few sequences.
  void open(std::int64_t key_head, std::int64_t sequences) {
    head_ = key_head;
    paired_ = sequences >= 4;
    for_parts([&](const Part&, std::int64_t channel, std::int64_t n, std::int64_t offset) {
      for_blocks(n, [&](std::int64_t c, std::int64_t block) {
        pack(channel + c, block, taps_ + (offset + c) * (s_.p.taps + 1));
      });
    });
  }

  // `next` is the sequence that follows, -1 if there is none.
  void run(std::int64_t n, std::int64_t next) {
    const Sequence& s = s_.seq[n];
    convolve(n, s);
    open_gates(s);
    recur(n, next);
    normalise(s);
  }

 private:
  // f(part, its first channel of the convolution, its channels, where they begin in a row of rows_)
  template <class F>
  void for_parts(F f) const {
    const std::int64_t keys = s_.o.HK * s_.K;
    f(s_.p.parts.q, head_ * s_.K, s_.K, 0);
    f(s_.p.parts.k, keys + head_ * s_.K, s_.K, s_.K);
    f(s_.p.parts.v, 2 * keys + head_ * s_.G * s_.V, s_.G * s_.V, 2 * s_.K);
  }
  template <class F>
  static void for_blocks(std::int64_t n, F f) {
    for (std::int64_t c = 0; c < n; c += kChannelBlock) {
      f(c, std::min(n - c, kChannelBlock));
    }
  }

  void pack(std::int64_t channel, std::int64_t n, float* to) {
    const TensorView& w = s_.t.conv_weight;
    const TensorView& b = s_.t.conv_bias;
    for (std::int64_t c = 0; b.defined() && c < n; ++c) {
      bias_[c] = static_cast<float>(read_element(b, (channel + c) * b.strides[0]));
    }
    causal_conv1d::Weights source{at(w, channel * w.strides[0]), w.strides[0], w.strides[1], bias_};
    int type = data_type_index(w.dtype);
    if (w.dtype == DType::kF64) {
      for (std::int64_t i = 0; i < n * s_.p.taps; ++i) {
        const std::int64_t c = channel + i / s_.p.taps;
        wide_[i] = static_cast<float>(read_element(w, offset_of(w, c, i % s_.p.taps)));
      }
      source = {wide_, s_.p.taps, 1, bias_};
      type = data_type_index(DType::kF32);
    }
    s_.conv.pack[type][s_.p.taps - 2](source, 0, n, paired_ && s_.dtype == DType::kBF16, to);
  }

  void convolve(std::int64_t n, const Sequence& s) {
    const TensorView& pool = s_.t.conv_state;
    const std::int64_t L = s.length();
    for_parts([&](const Part& part, std::int64_t channel, std::int64_t count, std::int64_t offset) {
      const std::int64_t token = part.tensor->strides[0];
      const std::int64_t from = s.begin * token + part.first + head_ * part.step;
      for_blocks(count, [&](std::int64_t c, std::int64_t block) {
        causal_conv1d::UpdateArgs a{};
        a.x = {at(*part.tensor, from + c), 0, 0, token, block};
        a.y = {rows_ + (offset + c) * s_.bytes, 0, 0, s_.width, block};
        a.pool = {at(pool, (channel + c) * pool.strides[1]), pool.strides[0], pool.strides[1], pool.strides[2],
                  pool.size(2)};
        a.mode = s_.p.mode;
        a.order = paired_ ? causal_conv1d::Order::kPaired : causal_conv1d::Order::kNatural;
        a.silu = true;
        s_.conv.update[s_.type][s_.p.taps - 2](a, {n, 0, 0, L, 0, L, 0, block}, s_.p.rows[n],
                                               taps_ + (offset + c) * (s_.p.taps + 1));
      });
    });
  }

  void open_gates(const Sequence& s) {
    const auto rows = [&](const Part& part) {
      const std::int64_t token = part.tensor->strides[0];
      return token_rows(at(*part.tensor, s.begin * token + part.first + head_ * part.step), s.length(), token);
    };
    gdn_gating::Args a{};
    a.a = rows(s_.p.parts.a);
    a.b = rows(s_.p.parts.b);
    a.g = token_rows(reinterpret_cast<char*>(g_), s.length(), s_.G);
    a.beta = token_rows(beta_, s.length(), s_.G);
    a.rate = s_.rate + head_ * s_.G;
    a.dt_bias = s_.dt_bias + head_ * s_.G;
    a.width = a.heads = s_.G;
    a.beta_scale = 1.0f;
    gdn_gating_kernels_for(s_.isa).fwd[s_.type][s_.type](a, 0, s.length());
  }

  recurrence::States states() const {
    const TensorView& t = s_.t.state;
    return {at(t, head_ * s_.G * t.strides[1]), t.strides[0], t.strides[1], t.strides[2]};
  }

  void recur(std::int64_t n, std::int64_t next) {
    const recurrence::Problem& p = s_.p.states;
    rule_.q = {rows_, 0, s_.width, 0};
    rule_.k = {rows_ + s_.K * s_.bytes, 0, s_.width, 0};
    rule_.v = {rows_ + 2 * s_.K * s_.bytes, 0, s_.width, s_.V};
    rule_.o = {out_, 0, s_.G * s_.V, s_.V};
    rule_.g = {{g_, 0, s_.G, 1}, data_type_index(DType::kF32)};
    rule_.beta = {{beta_, 0, s_.G, 1}, s_.type};
    rule_.from = rule_.to = states();
    const std::int64_t tiles = (s_.V + recurrence::kColumns - 1) / recurrence::kColumns;
    const TensorView& state = s_.t.state;
    const void* ahead =
        next < 0 || p.start[next] < 0 ? nullptr : at(state, offset_of(state, p.start[next], head_ * s_.G));
    const recurrence::Unit unit{
        0, 0, s_.seq[n].length(), 0, 0, s_.G * tiles, p.start[n], p.slots_of(n), p.per_token ? 1 : 0, ahead};
    s_.rule.run[s_.type][state.dtype == DType::kBF16 ? 1 : 0](rule_, unit, workspace_);
  }

  void normalise(const Sequence& s) {
    const TensorView& y = s_.t.y;
    const Part& z = s_.p.parts.z;
    const std::int64_t L = s.length(), token = z.tensor->strides[0];
    rms_norm_gated::Args a{};
    a.x = token_rows(out_, L * s_.G, s_.V);
    a.z = head_rows(at(*z.tensor, s.begin * token + z.first + head_ * z.step), L, token, s_.G, s_.V);
    a.y = head_rows(at(y, s.begin * y.strides[0] + head_ * s_.G * s_.V), L, y.strides[0], s_.G, s_.V);
    a.rstd = token_rows(reinterpret_cast<char*>(rstd_), L * s_.G, 1);
    a.weight = s_.norm_weight;
    a.width = s_.V;
    a.eps = static_cast<float>(s_.o.norm.eps);
    a.sigmoid = s_.o.norm.activation == Activation::kSigmoid;
    a.hf = s_.o.norm.rounding == Rounding::kHf;
    a.round_product = rms_norm_gated::rounds_product(s_.dtype, s_.t.norm_weight);
    rms_norm_gated_kernels_for(s_.isa).fwd[s_.type](a, 0, L * s_.G);
  }

  const Step& s_;
  recurrence::Args rule_;
  std::int64_t head_ = -1;
  bool paired_ = false;
  float *taps_, *wide_, *bias_, *g_, *rstd_, *workspace_;
  char *rows_, *beta_, *out_;
};

void clear_output(const TensorView& y, const Sequence& s) {
  for (std::int64_t t = s.begin; t < s.end; ++t) {
    std::memset(at(y, t * y.strides[0]), 0, static_cast<std::size_t>(y.size(1) * dtype_bytes(y.dtype)));
  }
}

void run(const Problem& p, const Tensors& t, const SeqLens& seq, const Options& o, Scratch& scratch) {
  float* rate = scratch.floats(o.HV);
  float* dt_bias = scratch.floats(o.HV);
  float* weight = scratch.floats(o.V);
  auto* live = static_cast<std::int64_t*>(scratch.bytes(static_cast<std::size_t>(seq.count()) * sizeof(std::int64_t)));
  for (std::int64_t h = 0; h < o.HV; ++h) {
    rate[h] = static_cast<float>(std::exp(read_element(t.A_log, h * t.A_log.strides[0])));
    dt_bias[h] = t.dt_bias.defined() ? static_cast<float>(read_element(t.dt_bias, h * t.dt_bias.strides[0])) : 0.0f;
  }
  copy_parameter(t.norm_weight, weight);
  rms_norm_gated_kernels_for(active_isa()).pack[data_type_index(t.mixed.dtype)](weight, o.V);
  std::int64_t count = 0;
  for (std::int64_t n = 0; n < seq.count(); ++n) {
    if (p.states.start[n] == recurrence::kSkipped) {
      clear_output(t.y, seq[n]);
    } else {
      live[count++] = n;
    }
  }
  const Step step{p, t, o, seq, rate, dt_bias, weight};
  const std::int64_t group = sequences_per_task(count, o.HK, parallel_threads());
  const std::int64_t tasks = (count + group - 1) / group * o.HK;
  Shares shares(tasks, parallel_threads());
  parallel_for(shares.workers(), [&](std::int64_t thread) {
    Scratch own;
    Worker worker(step, own);
    for (std::int64_t task = shares.take(thread); task >= 0; task = shares.take(thread)) {
      const std::int64_t first = task / o.HK * group, last = std::min(first + group, count);
      worker.open(task % o.HK, last - first);
      for (std::int64_t i = first; i < last; ++i) {
        worker.run(live[i], i + 1 < last ? live[i + 1] : -1);
      }
    }
  });
}

}  // namespace
}  // namespace packed_decode

void gdn_packed_decode(const TensorView& mixed, const TensorView& z, const TensorView& a, const TensorView& b,
                       const TensorView& conv_state, const TensorView& conv_weight, const TensorView& conv_bias,
                       const TensorView& A_log, const TensorView& dt_bias, const TensorView& state,
                       const TensorView& norm_weight, const TensorView& y, const SeqLens& seq,
                       const GdnPackedDecodeOptions& options) {
  const FloatEnvironment environment;
  Scratch scratch;
  const packed_decode::Tensors t{mixed,     z,     a,       b,     conv_state,  conv_weight,
                                 conv_bias, A_log, dt_bias, state, norm_weight, y};
  const packed_decode::Problem p = check_call("gdn_packed_decode", t, seq, options, scratch);
  packed_decode::run(p, t, seq, options, scratch);
}

}  // namespace tidegate
