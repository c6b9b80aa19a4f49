// The experts of a layer as torch operators. Contract: include/tidegate/moe.h.
#include "adapter.h"

namespace tidegate::adapter {
namespace {

using Gradients =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

struct Shared {
  const Optional &gate, &up, &down, &router;
};
struct Lora {
  const Optional &gate_up_a, &gate_up_b, &down_a, &down_b;
};

MoeExpertsInputs inputs(std::string_view op, Tensor& x, const Tensor& ids, const Tensor& weights, const Tensor& gate_up,
                        const Tensor& down, const Shared& s, const Lora& l) {
  return {dense(op, "x", x),
          index_view(op, "ids", ids),
          view(op, "weights", weights),
          view(op, "gate_up", gate_up),
          view(op, "down", down),
          view(op, "shared_gate", s.gate),
          view(op, "shared_up", s.up),
          view(op, "shared_down", s.down),
          view(op, "shared_router", s.router),
          view(op, "gate_up_lora_a", l.gate_up_a),
          view(op, "gate_up_lora_b", l.gate_up_b),
          view(op, "down_lora_a", l.down_a),
          view(op, "down_lora_b", l.down_b)};
}

MoeExpertsOptions options(std::string_view op, const std::string& axes, bool interleaved,
                          const std::string& ids_convention, double gate_up_scale, double down_scale,
                          bool round_y = false) {
  return {parse_weight_axes(op, axes),
          interleaved,
          parse_expert_ids(op, ids_convention),
          round_y,
          gate_up_scale,
          down_scale};
}

// [T*k,2,I] for gate and up that a backward will want. fp64 keeps none.
Tensor room_for_hidden(const MoeExpertsInputs& in, const MoeExpertsOptions& o) {
  const std::int64_t width = in.down.sizes[o.weight_axes == WeightAxes::kNK ? 2 : 1];
  return empty({in.ids.sizes[0] * in.ids.sizes[1], 2, width}, ScalarType::Float);
}

std::tuple<Tensor, Tensor> fwd(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, Optional shared_gate,
                               Optional shared_up, Optional shared_down, Optional shared_router,
                               Optional gate_up_lora_a, Optional gate_up_lora_b, Optional down_lora_a,
                               Optional down_lora_b, std::string weight_axes, bool interleaved,
                               std::string ids_convention, double gate_up_lora_scale, double down_lora_scale,
                               bool round_y, bool save_hidden) {
  constexpr std::string_view op = "moe_experts_fwd";
  const MoeExpertsInputs in =
      inputs(op, x, ids, weights, gate_up, down, {shared_gate, shared_up, shared_down, shared_router},
             {gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b});
  const MoeExpertsOptions o =
      options(op, weight_axes, interleaved, ids_convention, gate_up_lora_scale, down_lora_scale, round_y);
  const bool kept = save_hidden && in.x.dtype != DType::kF64;
  Tensor out = empty_like(in.x);
  Tensor hidden = kept ? room_for_hidden(in, o) : nothing(ScalarType::Float);
  moe_experts_fwd(in, view(op, "out", out), o, kept ? view(op, "hidden", hidden) : TensorView{});
  return {out, hidden};
}
void fwd_out(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, Optional shared_gate,
             Optional shared_up, Optional shared_down, Optional shared_router, Optional gate_up_lora_a,
             Optional gate_up_lora_b, Optional down_lora_a, Optional down_lora_b, std::string weight_axes,
             bool interleaved, std::string ids_convention, double gate_up_lora_scale, double down_lora_scale,
             bool round_y, Tensor out, Optional hidden) {
  constexpr std::string_view op = "moe_experts_fwd";
  moe_experts_fwd(inputs(op, x, ids, weights, gate_up, down, {shared_gate, shared_up, shared_down, shared_router},
                         {gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b}),
                  view(op, "out", out),
                  options(op, weight_axes, interleaved, ids_convention, gate_up_lora_scale, down_lora_scale, round_y),
                  view(op, "hidden", hidden));
}

Gradients bwd(Tensor dout, Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, Optional shared_gate,
              Optional shared_up, Optional shared_down, Optional shared_router, Optional gate_up_lora_a,
              Optional gate_up_lora_b, Optional down_lora_a, Optional down_lora_b, Optional hidden,
              std::string weight_axes, bool interleaved, std::string ids_convention, double gate_up_lora_scale,
              double down_lora_scale, std::int64_t needs) {
  constexpr std::string_view op = "moe_experts_bwd";
  check(needs >= 0 && needs < 4096, op, ": needs: expected 0 to 4095 (a bit for every result), got ", needs);
  MoeExpertsInputs in = inputs(op, x, ids, weights, gate_up, down, {shared_gate, shared_up, shared_down, shared_router},
                               {gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b});
  in.hidden = dense(op, "hidden", hidden);
  // A gradient that is not wanted, or of a tensor that is not there, is an empty tensor.
  int bit = 0;
  const auto make = [&](const TensorView& t) {
    const bool wanted = (needs >> bit++ & 1) != 0 && t.defined();
    return wanted ? empty_weight_like(t) : nothing(scalar_type(t.defined() ? t.dtype : in.x.dtype));
  };
  Gradients g{make(in.x),
              make(in.weights),
              make(in.gate_up),
              make(in.down),
              make(in.shared_gate),
              make(in.shared_up),
              make(in.shared_down),
              make(in.shared_router),
              make(in.gate_up_lora_a),
              make(in.gate_up_lora_b),
              make(in.down_lora_a),
              make(in.down_lora_b)};
  bit = 0;
  const auto made = [&](const TensorView& t, std::string_view name, const Tensor& result) {
    return (needs >> bit++ & 1) != 0 && t.defined() ? view(op, name, result) : TensorView{};
  };
  const MoeExpertsGradients out{made(in.x, "dx", std::get<0>(g)),
                                made(in.weights, "dweights", std::get<1>(g)),
                                made(in.gate_up, "dgate_up", std::get<2>(g)),
                                made(in.down, "ddown", std::get<3>(g)),
                                made(in.shared_gate, "dshared_gate", std::get<4>(g)),
                                made(in.shared_up, "dshared_up", std::get<5>(g)),
                                made(in.shared_down, "dshared_down", std::get<6>(g)),
                                made(in.shared_router, "dshared_router", std::get<7>(g)),
                                made(in.gate_up_lora_a, "dgate_up_lora_a", std::get<8>(g)),
                                made(in.gate_up_lora_b, "dgate_up_lora_b", std::get<9>(g)),
                                made(in.down_lora_a, "ddown_lora_a", std::get<10>(g)),
                                made(in.down_lora_b, "ddown_lora_b", std::get<11>(g))};
  moe_experts_bwd(dense(op, "dout", dout), in, out,
                  options(op, weight_axes, interleaved, ids_convention, gate_up_lora_scale, down_lora_scale));
  return g;
}
void bwd_out(Tensor dout, Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, Optional shared_gate,
             Optional shared_up, Optional shared_down, Optional shared_router, Optional gate_up_lora_a,
             Optional gate_up_lora_b, Optional down_lora_a, Optional down_lora_b, Optional hidden,
             std::string weight_axes, bool interleaved, std::string ids_convention, double gate_up_lora_scale,
             double down_lora_scale, Optional dx, Optional dweights, Optional dgate_up, Optional ddown,
             Optional dshared_gate, Optional dshared_up, Optional dshared_down, Optional dshared_router,
             Optional dgate_up_lora_a, Optional dgate_up_lora_b, Optional ddown_lora_a, Optional ddown_lora_b) {
  constexpr std::string_view op = "moe_experts_bwd";
  MoeExpertsInputs in = inputs(op, x, ids, weights, gate_up, down, {shared_gate, shared_up, shared_down, shared_router},
                               {gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b});
  in.hidden = dense(op, "hidden", hidden);
  moe_experts_bwd(dense(op, "dout", dout), in,
                  {view(op, "dx", dx), view(op, "dweights", dweights), view(op, "dgate_up", dgate_up),
                   view(op, "ddown", ddown), view(op, "dshared_gate", dshared_gate), view(op, "dshared_up", dshared_up),
                   view(op, "dshared_down", dshared_down), view(op, "dshared_router", dshared_router),
                   view(op, "dgate_up_lora_a", dgate_up_lora_a), view(op, "dgate_up_lora_b", dgate_up_lora_b),
                   view(op, "ddown_lora_a", ddown_lora_a), view(op, "ddown_lora_b", ddown_lora_b)},
                  options(op, weight_axes, interleaved, ids_convention, gate_up_lora_scale, down_lora_scale));
}

}  // namespace

#define TIDEGATE_MOE_TENSORS                                                                                    \
  "Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, Tensor? shared_gate=None, "               \
  "Tensor? shared_up=None, Tensor? shared_down=None, Tensor? shared_router=None, Tensor? gate_up_lora_a=None, " \
  "Tensor? gate_up_lora_b=None, Tensor? down_lora_a=None, Tensor? down_lora_b=None, "
#define TIDEGATE_MOE_OPTIONS                                                                                    \
  "*, str weight_axes='nk', bool interleaved=False, str ids_convention='plain', float gate_up_lora_scale=1.0, " \
  "float down_lora_scale=1.0"

STABLE_TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  m.def("moe_experts_fwd(" TIDEGATE_MOE_TENSORS TIDEGATE_MOE_OPTIONS
        ", bool round_y=False, bool save_hidden=False) -> (Tensor out, Tensor hidden)");
  m.def("moe_experts_fwd.out(" TIDEGATE_MOE_TENSORS TIDEGATE_MOE_OPTIONS
        ", bool round_y=False, Tensor(a!) out, Tensor(b!)? hidden=None) -> ()");
  m.def("moe_experts_bwd(Tensor dout, " TIDEGATE_MOE_TENSORS "Tensor? hidden=None, " TIDEGATE_MOE_OPTIONS
        ", int needs=4095) -> (Tensor dx, Tensor dweights, Tensor dgate_up, Tensor ddown, Tensor dshared_gate, "
        "Tensor dshared_up, Tensor dshared_down, Tensor dshared_router, Tensor dgate_up_lora_a, "
        "Tensor dgate_up_lora_b, Tensor ddown_lora_a, Tensor ddown_lora_b)");
  m.def("moe_experts_bwd.out(Tensor dout, " TIDEGATE_MOE_TENSORS "Tensor? hidden=None, " TIDEGATE_MOE_OPTIONS
        ", Tensor(a!)? dx=None, Tensor(b!)? dweights=None, Tensor(c!)? dgate_up=None, Tensor(d!)? ddown=None, "
        "Tensor(e!)? dshared_gate=None, Tensor(f!)? dshared_up=None, Tensor(g!)? dshared_down=None, "
        "Tensor(h!)? dshared_router=None, Tensor(i!)? dgate_up_lora_a=None, Tensor(j!)? dgate_up_lora_b=None, "
        "Tensor(k!)? ddown_lora_a=None, Tensor(l!)? ddown_lora_b=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tidegate, CPU, m) {
  m.impl("moe_experts_fwd", TORCH_BOX(&fwd));
  m.impl("moe_experts_fwd.out", TORCH_BOX(&fwd_out));
  m.impl("moe_experts_bwd", TORCH_BOX(&bwd));
  m.impl("moe_experts_bwd.out", TORCH_BOX(&bwd_out));
}

}  // namespace tidegate::adapter
