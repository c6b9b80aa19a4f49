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

constexpr std::pair<ScalarType, DType> kTypes[] = {
    {ScalarType::Float, DType::kF32},  {ScalarType::BFloat16, DType::kBF16}, {ScalarType::Half, DType::kF16},
    {ScalarType::Double, DType::kF64}, {ScalarType::Int, DType::kI32},       {ScalarType::Long, DType::kI64},
    {ScalarType::Char, DType::kI8},    {ScalarType::Bool, DType::kBool}};

// Also of types that no operator takes, as people write them.
std::string type_name(ScalarType type) {
  for (const auto& [known, dtype] : kTypes) {
    if (known == type) {
      return std::string(dtype_name(dtype));
    }
  }
  return type == ScalarType::Byte            ? "uint8"
         : type == ScalarType::Short         ? "int16"
         : type == ScalarType::ComplexFloat  ? "complex64"
         : type == ScalarType::ComplexDouble ? "complex128"
                                             : torch::headeronly::toString(type);
}

std::vector<std::int64_t> read_list(const TensorView& v) {
  std::vector<std::int64_t> list(static_cast<std::size_t>(v.sizes[0]));
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::int64_t offset = static_cast<std::int64_t>(i) * v.strides[0];
    list[i] = v.dtype == DType::kI64   ? v.as<const std::int64_t>()[offset]
              : v.dtype == DType::kI32 ? v.as<const std::int32_t>()[offset]
                                       : v.as<const std::int8_t>()[offset];
  }
  return list;
}

TensorView list_view(std::string_view op, std::string_view name, const Tensor& t) {
  const TensorView v = view(op, name, t);
  check(v.rank == 1, op, ": ", name, ": expected 1 dimension, got ", v.rank, " in ", Shape{v});
  return v;
}

bool is_index(const Tensor& t) { return t.scalar_type() == ScalarType::Int || t.scalar_type() == ScalarType::Long; }
bool is_flag(const Tensor& t) { return is_index(t) || t.scalar_type() == ScalarType::Bool; }

}  // namespace

DType dtype_of(std::string_view op, std::string_view name, ScalarType type) {
  for (const auto& [known, dtype] : kTypes) {
    if (known == type) {
      return dtype;
    }
  }
  check(false, op, ": ", name, ": expected dtype float32, bfloat16, float16 or float64, got dtype ", type_name(type));
  return DType::kF32;
}

ScalarType scalar_type(DType dtype) {
  for (const auto& [type, known] : kTypes) {
    if (known == dtype) {
      return type;
    }
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

Tensor empty_weight_like(const TensorView& t) {
  if (t.rank < 2 || t.stride(-1) == 1 || t.stride(-2) != 1) {
    return empty_like(t);
  }
  std::vector<std::int64_t> sizes(t.sizes, t.sizes + t.rank);
  std::swap(sizes[sizes.size() - 2], sizes[sizes.size() - 1]);
  return torch::stable::transpose(empty(sizes, scalar_type(t.dtype)), -2, -1);
}

void check_index_type(std::string_view op, std::string_view name, const Tensor& t) {
  check(t.defined(), op, ": ", name, ": expected a tensor, got none");
  check(is_index(t), op, ": ", name, ": expected dtype int32 or int64, got dtype ", type_name(t.scalar_type()));
}

std::vector<std::int64_t> integers(std::string_view op, std::string_view name, const Tensor& t) {
  check_index_type(op, name, t);
  return read_list(list_view(op, name, t));
}

std::vector<std::int64_t> integers(std::string_view op, std::string_view name, const Optional& t) {
  return t.has_value() ? integers(op, name, *t) : std::vector<std::int64_t>{};
}

std::vector<std::uint8_t> booleans(std::string_view op, std::string_view name, const Optional& t) {
  if (!t.has_value()) {
    return {};
  }
  check(is_flag(*t), op, ": ", name, ": expected dtype bool, int32 or int64, got dtype ", type_name(t->scalar_type()));
  std::vector<std::uint8_t> list;
  for (const std::int64_t value : read_list(list_view(op, name, *t))) {
    list.push_back(value != 0);
  }
  return list;
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
      if (!read.has_value() || !is_flag(*read)) {
        continue;  // absent, or refused where it is read
      }
      check(!may_overlap(view(op, out, written), view(op, index, read)), op, ": ", out,
            ": expected memory of its own, got an overlap with ", index);
    }
  }
}

}  // namespace tidegate::adapter
