// seqlens: boundaries of a packed step from any of their usual sources, checked once; and library facts for report().
#include "adapter.h"

namespace tidegate::adapter {
namespace {

// A [T] or [1,T] integer tensor (or row 0 of [4,1,T]) as a list.
std::vector<std::int64_t> flat(std::string_view op, std::string_view name, Tensor t) {
  check_index_type(op, name, t);
  TensorView v = view(op, name, t);
  if (v.rank == 3 && v.size(0) == 4) {
    t = torch::stable::select(t, 0, 0);
    v = view(op, name, t);
  }
  check(v.rank == 1 || (v.rank == 2 && v.size(0) == 1), op, ": ", name, ": expected [T] or [1, T], got ", Shape{v});
  return integers(op, name, torch::stable::flatten(t, 0, -1));
}

SeqLens from_positions(std::string_view op, const Tensor& t) {
  check_index_type(op, "position_ids", t);
  const TensorView v = view(op, "position_ids", t);
  if (v.rank == 3 && v.size(0) == 3) {
    check(v.size(1) == 1, op, ": position_ids: expected one row [3, 1, T], got ", Shape{v});
    return SeqLens::from_position_ids(integers(op, "position_ids", torch::stable::flatten(t, 0, -1)), 3, op);
  }
  return SeqLens::from_position_ids(flat(op, "position_ids", t), 1, op);
}

// int32 [T+1], the offsets without empty sequences, padded with T: a shape that does not depend on the values.
Tensor seqlens(Optional cu_seqlens, Optional seq_idx, Optional position_ids, std::int64_t tokens) {
  constexpr std::string_view op = "seqlens";
  std::optional<SeqLens> found;
  std::string_view source;
  const auto take = [&](std::string_view name, SeqLens s) {
    check(s.rows() * s.tokens() == tokens || s.tokens() == tokens, op, ": ", name, ": expected boundaries of ", tokens,
          " tokens, got ", s.tokens());
    if (found.has_value()) {
      SeqLens::check_agree(*found, source, s, name, op);
      return;
    }
    found = std::move(s);
    source = name;
  };
  check(tokens >= 0, op, ": tokens: expected >= 0, got ", tokens);
  if (cu_seqlens.has_value()) {
    take("cu_seqlens", SeqLens::from_cu(integers(op, "cu_seqlens", *cu_seqlens), tokens, false, op));
  }
  if (seq_idx.has_value()) {
    take("seq_idx", SeqLens::from_seq_idx(flat(op, "seq_idx", *seq_idx), op));
  }
  if (position_ids.has_value()) {
    take("position_ids", from_positions(op, *position_ids));
  }
  check(found.has_value(), op, ": cu_seqlens: expected one of cu_seqlens, seq_idx and position_ids, got none");
  Tensor out = empty({tokens + 1}, ScalarType::Int);
  auto* p = static_cast<std::int32_t*>(out.mutable_data_ptr());
  std::int64_t n = 0;
  for (const std::int64_t b : found->boundaries()) {
    p[n++] = static_cast<std::int32_t>(b);
  }
  while (n <= tokens) {
    p[n++] = static_cast<std::int32_t>(tokens);
  }
  return out;
}

// Facts for report(): version, ISA in use, ISAs available, separated by semicolons. Takes no tensor, so it is
// registered for every backend.
std::string about() {
  std::string text = std::string(TIDEGATE_VERSION) + ";" + std::string(isa_name(active_isa())) + ";";
  for (const Isa isa : available_isas()) {
    if (text.back() != ';') {
      text += ",";
    }
    text += isa_name(isa);
  }
  return text;
}

void choose_isa(std::string name) { set_isa(name); }

}  // namespace

STABLE_TORCH_LIBRARY(tidegate, m) {
  m.def(
      "seqlens(Tensor? cu_seqlens=None, Tensor? seq_idx=None, Tensor? position_ids=None, *, SymInt tokens) -> Tensor");
  m.def("about() -> str");
  m.def("set_isa(str name) -> ()");
}

// These can be called without any tensor, so no backend key would find them.
STABLE_TORCH_LIBRARY_IMPL(tidegate, CompositeExplicitAutograd, m) {
  m.impl("seqlens", TORCH_BOX(&seqlens));
  m.impl("about", TORCH_BOX(&about));
  m.impl("set_isa", TORCH_BOX(&choose_isa));
}

}  // namespace tidegate::adapter
