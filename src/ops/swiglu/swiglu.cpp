// swiglu_fwd and _bwd: checks, partition, dispatch.
#include "tidegate/swiglu.h"

#include "base/float_environment.h"
#include "base/row_checks.h"
#include "ops/swiglu/kernel.h"
#include "ops/swiglu/reference.h"
#include "tidegate/cpu.h"

namespace tidegate {

void swiglu_fwd(const TensorView& gate, const TensorView& up, const TensorView& y) {
  constexpr std::string_view op = "swiglu_fwd";
  const FloatEnvironment environment;
  check_row_input(op, {"gate", gate});
  check_row_tensor(op, {"up", up}, {"gate", gate});
  check_row_tensor(op, {"y", y}, {"gate", gate});
  check_outputs(op, {{"y", y}}, {{"gate", gate}, {"up", up}});
  if (gate.dtype == DType::kF64) {
    swiglu::reference_fwd<double>(gate, up, y);
    return;
  }
  const swiglu::Args args{rows_of(gate), rows_of(up), rows_of(y), Rows{}, Rows{}, gate.size(-1), should_stream_rows(y)};
  const auto run = swiglu_kernels_for(active_isa()).fwd[data_type_index(gate.dtype)];
  for_row_tasks(row_count(gate), args.width,
                [&](std::int64_t first, std::int64_t last, std::int64_t) { run(args, first, last); });
}

void swiglu_bwd(const TensorView& dy, const TensorView& gate, const TensorView& up, const TensorView& dgate,
                const TensorView& dup) {
  constexpr std::string_view op = "swiglu_bwd";
  const FloatEnvironment environment;
  check_row_input(op, {"gate", gate});
  check_row_tensor(op, {"up", up}, {"gate", gate});
  check_row_tensor(op, {"dy", dy}, {"gate", gate});
  for (const Named& t : {Named{"dgate", dgate}, Named{"dup", dup}}) {
    if (t.tensor.defined()) {
      check_row_tensor(op, t, {"gate", gate});
    }
  }
  check_outputs(op, {{"dgate", dgate}, {"dup", dup}}, {{"dy", dy}, {"gate", gate}, {"up", up}});
  if (gate.dtype == DType::kF64) {
    swiglu::reference_bwd<double>(dy, gate, up, dgate, dup);
    return;
  }
  const swiglu::Args args{rows_of(gate), rows_of(up), rows_of(dy), rows_of(dgate), rows_of(dup), gate.size(-1), false};
  const auto run = swiglu_kernels_for(active_isa()).bwd[data_type_index(gate.dtype)];
  for_row_tasks(row_count(gate), args.width,
                [&](std::int64_t first, std::int64_t last, std::int64_t) { run(args, first, last); });
}

}  // namespace tidegate
