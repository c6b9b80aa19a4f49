// gdn_packed_decode as a torch operator. Contract: include/tidegate/decode.h.
#include "slots.h"

namespace tidegate::adapter {
namespace {

constexpr std::string_view op = "gdn_packed_decode";

// The arguments, as torch hands them over.
struct Inputs {
  Tensor mixed;
  Optional z, a, b;
  Tensor conv_state, conv_weight;
  Optional conv_bias;
  Tensor A_log;
  Optional dt_bias;
  Tensor state, norm_weight, state_indices;
  Optional conv_indices;
  std::int64_t HK, HV, K, V;
  Optional cu_seqlens, num_accepted_tokens;
  std::int64_t null_slot;
  std::optional<double> scale;
  double eps;
  const std::string &activation, &norm_rounding, &projection;
  bool state_v_first;
};

void run(Inputs in, const Tensor* given, Tensor* made) {
  const TensorView mixed = dense(op, "mixed", in.mixed);
  check(mixed.rank == 2, op, ": mixed: expected 2 dimensions, got ", mixed.rank, " in ", Shape{mixed});
  const SeqLens seq = packed_sequences(op, in.cu_seqlens, mixed.size(0));
  const SlotIndices indices = slot_indices(op, in.state_indices, seq);
  const auto rows = per_sequence(op, "conv_indices", in.conv_indices, seq);
  const auto accepted = per_sequence(op, "num_accepted_tokens", in.num_accepted_tokens, seq);
  GdnPackedDecodeOptions o;
  o.HK = in.HK;
  o.HV = in.HV;
  o.K = in.K;
  o.V = in.V;
  o.projection = parse_projection(op, in.projection);
  o.state_indices = indices.slots;
  o.states_per_sequence = indices.per_sequence;
  o.num_accepted_tokens = accepted;
  o.conv_indices = rows;
  o.null_slot = in.null_slot;
  o.state_v_first = in.state_v_first;
  o.scale = in.scale;
  o.norm = {in.eps, parse_activation(op, in.activation), parse_rounding(op, in.norm_rounding, "norm_rounding")};
  check_apart(
      op, {{"conv_state", in.conv_state}, {"state", in.state}, {"y", given != nullptr ? Optional(*given) : Optional()}},
      {{"cu_seqlens", in.cu_seqlens},
       {"state_indices", in.state_indices},
       {"conv_indices", in.conv_indices},
       {"num_accepted_tokens", in.num_accepted_tokens}});
  if (made != nullptr) {
    // A result wider than a state is an error that the operator finds; memory is not taken for it.
    const TensorView pool = view(op, "state", in.state);
    const bool fits =
        pool.rank == 4 && in.HV >= 1 && in.V >= 1 && in.HV <= pool.size(1) && in.V <= pool.size(2) * pool.size(3);
    *made = empty({mixed.size(0), fits ? in.HV * in.V : 0}, scalar_type(mixed.dtype));
  }
  gdn_packed_decode(mixed, dense(op, "z", in.z), dense(op, "a", in.a), dense(op, "b", in.b),
                    view(op, "conv_state", in.conv_state), view(op, "conv_weight", in.conv_weight),
                    view(op, "conv_bias", in.conv_bias), view(op, "A_log", in.A_log), view(op, "dt_bias", in.dt_bias),
                    view(op, "state", in.state), view(op, "norm_weight", in.norm_weight),
                    view(op, "y", made != nullptr ? *made : *given), seq, o);
}

Tensor step(Tensor mixed, Optional z, Optional a, Optional b, Tensor conv_state, Tensor conv_weight, Optional conv_bias,
            Tensor A_log, Optional dt_bias, Tensor state, Tensor norm_weight, Tensor state_indices,
            Optional conv_indices, std::int64_t HK, std::int64_t HV, std::int64_t K, std::int64_t V,
            Optional cu_seqlens, Optional num_accepted_tokens, std::int64_t null_slot, std::optional<double> scale,
            double eps, std::string activation, std::string norm_rounding, std::string projection, bool state_v_first) {
  Tensor y;
  run({mixed,
       z,
       a,
       b,
       conv_state,
       conv_weight,
       conv_bias,
       A_log,
       dt_bias,
       state,
       norm_weight,
       state_indices,
       conv_indices,
       HK,
       HV,
       K,
       V,
       cu_seqlens,
       num_accepted_tokens,
       null_slot,
       scale,
       eps,
       activation,
       norm_rounding,
       projection,
       state_v_first},
      nullptr, &y);
  return y;
}

void step_out(Tensor mixed, Optional z, Optional a, Optional b, Tensor conv_state, Tensor conv_weight,
              Optional conv_bias, Tensor A_log, Optional dt_bias, Tensor state, Tensor norm_weight,
              Tensor state_indices, Optional conv_indices, std::int64_t HK, std::int64_t HV, std::int64_t K,
              std::int64_t V, Optional cu_seqlens, Optional num_accepted_tokens, std::int64_t null_slot,
              std::optional<double> scale, double eps, std::string activation, std::string norm_rounding,
              std::string projection, bool state_v_first, Tensor y) {
  run({mixed,
       z,
       a,
       b,
       conv_state,
       conv_weight,
       conv_bias,
       A_log,
       dt_bias,
       state,
       norm_weight,
       state_indices,
       conv_indices,
       HK,
       HV,
       K,
       V,
       cu_seqlens,
       num_accepted_tokens,
       null_slot,
       scale,
       eps,
       activation,
       norm_rounding,
       projection,
       state_v_first},
      &y, nullptr);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  m.def(
      "gdn_packed_decode(Tensor mixed, Tensor? z, Tensor? a, Tensor? b, Tensor(a!) conv_state, Tensor conv_weight, "
      "Tensor? conv_bias, Tensor A_log, Tensor? dt_bias, Tensor(b!) state, Tensor norm_weight, *, "
      "Tensor state_indices, Tensor? conv_indices=None, int HK, int HV, int K, int V, Tensor? cu_seqlens=None, "
      "Tensor? num_accepted_tokens=None, int null_slot=-1, float? scale=None, float eps=1e-6, str activation='silu', "
      "str norm_rounding='hf', str projection='qkv', bool state_v_first=False) -> Tensor y");
  m.def(
      "gdn_packed_decode.out(Tensor mixed, Tensor? z, Tensor? a, Tensor? b, Tensor(a!) conv_state, Tensor conv_weight, "
      "Tensor? conv_bias, Tensor A_log, Tensor? dt_bias, Tensor(b!) state, Tensor norm_weight, *, "
      "Tensor state_indices, Tensor? conv_indices=None, int HK, int HV, int K, int V, Tensor? cu_seqlens=None, "
      "Tensor? num_accepted_tokens=None, int null_slot=-1, float? scale=None, float eps=1e-6, str activation='silu', "
      "str norm_rounding='hf', str projection='qkv', bool state_v_first=False, Tensor(c!) y) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tidegate, CPU, m) {
  m.impl("gdn_packed_decode", TORCH_BOX(&step));
  m.impl("gdn_packed_decode.out", TORCH_BOX(&step_out));
}

}  // namespace tidegate::adapter
