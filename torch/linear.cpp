// linear as a torch operator: grouped_matmul with one group. Contract: include/tidegate/moe.h.
#include "adapter.h"

namespace tidegate::adapter {
namespace {

// x [..., K] as rows [M, K]; a single vector is one row. Copied if the rows do not lie at equal distances.
TensorView rows_of(std::string_view op, std::string_view name, Tensor& t) {
  const int rank = view(op, name, t).rank;
  check(rank >= 1, op, ": ", name, ": expected at least 1 dimension, got none");
  t = rank == 1 ? torch::stable::unsqueeze(t, 0) : torch::stable::flatten(t, 0, -2);
  return dense(op, name, t);
}

// The rows of a result that was made here.
TensorView rows_of(TensorView t) {
  std::int64_t rows = 1;
  for (int i = 0; i + 1 < t.rank; ++i) {
    rows *= t.sizes[i];
  }
  const std::int64_t width = t.size(-1);
  t.rank = 2;
  t.sizes[0] = rows;
  t.sizes[1] = t.strides[0] = width;
  t.strides[1] = 1;
  return t;
}

// A weight [N, K] or a bias [N] as the only one of its group.
TensorView only(TensorView t) {
  if (!t.defined()) {
    return t;
  }
  for (int i = t.rank; i > 0; --i) {
    t.sizes[i] = t.sizes[i - 1];
    t.strides[i] = t.strides[i - 1];
  }
  t.sizes[0] = 1;
  t.strides[0] = 0;
  ++t.rank;
  return t;
}

TensorView one_group(const std::int64_t& rows) {
  TensorView t;
  t.data = const_cast<std::int64_t*>(&rows);  // NOLINT(cppcoreguidelines-pro-type-const-cast): it is only read
  t.dtype = DType::kI64;
  t.rank = 1;
  t.sizes[0] = 1;
  t.strides[0] = 1;
  return t;
}

TensorView matrix(std::string_view op, const TensorView& weight, std::int64_t K) {
  check(weight.rank == 2 && weight.size(1) == K, op, ": weight: expected [N, ", K, "], got ", Shape{weight});
  check(weight.numel() == 0 || weight.stride(0) == 1 || weight.stride(1) == 1 || weight.size(0) == 1 || K == 1, op,
        ": weight: expected stride 1 in one of the last two dimensions, got ", weight.stride(0), " and ",
        weight.stride(1));
  return only(weight);
}

// The product would refuse other types in its own name. fp64 all or nothing.
void check_type(std::string_view op, std::string_view name, const TensorView& t, const TensorView& x) {
  const bool wide = x.dtype == DType::kF64;
  check(is_float(t.dtype) && (t.dtype == DType::kF64) == wide, op, ": ", name, ": expected dtype ",
        wide ? "float64" : "float32, bfloat16 or float16", ", got dtype ", t.dtype);
}
void check_float(std::string_view op, std::string_view name, const TensorView& t) {
  check(!t.defined() || is_float(t.dtype), op, ": ", name,
        ": expected dtype float32, bfloat16, float16 or float64, got dtype ", t.dtype);
}

Tensor linear_fwd(Tensor x, Tensor weight, Optional bias) {
  constexpr std::string_view op = "linear_fwd";
  const TensorView given = view(op, "x", x);
  std::vector<std::int64_t> sizes(given.sizes, given.sizes + given.rank);
  const TensorView xv = rows_of(op, "x", x);
  const TensorView w = matrix(op, view(op, "weight", weight), xv.size(1));
  const TensorView b = view(op, "bias", bias);
  check(!b.defined() || (b.rank == 1 && b.size(0) == w.size(1)), op, ": bias: expected [", w.size(1), "], got ",
        Shape{b});
  check_float(op, "x", xv);
  check_type(op, "weight", w, xv);
  check_float(op, "bias", b);
  sizes.back() = w.size(1);
  Tensor y = empty(sizes, scalar_type(xv.dtype));
  const std::int64_t rows = xv.size(0);
  grouped_matmul_fwd(xv, w, one_group(rows), only(b), rows_of(view(op, "y", y)));
  return y;
}

// needs: 1 dx, 2 dweight, 4 dbias.
std::tuple<Tensor, Tensor, Tensor> linear_bwd(Tensor dy, Tensor x, Tensor weight, std::int64_t needs) {
  constexpr std::string_view op = "linear_bwd";
  check(needs >= 0 && needs < 8, op, ": needs: expected 0 to 7 (a bit for every result), got ", needs);
  const TensorView given = view(op, "x", x);
  std::vector<std::int64_t> sizes(given.sizes, given.sizes + given.rank);
  const TensorView dyv = rows_of(op, "dy", dy), xv = rows_of(op, "x", x);
  const TensorView w = matrix(op, view(op, "weight", weight), xv.size(1));
  check(dyv.size(0) == xv.size(0) && dyv.size(1) == w.size(1), op, ": dy: expected [", xv.size(0), ", ", w.size(1),
        "] rows, got ", Shape{dyv});
  check_float(op, "x", xv);
  check_type(op, "weight", w, xv);
  check(dyv.dtype == xv.dtype, op, ": dy: expected dtype ", xv.dtype, " (as x), got dtype ", dyv.dtype);
  const auto made = [&](std::int64_t bit, std::vector<std::int64_t> shape, DType type) {
    return (needs & bit) != 0 ? empty(std::move(shape), scalar_type(type)) : nothing(scalar_type(type));
  };
  const auto asked = [&](std::int64_t bit, std::string_view name, const Tensor& t) {
    return (needs & bit) != 0 ? view(op, name, t) : TensorView{};
  };
  Tensor dx = made(1, sizes, xv.dtype);
  Tensor dweight = made(2, {w.size(1), w.size(2)}, w.dtype);
  Tensor dbias = made(4, {w.size(1)}, w.dtype);
  const std::int64_t rows = xv.size(0);
  grouped_matmul_bwd(dyv, xv, w, one_group(rows), (needs & 1) != 0 ? rows_of(view(op, "dx", dx)) : TensorView{},
                     only(asked(2, "dweight", dweight)), only(asked(4, "dbias", dbias)));
  return {dx, dweight, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tidegate, m) {
  m.def("linear_fwd(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor y");
  m.def("linear_bwd(Tensor dy, Tensor x, Tensor weight, *, int needs=7) -> (Tensor dx, Tensor dweight, Tensor dbias)");
}

STABLE_TORCH_LIBRARY_IMPL(tidegate, CPU, m) {
  m.impl("linear_fwd", TORCH_BOX(&linear_fwd));
  m.impl("linear_bwd", TORCH_BOX(&linear_bwd));
}

}  // namespace tidegate::adapter
