// moe_experts_fwd and _bwd: checks and dispatch.
#include <cmath>

#include "base/float_environment.h"
#include "ops/moe_experts/plan.h"
#include "ops/moe_experts/reference.h"

namespace tidegate {
namespace {

using namespace grouped_matmul;

struct Sizes {
  std::int64_t T, H, E, I, J;
};

// fp64 all or nothing: that is the reference.
void check_parameter_type(std::string_view op, Named t, const TensorView& x) {
  check_float(op, t);
  check((t.tensor.dtype == DType::kF64) == (x.dtype == DType::kF64), op, ": ", t.name, ": expected dtype ",
        x.dtype == DType::kF64 ? "float64" : "float32, bfloat16 or float16", ", got dtype ", t.tensor.dtype);
}

void check_matrix_view(std::string_view op, Named t, std::int64_t N, std::int64_t K, const TensorView& x) {
  check_shape(op, t, {N, K});
  check_parameter_type(op, t, x);
  const std::int64_t* strides = t.tensor.strides;
  check(t.tensor.numel() == 0 || strides[0] == 1 || strides[1] == 1 || N == 1 || K == 1, op, ": ", t.name,
        ": expected stride 1 in one of its dimensions, got ", strides[0], " and ", strides[1]);
}

void check_expert_weight(std::string_view op, Named t, std::int64_t E, std::int64_t N, std::int64_t K,
                         const MoeExpertsOptions& o, const TensorView& x) {
  check_rank(op, t, 3);
  check_weight_view(op, t, E, N, K, o.weight_axes);
  check_parameter_type(op, t, x);
}

// Both factors or none.
void check_low_rank(std::string_view op, Named a, Named b, std::int64_t E, std::int64_t N, std::int64_t K,
                    const TensorView& x) {
  check(a.tensor.defined() == b.tensor.defined(), op, ": ", b.name, ": expected ",
        a.tensor.defined() ? "a tensor" : "none", " (as ", a.name, "), got ", b.tensor.defined() ? "a tensor" : "none");
  if (a.tensor.defined()) {
    check_rank(op, a, 3);
    MoeExpertsOptions plain;
    check_expert_weight(op, a, E, a.tensor.sizes[1], K, plain, x);
    check_expert_weight(op, b, E, N, a.tensor.sizes[1], plain, x);
  }
}

void check_scale(std::string_view op, std::string_view name, double scale) {
  check(std::isfinite(scale), op, ": ", name, ": expected a finite number, got ", scale);
}

Sizes check_inputs(std::string_view op, const MoeExpertsInputs& in, const MoeExpertsOptions& o) {
  check_rank(op, {"x", in.x}, 2);
  check_data_type(op, {"x", in.x});
  check_inner_stride(op, {"x", in.x});
  check(in.x_rows == nullptr || in.x.dtype != DType::kF64, op, ": x_rows: expected none with float64, got a list");
  const std::int64_t T = in.x.sizes[0];
  const std::int64_t H = in.x.sizes[1];
  check_rank(op, {"ids", in.ids}, 2);
  check_shape(op, {"ids", in.ids}, {T, in.ids.sizes[1]});
  check_shape(op, {"weights", in.weights}, {T, in.ids.sizes[1]});
  check_float(op, {"weights", in.weights});
  check_rank(op, {"gate_up", in.gate_up}, 3);
  check_rank(op, {"down", in.down}, 3);
  const std::int64_t E = in.gate_up.sizes[0];
  const std::int64_t I = in.down.sizes[o.weight_axes == WeightAxes::kNK ? 2 : 1];
  check_expert_weight(op, {"gate_up", in.gate_up}, E, 2 * I, H, o, in.x);
  check_expert_weight(op, {"down", in.down}, E, H, I, o, in.x);
  check(!o.interleaved || o.weight_axes == WeightAxes::kNK || in.gate_up.strides[1] == 1 || I == 0, op,
        ": gate_up: expected stride 1 along H with interleaved rows, got ", in.gate_up.strides[1]);
  check(!o.interleaved || o.weight_axes == WeightAxes::kKN || in.gate_up.strides[2] == 1 || I == 0, op,
        ": gate_up: expected stride 1 along H with interleaved rows, got ", in.gate_up.strides[2]);
  check_low_rank(op, {"gate_up_lora_a", in.gate_up_lora_a}, {"gate_up_lora_b", in.gate_up_lora_b}, E, 2 * I, H, in.x);
  check_low_rank(op, {"down_lora_a", in.down_lora_a}, {"down_lora_b", in.down_lora_b}, E, H, I, in.x);
  if (o.interleaved && in.gate_up_lora_b.defined() && in.gate_up_lora_b.sizes[2] > 1) {
    check(in.gate_up_lora_b.strides[2] == 1, op,
          ": gate_up_lora_b: expected stride 1 along the rank with interleaved rows, got ",
          in.gate_up_lora_b.strides[2]);
  }
  check_scale(op, "gate_up_lora_scale", o.gate_up_lora_scale);
  check_scale(op, "down_lora_scale", o.down_lora_scale);
  const Named shared[] = {{"shared_gate", in.shared_gate},
                          {"shared_up", in.shared_up},
                          {"shared_down", in.shared_down},
                          {"shared_router", in.shared_router}};
  std::int64_t J = 0;
  for (const Named& t : shared) {
    check(t.tensor.defined() == in.shared_gate.defined(), op, ": ", t.name, ": expected ",
          in.shared_gate.defined() ? "a tensor" : "none", " (as shared_gate), got ",
          t.tensor.defined() ? "a tensor" : "none");
  }
  if (in.shared_gate.defined()) {
    check_rank(op, shared[0], 2);
    J = in.shared_gate.sizes[0];
    check_matrix_view(op, shared[0], J, H, in.x);
    check_matrix_view(op, shared[1], J, H, in.x);
    check_matrix_view(op, shared[2], H, J, in.x);
    check_shape(op, shared[3], {H});
    check_parameter_type(op, shared[3], in.x);
  }
  return {T, H, E, I, J};
}

void check_result(std::string_view op, Named t, const TensorView& x) {
  check_same_shape(op, t, {"x", x});
  check_same_dtype(op, t, {"x", x});
  check_inner_stride(op, t);
}

// What a forward leaves for a backward; fp64 has none, its reference keeps nothing.
void check_hidden(std::string_view op, const TensorView& hidden, const MoeExpertsInputs& in, const Sizes& n) {
  if (hidden.defined()) {
    check(in.x.dtype != DType::kF64, op, ": hidden: expected none with float64, got a tensor");
    const Named t{"hidden", hidden};
    check_shape(op, t, {n.T * in.ids.sizes[1], 2, n.I});
    check_dtype(op, t, DType::kF32);
    check_inner_stride(op, t);
  }
}

}  // namespace

void moe_experts_fwd(const MoeExpertsInputs& in, const TensorView& out, const MoeExpertsOptions& options,
                     const TensorView& hidden) {
  constexpr std::string_view op = "moe_experts_fwd";
  const FloatEnvironment environment;
  const Sizes n = check_inputs(op, in, options);
  check_result(op, {"out", out}, in.x);
  check(!in.hidden.defined(), op, ": hidden: expected none among the inputs, got a tensor");
  check_hidden(op, hidden, in, n);
  check_outputs(op, {{"out", out}, {"hidden", hidden}},
                {{"x", in.x},
                 {"ids", in.ids},
                 {"weights", in.weights},
                 {"gate_up", in.gate_up},
                 {"down", in.down},
                 {"shared_gate", in.shared_gate},
                 {"shared_up", in.shared_up},
                 {"shared_down", in.shared_down},
                 {"shared_router", in.shared_router},
                 {"gate_up_lora_a", in.gate_up_lora_a},
                 {"gate_up_lora_b", in.gate_up_lora_b},
                 {"down_lora_a", in.down_lora_a},
                 {"down_lora_b", in.down_lora_b}});
  Scratch scratch;
  const std::int32_t* ids = read_expert_ids(op, {"ids", in.ids}, n.E, options.ids_convention, scratch);
  if (in.x.dtype == DType::kF64) {
    moe_experts::reference_fwd<double>(in, ids, out, options);
    return;
  }
  moe_experts::forward(moe_experts::make_plan(in, ids, options, hidden, scratch), out, scratch);
}

void moe_experts_bwd(const TensorView& dout, const MoeExpertsInputs& in, const MoeExpertsGradients& out,
                     const MoeExpertsOptions& options) {
  constexpr std::string_view op = "moe_experts_bwd";
  const FloatEnvironment environment;
  const Sizes n = check_inputs(op, in, options);
  check_result(op, {"dout", dout}, in.x);
  check_hidden(op, in.hidden, in, n);
  if (out.dx.defined()) {
    check_result(op, {"dx", out.dx}, in.x);
  }
  if (out.dweights.defined()) {
    check_same_shape(op, {"dweights", out.dweights}, {"weights", in.weights});
    check_float(op, {"dweights", out.dweights});
  }
  if (out.dgate_up.defined()) {
    check_expert_weight(op, {"dgate_up", out.dgate_up}, n.E, 2 * n.I, n.H, options, in.x);
  }
  if (out.ddown.defined()) {
    check_expert_weight(op, {"ddown", out.ddown}, n.E, n.H, n.I, options, in.x);
  }
  const Named shared[] = {{"dshared_gate", out.dshared_gate},
                          {"dshared_up", out.dshared_up},
                          {"dshared_down", out.dshared_down},
                          {"dshared_router", out.dshared_router}};
  for (int i = 0; i < 4; ++i) {
    const Named& t = shared[i];
    if (!t.tensor.defined()) {
      continue;
    }
    check(in.shared_gate.defined(), op, ": ", t.name, ": expected none without a shared expert, got a tensor");
    if (i < 3) {
      check_matrix_view(op, t, i == 2 ? n.H : n.J, i == 2 ? n.J : n.H, in.x);
    } else {
      check_shape(op, t, {n.H});
      check_parameter_type(op, t, in.x);
      check_inner_stride(op, t);
    }
  }
  const Named low_rank[] = {{"dgate_up_lora_a", out.dgate_up_lora_a},
                            {"dgate_up_lora_b", out.dgate_up_lora_b},
                            {"ddown_lora_a", out.ddown_lora_a},
                            {"ddown_lora_b", out.ddown_lora_b}};
  const TensorView* of[] = {&in.gate_up_lora_a, &in.gate_up_lora_b, &in.down_lora_a, &in.down_lora_b};
  for (int i = 0; i < 4; ++i) {
    const Named& t = low_rank[i];
    if (t.tensor.defined()) {
      check(of[i]->defined(), op, ": ", t.name, ": expected none without that input, got a tensor");
      check_expert_weight(op, t, n.E, of[i]->sizes[1], of[i]->sizes[2], {}, in.x);
    }
  }
  check_outputs(op,
                {{"dx", out.dx},
                 {"dweights", out.dweights},
                 {"dgate_up", out.dgate_up},
                 {"ddown", out.ddown},
                 shared[0],
                 shared[1],
                 shared[2],
                 shared[3],
                 low_rank[0],
                 low_rank[1],
                 low_rank[2],
                 low_rank[3]},
                {{"dout", dout},
                 {"x", in.x},
                 {"ids", in.ids},
                 {"weights", in.weights},
                 {"gate_up", in.gate_up},
                 {"down", in.down},
                 {"shared_gate", in.shared_gate},
                 {"shared_up", in.shared_up},
                 {"shared_down", in.shared_down},
                 {"shared_router", in.shared_router},
                 {"gate_up_lora_a", in.gate_up_lora_a},
                 {"gate_up_lora_b", in.gate_up_lora_b},
                 {"down_lora_a", in.down_lora_a},
                 {"down_lora_b", in.down_lora_b},
                 {"hidden", in.hidden}});
  Scratch scratch;
  const std::int32_t* ids = read_expert_ids(op, {"ids", in.ids}, n.E, options.ids_convention, scratch);
  if (in.x.dtype == DType::kF64) {
    moe_experts::reference_bwd<double>(dout, in, ids, out, options);
    return;
  }
  moe_experts::backward(moe_experts::make_plan(in, ids, options, in.hidden, scratch), dout, out, options, scratch);
}

}  // namespace tidegate
