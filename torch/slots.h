// Lists that name slots of a state pool, shared by the operators that work on one.
#pragma once

#include "adapter.h"

namespace tidegate::adapter {

// state_indices [N] or [N, M], row by row; per_sequence is M, or 0 for [N].
struct SlotIndices {
  std::vector<std::int64_t> slots;
  std::int64_t per_sequence;
};
inline SlotIndices slot_indices(std::string_view op, const Tensor& state_indices, const SeqLens& seq) {
  check_index_type(op, "state_indices", state_indices);
  const TensorView v = view(op, "state_indices", state_indices);
  check(v.rank == 1 || v.rank == 2, op, ": state_indices: expected [N] or [N, M], got ", Shape{v});
  if (v.rank == 1) {
    return {integers(op, "state_indices", state_indices), 0};
  }
  check(v.size(0) == seq.count(), op, ": state_indices: expected ", seq.count(), " rows (one per sequence), got ",
        v.size(0));
  check(v.size(1) > 0, op, ": state_indices: expected at least 1 column, got 0");
  return {integers(op, "state_indices", torch::stable::flatten(state_indices, 0, -1)), v.size(1)};
}

// An optional list of one entry per sequence. To the core an empty list is an absent one, so one that is given and
// empty is refused here.
template <class List>
List checked_list(std::string_view op, std::string_view name, const Optional& t, const SeqLens& seq, List list) {
  check(!t.has_value() || !list.empty() || seq.count() == 0, op, ": ", name, ": expected ", seq.count(),
        " entries (one per sequence), got 0");
  return list;
}
inline std::vector<std::int64_t> per_sequence(std::string_view op, std::string_view name, const Optional& t,
                                              const SeqLens& seq) {
  return checked_list(op, name, t, seq, integers(op, name, t));
}
inline std::vector<std::uint8_t> per_sequence_flags(std::string_view op, std::string_view name, const Optional& t,
                                                    const SeqLens& seq) {
  return checked_list(op, name, t, seq, booleans(op, name, t));
}

// Boundaries of packed tokens. Without cu_seqlens it is a decode step: every token is a sequence.
inline SeqLens packed_sequences(std::string_view op, const Optional& cu_seqlens, std::int64_t tokens) {
  return cu_seqlens.has_value() ? boundaries(op, cu_seqlens, 1, tokens)
                                : SeqLens::from_lengths(std::vector<std::int64_t>(static_cast<std::size_t>(tokens), 1));
}

}  // namespace tidegate::adapter
