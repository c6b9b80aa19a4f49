// What the torch operators of the chunk stages share.
#pragma once

#include "adapter.h"

namespace tidegate::adapter {

using Dims = std::vector<std::int64_t>;

inline Dims sizes_of(const TensorView& t) { return {t.sizes, t.sizes + t.rank}; }
inline ScalarType wide(const TensorView& t) { return t.dtype == DType::kF64 ? ScalarType::Double : ScalarType::Float; }

// The sizes of a gate tensor with one more dimension. The operator refuses a wrong width; here it must only not matter.
inline Dims with_width(const TensorView& gate, std::int64_t width) {
  Dims sizes = sizes_of(gate);
  sizes.push_back(width >= 0 && width <= (std::int64_t{1} << 20) ? width : 0);
  return sizes;
}
inline std::int64_t last_size(const TensorView& t) { return t.rank > 0 ? t.size(-1) : 0; }

inline int token_dimension(Layout layout) { return (has_batch(layout) ? 1 : 0) + (is_head_major(layout) ? 1 : 0); }

// Boundaries need the rows and tokens of some tensor of the call; the operator itself checks the rest.
SeqLens boundaries_of(std::string_view op, std::string_view name, const TensorView& t, Layout layout, bool gate,
                      const Optional& cu_seqlens);

// Sizes of h or dh, for gates gc and head sizes K and V; num_chunks is what the caller says about their number.
Dims chunk_state_sizes(std::string_view op, const SeqLens& seq, std::int64_t chunk_size, const TensorView& gc,
                       Layout layout, std::int64_t K, std::int64_t V, std::optional<std::int64_t> num_chunks);
// Sizes of the states of sequences.
Dims state_sizes(const SeqLens& seq, const TensorView& gc, Layout layout, std::int64_t K, std::int64_t V, bool v_first);

}  // namespace tidegate::adapter
