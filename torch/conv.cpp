// causal_conv1d_fwd, _bwd, _update as torch operators. Contracts: include/tidegate/conv.h and docs/operators.md.
#include "adapter.h"

namespace tidegate::adapter {
namespace {

struct Sizes {
  std::int64_t rows, tokens, channels;
};

// Only what is needed to find boundaries and to allocate; the operator itself checks the rest.
Sizes sizes_of(std::string_view op, const TensorView& x, Layout layout) {
  const int rank = (is_head_major(layout) ? 3 : 2) + (has_batch(layout) ? 1 : 0);
  check(x.rank == rank, op, ": x: expected ", rank, " dimensions, got ", x.rank, " in ", Shape{x});
  return {has_batch(layout) ? x.size(0) : 1, x.size(-2), x.size(-1) * (is_head_major(layout) ? x.size(-3) : 1)};
}

Tensor empty_output(std::string_view op, const TensorView& x, const Sizes& s, Layout layout, std::int64_t head_num) {
  if (head_num == 0) {
    return empty_like(x);
  }
  check(head_num > 0 && s.channels % head_num == 0, op, ": head_num: expected 0 or a divisor of ", s.channels,
        " channels, got ", head_num);
  std::vector<std::int64_t> sizes = {head_num, s.tokens, s.channels / head_num};
  if (has_batch(layout)) {
    sizes.insert(sizes.begin(), s.rows);
  }
  return empty(sizes, scalar_type(x.dtype));
}

struct ConvCall {
  std::string_view op;
  Layout layout;
  TensorView x, weight, bias, initial_state;
  Sizes sizes;
  SeqLens seq;
  CausalConv1dOptions options;
};

ConvCall conv_call(std::string_view op, Tensor& x, const Tensor& weight, const Optional& bias,
                   const Optional& initial_state, const Optional& cu_seqlens,
                   const std::optional<std::string>& activation, std::int64_t head_num,
                   const std::string& layout_name) {
  const Layout layout = parse_layout(op, layout_name);
  const TensorView xv = dense(op, "x", x);
  const Sizes sizes = sizes_of(op, xv, layout);
  return {op,
          layout,
          xv,
          view(op, "weight", weight),
          view(op, "bias", bias),
          view(op, "initial_state", initial_state),
          sizes,
          boundaries(op, cu_seqlens, sizes.rows, sizes.tokens),
          {parse_activation(op, activation.value_or("")), head_num, layout}};
}

std::tuple<Tensor, Tensor> fwd(Tensor x, Tensor weight, Optional bias, Optional initial_state, Optional cu_seqlens,
                               std::optional<std::string> activation, std::int64_t head_num, bool output_final_state,
                               std::int64_t state_len, std::string layout) {
  constexpr std::string_view op = "causal_conv1d_fwd";
  const ConvCall c = conv_call(op, x, weight, bias, initial_state, cu_seqlens, activation, head_num, layout);
  check(state_len >= 0, op, ": state_len: expected >= 0, got ", state_len);
  Tensor y = empty_output(op, c.x, c.sizes, c.layout, head_num);
  Tensor final_state = nothing(scalar_type(c.x.dtype));
  if (output_final_state) {
    const std::int64_t from_initial = c.initial_state.rank == 3 ? c.initial_state.size(2) : 0;
    const std::int64_t taps = c.weight.rank == 2 ? c.weight.size(1) : 2;
    const std::int64_t length = state_len > 0 ? state_len : from_initial > 0 ? from_initial : taps - 1;
    final_state = empty({c.seq.count(), c.sizes.channels, length}, scalar_type(c.x.dtype));
  }
  causal_conv1d_fwd(c.x, c.weight, c.bias, c.initial_state, view(op, "y", y),
                    output_final_state ? view(op, "final_state", final_state) : TensorView{}, c.seq, c.options);
  return {y, final_state};
}

void fwd_out(Tensor x, Tensor weight, Optional bias, Optional initial_state, Optional cu_seqlens,
             std::optional<std::string> activation, std::int64_t head_num, std::string layout, Tensor y,
             Optional final_state) {
  constexpr std::string_view op = "causal_conv1d_fwd";
  const ConvCall c = conv_call(op, x, weight, bias, initial_state, cu_seqlens, activation, head_num, layout);
  check_apart(op, {{"y", y}, {"final_state", final_state}}, {{"cu_seqlens", cu_seqlens}});
  causal_conv1d_fwd(c.x, c.weight, c.bias, c.initial_state, view(op, "y", y), view(op, "final_state", final_state),
                    c.seq, c.options);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bwd(Tensor dy, Tensor x, Tensor weight, Optional bias,
                                               Optional initial_state, Optional dfinal_state, Optional cu_seqlens,
                                               std::optional<std::string> activation, std::int64_t head_num,
                                               std::string layout) {
  constexpr std::string_view op = "causal_conv1d_bwd";
  const ConvCall c = conv_call(op, x, weight, bias, initial_state, cu_seqlens, activation, head_num, layout);
  const TensorView dyv = dense(op, "dy", dy);
  const ScalarType type = scalar_type(c.x.dtype);
  const ScalarType sum_type = c.x.dtype == DType::kF64 ? ScalarType::Double : ScalarType::Float;
  Tensor dx = empty_like(c.x);
  Tensor dweight = empty_like(c.weight);
  if (dweight.scalar_type() != sum_type) {
    dweight = empty(std::vector<std::int64_t>(c.weight.sizes, c.weight.sizes + c.weight.rank), sum_type);
  }
  Tensor dbias = c.bias.defined() ? empty({c.sizes.channels}, sum_type) : nothing(sum_type);
  Tensor dinitial = c.initial_state.defined() ? empty_like(c.initial_state) : nothing(type);
  causal_conv1d_bwd(dyv, c.x, c.weight, c.bias, c.initial_state, view(op, "dfinal_state", dfinal_state),
                    view(op, "dx", dx), view(op, "dweight", dweight),
                    c.bias.defined() ? view(op, "dbias", dbias) : TensorView{},
                    c.initial_state.defined() ? view(op, "dinitial_state", dinitial) : TensorView{}, c.seq, c.options);
  return {dx, dweight, dbias, dinitial};
}

void bwd_out(Tensor dy, Tensor x, Tensor weight, Optional bias, Optional initial_state, Optional dfinal_state,
             Optional cu_seqlens, std::optional<std::string> activation, std::int64_t head_num, std::string layout,
             Optional dx, Optional dweight, Optional dbias, Optional dinitial_state) {
  constexpr std::string_view op = "causal_conv1d_bwd";
  const ConvCall c = conv_call(op, x, weight, bias, initial_state, cu_seqlens, activation, head_num, layout);
  check_apart(op, {{"dx", dx}, {"dweight", dweight}, {"dbias", dbias}, {"dinitial_state", dinitial_state}},
              {{"cu_seqlens", cu_seqlens}});
  causal_conv1d_bwd(dense(op, "dy", dy), c.x, c.weight, c.bias, c.initial_state, view(op, "dfinal_state", dfinal_state),
                    view(op, "dx", dx), view(op, "dweight", dweight), view(op, "dbias", dbias),
                    view(op, "dinitial_state", dinitial_state), c.seq, c.options);
}

void run_update(Tensor& x, const Tensor& conv_state, const Tensor& weight, const Optional& bias,
                const Optional& cu_seqlens, const Optional& cache_indices, const Optional& has_initial_state,
                const Optional& num_accepted_tokens, const Optional& cache_seqlens, std::int64_t pad_slot_id,
                const std::string& state_anchor, const std::optional<std::string>& activation, std::int64_t head_num,
                const std::string& layout_name, const Tensor* given, Tensor* made) {
  constexpr std::string_view op = "causal_conv1d_update";
  const ConvCall c = conv_call(op, x, weight, bias, std::nullopt, cu_seqlens, activation, head_num, layout_name);
  const auto indices = integers(op, "cache_indices", cache_indices);
  const auto initial = booleans(op, "has_initial_state", has_initial_state);
  const auto accepted = integers(op, "num_accepted_tokens", num_accepted_tokens);
  const auto written = integers(op, "cache_seqlens", cache_seqlens);
  check(state_anchor == "tail" || state_anchor == "head", op, ": state_anchor: expected tail or head, got ",
        state_anchor);
  const auto given_but_empty = [&](std::string_view name, const Optional& t, std::size_t length) {
    check(!t.has_value() || length > 0 || c.seq.count() == 0, op, ": ", name, ": expected ", c.seq.count(),
          " entries (one per sequence), got 0");
  };
  given_but_empty("cache_indices", cache_indices, indices.size());
  given_but_empty("has_initial_state", has_initial_state, initial.size());
  given_but_empty("num_accepted_tokens", num_accepted_tokens, accepted.size());
  given_but_empty("cache_seqlens", cache_seqlens, written.size());
  CausalConv1dUpdateOptions o;
  o.activation = c.options.activation;
  o.head_num = head_num;
  o.layout = c.layout;
  o.cache_indices = indices;
  o.has_initial_state = initial;
  o.num_accepted_tokens = accepted;
  o.cache_seqlens = written;
  o.pad_slot_id = pad_slot_id;
  o.state_anchor_head = state_anchor == "head";
  check_apart(op, {{"conv_state", conv_state}, {"y", given != nullptr ? Optional(*given) : Optional()}},
              {{"cu_seqlens", cu_seqlens},
               {"cache_indices", cache_indices},
               {"has_initial_state", has_initial_state},
               {"num_accepted_tokens", num_accepted_tokens},
               {"cache_seqlens", cache_seqlens}});
  if (made != nullptr) {
    *made = empty_output(op, c.x, c.sizes, c.layout, head_num);
  }
  causal_conv1d_update(c.x, view(op, "conv_state", conv_state), c.weight, c.bias,
                       view(op, "y", made != nullptr ? *made : *given), c.seq, o);
}

Tensor update(Tensor x, Tensor conv_state, Tensor weight, Optional bias, Optional cu_seqlens, Optional cache_indices,
              Optional has_initial_state, Optional num_accepted_tokens, Optional cache_seqlens,
              std::int64_t pad_slot_id, std::string state_anchor, std::optional<std::string> activation,
              std::int64_t head_num, std::string layout) {
  Tensor y;
  run_update(x, conv_state, weight, bias, cu_seqlens, cache_indices, has_initial_state, num_accepted_tokens,
             cache_seqlens, pad_slot_id, state_anchor, activation, head_num, layout, nullptr, &y);
  return y;
}

void update_out(Tensor x, Tensor conv_state, Tensor weight, Optional bias, Optional cu_seqlens, Optional cache_indices,
                Optional has_initial_state, Optional num_accepted_tokens, Optional cache_seqlens,
                std::int64_t pad_slot_id, std::string state_anchor, std::optional<std::string> activation,
                std::int64_t head_num, std::string layout, Tensor y) {
  run_update(x, conv_state, weight, bias, cu_seqlens, cache_indices, has_initial_state, num_accepted_tokens,
             cache_seqlens, pad_slot_id, state_anchor, activation, head_num, layout, &y, nullptr);
}

}  // namespace

// cu_seqlens stands before the star because torch registers autograd only for positional tensors; pass it by keyword.
STABLE_TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  m.def(
      "causal_conv1d_fwd(Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_state=None, "
      "Tensor? cu_seqlens=None, *, str? activation=None, int head_num=0, bool output_final_state=False, int "
      "state_len=0, "
      "str layout='BSND') -> (Tensor y, Tensor final_state)");
  m.def(
      "causal_conv1d_fwd.out(Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_state=None, "
      "Tensor? cu_seqlens=None, *, str? activation=None, int head_num=0, str layout='BSND', Tensor(a!) y, "
      "Tensor(b!)? final_state=None) -> ()");
  m.def(
      "causal_conv1d_bwd(Tensor dy, Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_state=None, "
      "Tensor? dfinal_state=None, Tensor? cu_seqlens=None, *, str? activation=None, int head_num=0, "
      "str layout='BSND') -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_state)");
  m.def(
      "causal_conv1d_bwd.out(Tensor dy, Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_state=None, "
      "Tensor? dfinal_state=None, Tensor? cu_seqlens=None, *, str? activation=None, int head_num=0, "
      "str layout='BSND', Tensor(a!)? dx=None, Tensor(b!)? dweight=None, Tensor(c!)? dbias=None, "
      "Tensor(d!)? dinitial_state=None) -> ()");
  m.def(
      "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias=None, *, "
      "Tensor? cu_seqlens=None, Tensor? cache_indices=None, Tensor? has_initial_state=None, "
      "Tensor? num_accepted_tokens=None, Tensor? cache_seqlens=None, int pad_slot_id=-1, str state_anchor='tail', "
      "str? activation=None, int head_num=0, str layout='TND') -> Tensor y");
  m.def(
      "causal_conv1d_update.out(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias=None, *, "
      "Tensor? cu_seqlens=None, Tensor? cache_indices=None, Tensor? has_initial_state=None, "
      "Tensor? num_accepted_tokens=None, Tensor? cache_seqlens=None, int pad_slot_id=-1, str state_anchor='tail', "
      "str? activation=None, int head_num=0, str layout='TND', Tensor(b!) y) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tidegate, CPU, m) {
  m.impl("causal_conv1d_fwd", TORCH_BOX(&fwd));
  m.impl("causal_conv1d_fwd.out", TORCH_BOX(&fwd_out));
  m.impl("causal_conv1d_bwd", TORCH_BOX(&bwd));
  m.impl("causal_conv1d_bwd.out", TORCH_BOX(&bwd_out));
  m.impl("causal_conv1d_update", TORCH_BOX(&update));
  m.impl("causal_conv1d_update.out", TORCH_BOX(&update_out));
}

}  // namespace tidegate::adapter
