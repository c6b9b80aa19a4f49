// The experts in plain loops: the definition, and the fp64 path of the operator.
#include "ops/moe_experts/reference.h"

#include <cmath>
#include <vector>

#include "base/element.h"
#include "ops/moe_experts/merged.h"

namespace tidegate::moe_experts {
namespace {

template <class Acc>
using Row = std::vector<Acc>;

// Offset of element (n, k) of a weight.
struct Place {
  std::int64_t first = 0, row = 0, column = 0;
  std::int64_t operator()(std::int64_t n, std::int64_t k) const { return first + n * row + k * column; }
};

// One expert: where its weights stand, and where their gradients go.
struct Expert {
  TensorView gate, up, down;
  Place gate_at, up_at, down_at;
  TensorView dgate, dup, ddown;
  Place dgate_at, dup_at, ddown_at;
  std::int64_t width;
};

// Offset of (n, k) in matrix e of a weight: rows first + step * n.
Place place(const TensorView& t, WeightAxes axes, std::int64_t e, std::int64_t first, std::int64_t step) {
  const bool nk = axes == WeightAxes::kNK;
  const std::int64_t row = t.strides[nk ? 1 : 2];
  return {e * t.strides[0] + first * row, step * row, t.strides[nk ? 2 : 1]};
}
Place place(const TensorView& t) { return {0, t.strides[0], t.strides[1]}; }

Expert routed(const MoeExpertsInputs& in, const MoeExpertsGradients& g, std::int64_t e, const MoeExpertsOptions& o) {
  const std::int64_t I = in.down.sizes[o.weight_axes == WeightAxes::kNK ? 2 : 1];
  const std::int64_t step = o.interleaved ? 2 : 1;
  const std::int64_t up = o.interleaved ? 1 : I;
  const auto at = [&](const TensorView& t, std::int64_t first, std::int64_t by) {
    return t.defined() ? place(t, o.weight_axes, e, first, by) : Place{};
  };
  return {in.gate_up, in.gate_up, in.down, at(in.gate_up, 0, step), at(in.gate_up, up, step), at(in.down, 0, 1),
          g.dgate_up, g.dgate_up, g.ddown, at(g.dgate_up, 0, step), at(g.dgate_up, up, step), at(g.ddown, 0, 1),
          I};
}
Expert shared(const MoeExpertsInputs& in, const MoeExpertsGradients& g) {
  return {in.shared_gate,         in.shared_up,          in.shared_down,      place(in.shared_gate),
          place(in.shared_up),    place(in.shared_down), g.dshared_gate,      g.dshared_up,
          g.dshared_down,         place(g.dshared_gate), place(g.dshared_up), place(g.dshared_down),
          in.shared_gate.sizes[0]};
}

template <class Acc>
Acc rounded(Acc value, DType dtype) {
  const auto narrow = static_cast<float>(value);
  return dtype == DType::kBF16  ? static_cast<Acc>(widen(narrow_bf16(narrow)))
         : dtype == DType::kF16 ? static_cast<Acc>(widen(narrow_f16(narrow)))
                                : value;
}
template <class Acc>
Row<Acc> row_of(const TensorView& t, std::int64_t r) {
  Row<Acc> row(static_cast<std::size_t>(t.sizes[1]));
  for (std::size_t c = 0; c < row.size(); ++c) {
    row[c] = static_cast<Acc>(read_element(t, offset_of(t, r, c)));
  }
  return row;
}
// W x of N rows, or W^T x.
template <class Acc>
Row<Acc> times(const TensorView& w, const Place& at, const Row<Acc>& x, std::int64_t N, bool transposed) {
  Row<Acc> y(static_cast<std::size_t>(N));
  for (std::size_t n = 0; n < y.size(); ++n) {
    for (std::size_t k = 0; k < x.size(); ++k) {
      const auto i = static_cast<std::int64_t>(n);
      const auto j = static_cast<std::int64_t>(k);
      y[n] += static_cast<Acc>(read_element(w, transposed ? at(j, i) : at(i, j))) * x[k];
    }
  }
  return y;
}

template <class Acc>
struct Hidden {
  Row<Acc> gate, up, a;
};
template <class Acc>
Hidden<Acc> hidden(const Expert& e, const Row<Acc>& x, DType act) {
  Hidden<Acc> h{times(e.gate, e.gate_at, x, e.width, false), times(e.up, e.up_at, x, e.width, false), {}};
  for (std::size_t i = 0; i < h.gate.size(); ++i) {
    h.a.push_back(rounded(h.gate[i] / (1 + std::exp(-h.gate[i])) * h.up[i], act));
  }
  return h;
}

template <class Acc>
Acc gate_of(const MoeExpertsInputs& in, const Row<Acc>& x) {
  Acc z = 0;
  for (std::size_t c = 0; c < x.size(); ++c) {
    z += x[c] * static_cast<Acc>(read_element(in.shared_router, offset_of(in.shared_router, c)));
  }
  return 1 / (1 + std::exp(-z));
}

// Adds factor * left right^T to a gradient that is kept apart in fp64 or fp32.
template <class Acc>
void add_outer(const TensorView& t, const Place& at, std::vector<Acc>& sums, const Row<Acc>& left,
               const Row<Acc>& right) {
  if (!t.defined()) {
    return;
  }
  for (std::size_t n = 0; n < left.size(); ++n) {
    for (std::size_t k = 0; k < right.size(); ++k) {
      sums[static_cast<std::size_t>(at(static_cast<std::int64_t>(n), static_cast<std::int64_t>(k)))] +=
          left[n] * right[k];
    }
  }
}

template <class Acc>
struct Sums {
  const TensorView& t;
  std::vector<Acc> values;  // by offset
  explicit Sums(const TensorView& view) : t(view) {
    std::int64_t reach = 1;
    for (int d = 0; d < t.rank; ++d) {
      reach += (t.sizes[d] - 1) * t.strides[d];
    }
    values.resize(t.defined() && t.numel() > 0 ? static_cast<std::size_t>(reach) : 0);
  }
  void write() const {
    for (std::int64_t i = 0; t.defined() && i < t.numel(); ++i) {
      std::int64_t offset = 0;
      for (std::int64_t d = t.rank - 1, rest = i; d >= 0; rest /= t.sizes[d], --d) {
        offset += rest % t.sizes[d] * t.strides[d];
      }
      write_element(t, offset, values[static_cast<std::size_t>(offset)]);
    }
  }
};

// The weights of a call with their low-rank additions.
template <class Acc>
struct Merged {
  MergedWeight<Acc> gate_up, down;
  MoeExpertsInputs in;
  Merged(const MoeExpertsInputs& given, const MoeExpertsOptions& o)
      : gate_up(given.gate_up, given.gate_up_lora_a, given.gate_up_lora_b, o.gate_up_lora_scale, o.weight_axes),
        down(given.down, given.down_lora_a, given.down_lora_b, o.down_lora_scale, o.weight_axes),
        in(given) {
    in.gate_up = gate_up.weight();
    in.down = down.weight();
  }
};

}  // namespace

template <class Acc>
void reference_fwd(const MoeExpertsInputs& given, const std::int32_t* ids, const TensorView& out,
                   const MoeExpertsOptions& o) {
  const Merged<Acc> merged(given, o);
  const MoeExpertsInputs& in = merged.in;
  const std::int64_t k = in.ids.sizes[1];
  const std::int64_t H = in.x.sizes[1];
  const DType act = in.x.dtype;
  for (std::int64_t t = 0; t < in.x.sizes[0]; ++t) {
    const auto x = row_of<Acc>(in.x, t);
    Row<Acc> total(x.size());
    const auto add = [&](const Expert& e, Acc w) {
      const Row<Acc> y = times(e.down, e.down_at, hidden(e, x, act).a, H, false);
      for (std::size_t c = 0; c < y.size(); ++c) {
        total[c] += w * (o.round_y ? rounded(y[c], act) : y[c]);
      }
    };
    for (std::int64_t s = 0; s < k; ++s) {
      if (ids[t * k + s] >= 0) {
        add(routed(in, {}, ids[t * k + s], o), static_cast<Acc>(read_element(in.weights, offset_of(in.weights, t, s))));
      }
    }
    if (in.shared_gate.defined()) {
      add(shared(in, {}), gate_of(in, x));
    }
    for (std::int64_t c = 0; c < H; ++c) {
      write_element(out, offset_of(out, t, c), total[static_cast<std::size_t>(c)]);
    }
  }
}

template <class Acc>
void reference_bwd(const TensorView& dout, const MoeExpertsInputs& given, const std::int32_t* ids,
                   const MoeExpertsGradients& wanted, const MoeExpertsOptions& o) {
  Merged<Acc> merged(given, o);
  const MoeExpertsInputs& in = merged.in;
  MoeExpertsGradients g = wanted;
  g.dgate_up = merged.gate_up.gradient(wanted.dgate_up, wanted.dgate_up_lora_a, wanted.dgate_up_lora_b);
  g.ddown = merged.down.gradient(wanted.ddown, wanted.ddown_lora_a, wanted.ddown_lora_b);
  const std::int64_t k = in.ids.sizes[1];
  const std::int64_t H = in.x.sizes[1];
  const DType act = in.x.dtype;
  Sums<Acc> dgate_up(g.dgate_up), ddown(g.ddown), dsgate(g.dshared_gate), dsup(g.dshared_up), dsdown(g.dshared_down),
      dsrouter(g.dshared_router);
  for (std::int64_t t = 0; t < in.x.sizes[0]; ++t) {
    const auto x = row_of<Acc>(in.x, t);
    const auto dy = row_of<Acc>(dout, t);
    Row<Acc> dx(x.size());
    // Returns the gradient of w.
    const auto back = [&](const Expert& e, Acc w, Sums<Acc>& dg, Sums<Acc>& du, Sums<Acc>& dd) {
      const Hidden<Acc> h = hidden(e, x, act);
      const Row<Acc> da = times(e.down, e.down_at, dy, e.width, true);
      Row<Acc> dgate(h.a.size()), dup(h.a.size()), weighted(dy.size());
      Acc dw = 0;
      for (std::size_t i = 0; i < h.a.size(); ++i) {
        const Acc s = 1 / (1 + std::exp(-h.gate[i]));
        dw += da[i] * h.a[i];
        dgate[i] = rounded(w * da[i] * h.up[i] * s * (1 + h.gate[i] * (1 - s)), act);
        dup[i] = rounded(w * da[i] * h.gate[i] * s, act);
      }
      for (std::size_t c = 0; c < dy.size(); ++c) {
        weighted[c] = w * dy[c];
      }
      add_outer(e.ddown, e.ddown_at, dd.values, weighted, h.a);
      add_outer(e.dgate, e.dgate_at, dg.values, dgate, x);
      add_outer(e.dup, e.dup_at, du.values, dup, x);
      const Row<Acc> from_gate = times(e.gate, e.gate_at, dgate, H, true);
      const Row<Acc> from_up = times(e.up, e.up_at, dup, H, true);
      for (std::size_t c = 0; c < dx.size(); ++c) {
        dx[c] += from_gate[c] + from_up[c];
      }
      return dw;
    };
    for (std::int64_t s = 0; s < k; ++s) {
      Acc dw = 0;
      if (ids[t * k + s] >= 0) {
        const auto w = static_cast<Acc>(read_element(in.weights, offset_of(in.weights, t, s)));
        dw = back(routed(in, g, ids[t * k + s], o), w, dgate_up, dgate_up, ddown);
      }
      if (g.dweights.defined()) {
        write_element(g.dweights, offset_of(g.dweights, t, s), dw);
      }
    }
    if (in.shared_gate.defined()) {
      const Acc gate = gate_of(in, x);
      const Acc dz = gate * (1 - gate) * back(shared(in, g), gate, dsgate, dsup, dsdown);
      for (std::size_t c = 0; c < dx.size(); ++c) {
        dx[c] += dz * static_cast<Acc>(read_element(in.shared_router, offset_of(in.shared_router, c)));
        if (g.dshared_router.defined()) {
          dsrouter.values[c * static_cast<std::size_t>(g.dshared_router.strides[0])] += dz * x[c];
        }
      }
    }
    for (std::int64_t c = 0; g.dx.defined() && c < H; ++c) {
      write_element(g.dx, offset_of(g.dx, t, c), dx[static_cast<std::size_t>(c)]);
    }
  }
  for (const Sums<Acc>* sums : {&dgate_up, &ddown, &dsgate, &dsup, &dsdown, &dsrouter}) {
    sums->write();
  }
  merged.gate_up.finish(wanted.dgate_up, wanted.dgate_up_lora_a, wanted.dgate_up_lora_b);
  merged.down.finish(wanted.ddown, wanted.ddown_lora_a, wanted.ddown_lora_b);
}

#define TIDEGATE_INSTANCES(Acc)                                                                     \
  template void reference_fwd<Acc>(const MoeExpertsInputs&, const std::int32_t*, const TensorView&, \
                                   const MoeExpertsOptions&);                                       \
  template void reference_bwd<Acc>(const TensorView&, const MoeExpertsInputs&, const std::int32_t*, \
                                   const MoeExpertsGradients&, const MoeExpertsOptions&);
TIDEGATE_INSTANCES(float)
TIDEGATE_INSTANCES(double)

}  // namespace tidegate::moe_experts
