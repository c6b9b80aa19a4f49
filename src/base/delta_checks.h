// Checks that the operators of the delta rule share: tensors of tokens and heads in any layout.
#pragma once

#include "base/checks.h"
#include "base/heads.h"
#include "tidegate/seqlens.h"

namespace tidegate {

// Sizes of one call. Operators without q, k or v leave what they do not know at 0.
struct DeltaSizes {
  std::int64_t B, T, HK, HV, K, V;
  std::int64_t group() const { return HV / HK; }
};

// The strides of a [.., D] tensor of tokens and heads, or of a gate tensor without the last dimension. Absent: null.
Heads heads_of(const TensorView& t, Layout layout);
Heads gates_of(const TensorView& t, Layout layout);

// Shape of a tensor [B,T,H,D] (D > 0) or a gate [B,T,H] (D == 0) in a layout; and the check of it.
void check_tokens_heads(std::string_view op, Named t, Layout layout, const DeltaSizes& s, std::int64_t heads,
                        std::int64_t width);

// q (or any first tensor with key heads) fixes B, T, HK and K; v fixes HV and V. Both: rank, data type, inner stride.
DeltaSizes key_sizes(std::string_view op, Named k, Layout layout);
void value_sizes(std::string_view op, Named v, Named k, Layout layout, DeltaSizes& s);

// Boundaries must describe these rows and tokens.
void check_boundaries(std::string_view op, const SeqLens& seq, const DeltaSizes& s);

// fp64 goes with fp64 and only with it.
void check_wide(std::string_view op, Named t, Named like);

// A gate [B,T,HV] of any float type.
void check_gate(std::string_view op, Named t, Named k, Layout layout, const DeltaSizes& s);

// States [count,HV,K,V], or [count,HV,V,K]; `what` says where the count comes from. Absent passes.
void check_states(std::string_view op, Named t, Named k, const DeltaSizes& s, std::int64_t count, std::string_view what,
                  bool v_first);
// States that are written: not fp16.
void check_stored(std::string_view op, Named t);

}  // namespace tidegate
