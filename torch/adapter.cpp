#include "adapter.h"

namespace tidegate::adapter {
namespace {

// Torch's own threads run the tasks: a second pool in one process would fight for the same cores.
void torch_backend(std::int64_t tasks, ParallelBody body, void* context) {
  torch::stable::parallel_for(0, tasks, 1, [&](std::int64_t first, std::int64_t last) { body(context, first, last); });
}

const bool installed = [] {
  set_parallel_backend(torch_backend, [] { return static_cast<int>(torch::stable::get_num_threads()); });
  return true;
}();

}  // namespace

DType dtype_of(std::string_view op, std::string_view name, ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return DType::kF32;
    case ScalarType::BFloat16:
      return DType::kBF16;
    case ScalarType::Half:
      return DType::kF16;
    case ScalarType::Double:
      return DType::kF64;
    case ScalarType::Int:
      return DType::kI32;
    case ScalarType::Long:
      return DType::kI64;
    case ScalarType::Char:
      return DType::kI8;
    case ScalarType::Bool:
      return DType::kBool;
    default:
      check(false, op, ": ", name, ": expected dtype float32, bfloat16, float16 or float64, got dtype number ",
            static_cast<int>(type));
      return DType::kF32;
  }
}

ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ScalarType::Float;
    case DType::kBF16:
      return ScalarType::BFloat16;
    case DType::kF16:
      return ScalarType::Half;
    case DType::kF64:
      return ScalarType::Double;
    case DType::kI32:
      return ScalarType::Int;
    case DType::kI64:
      return ScalarType::Long;
    case DType::kI8:
      return ScalarType::Char;
    case DType::kBool:
      return ScalarType::Bool;
  }
  return ScalarType::Float;
}

TensorView view(std::string_view op, std::string_view name, const Tensor& t) {
  check(t.defined(), op, ": ", name, ": expected a tensor, got none");
  check(t.is_cpu(), op, ": ", name, ": expected device cpu, got another device");
  TensorView v;
  v.dtype = dtype_of(op, name, t.scalar_type());
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  check(sizes.size() <= kMaxRank, op, ": ", name, ": expected at most ", kMaxRank, " dimensions, got ", sizes.size());
  v.rank = static_cast<int>(sizes.size());
  for (int d = 0; d < v.rank; ++d) {
    v.sizes[d] = sizes[static_cast<std::size_t>(d)];
    v.strides[d] = strides[static_cast<std::size_t>(d)];
  }
  v.data = t.data_ptr();
  return v;
}

TensorView view(std::string_view op, std::string_view name, const Optional& t) {
  return t.has_value() ? view(op, name, *t) : TensorView{};
}

TensorView dense(std::string_view op, std::string_view name, Tensor& t) {
  const TensorView v = view(op, name, t);
  if (v.rank == 0 || v.size(-1) <= 1 || v.stride(-1) == 1 || v.numel() == 0) {
    return v;
  }
  t = torch::stable::contiguous(t);
  return view(op, name, t);
}

TensorView dense(std::string_view op, std::string_view name, Optional& t) {
  return t.has_value() ? dense(op, name, *t) : TensorView{};
}

Tensor empty(std::vector<std::int64_t> sizes, ScalarType type) { return torch::stable::empty(sizes, type); }

Tensor zeros(std::vector<std::int64_t> sizes, ScalarType type) {
  Tensor t = empty(std::move(sizes), type);
  return torch::stable::zero_(t);
}

Tensor empty_like(const TensorView& t) {
  return empty(std::vector<std::int64_t>(t.sizes, t.sizes + t.rank), scalar_type(t.dtype));
}

std::vector<std::int64_t> integers(std::string_view op, std::string_view name, const Tensor& t) {
  const TensorView v = view(op, name, t);
  check(v.rank == 1, op, ": ", name, ": expected 1 dimension, got ", v.rank, " in ", Shape{v});
  std::vector<std::int64_t> list(static_cast<std::size_t>(v.sizes[0]));
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::int64_t offset = static_cast<std::int64_t>(i) * v.strides[0];
    if (v.dtype == DType::kI64) {
      list[i] = v.as<const std::int64_t>()[offset];
    } else if (v.dtype == DType::kI32) {
      list[i] = v.as<const std::int32_t>()[offset];
    } else if (v.dtype == DType::kBool || v.dtype == DType::kI8) {
      list[i] = v.as<const std::int8_t>()[offset];
    } else {
      check(false, op, ": ", name, ": expected dtype int32, int64 or bool, got dtype ", v.dtype);
    }
  }
  return list;
}

std::vector<std::int64_t> integers(std::string_view op, std::string_view name, const Optional& t) {
  return t.has_value() ? integers(op, name, *t) : std::vector<std::int64_t>{};
}

SeqLens boundaries(std::string_view op, const Optional& cu_seqlens, std::int64_t rows, std::int64_t tokens) {
  if (!cu_seqlens.has_value()) {
    return SeqLens::dense(rows, tokens);
  }
  check(rows == 1, op, ": cu_seqlens: expected none with more than one row, got ", rows, " rows");
  return SeqLens::from_cu(integers(op, "cu_seqlens", *cu_seqlens), tokens, false, op);
}

void check_apart(std::string_view op, std::initializer_list<NamedTensor> outputs,
                 std::initializer_list<NamedTensor> indices) {
  for (const auto& [out, written] : outputs) {
    for (const auto& [index, read] : indices) {
      check(!may_overlap(view(op, out, written), view(op, index, read)), op, ": ", out,
            ": expected memory of its own, got an overlap with ", index);
    }
  }
}

}  // namespace tidegate::adapter
