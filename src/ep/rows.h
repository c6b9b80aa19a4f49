// Rows in windows, and checks that dispatch and combine share.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/checks.h"
#include "base/element.h"
#include "base/row_views.h"
#include "ep/group.h"
#include "tidegate/parallel.h"

namespace tidegate::ep {

inline void check_row_bytes(std::string_view op, const Config& config, Named t) {
  check(t.tensor.sizes[1] * dtype_bytes(t.tensor.dtype) <= config.row_bytes, op, ": ", t.name,
        ": expected rows of at most ", config.row_bytes, " bytes (row_bytes of the buffer), got ",
        t.tensor.sizes[1] * dtype_bytes(t.tensor.dtype));
}

// Signatures are made by a group from its epoch, so those of another group or from before a reset are not even tried.
inline void check_handle(std::string_view op, const Group& g, const Handle& h) {
  check(h.expert_rows.size() == static_cast<std::size_t>(g.expert_begin[static_cast<std::size_t>(g.rank) + 1] -
                                                         g.expert_begin[static_cast<std::size_t>(g.rank)]) &&
            h.source_tokens.size() == static_cast<std::size_t>(g.ranks),
        op, ": handle: expected one of this buffer, got one of ", h.source_tokens.size(), " ranks and ",
        h.expert_rows.size(), " local experts");
}

inline void check_smooth_scale(std::string_view op, const Config& config, const TensorView& smooth_scale,
                               std::int64_t width) {
  check_shape(op, {"smooth_scale", smooth_scale}, {config.experts, width});
  check_dtype(op, {"smooth_scale", smooth_scale}, DType::kF32);
  check_inner_stride(op, {"smooth_scale", smooth_scale});
}

// The rows of a slot as a tensor.
inline TensorView window_view(const Group& g, char* slot, std::int64_t rows, std::int64_t width, DType dtype) {
  TensorView t = contiguous(slot + g.layout.rows, dtype, {rows, width});
  t.strides[0] = row_pitch(width * dtype_bytes(dtype)) / dtype_bytes(dtype);
  return t;
}

inline TensorView first_rows(TensorView t, std::int64_t rows) {
  t.sizes[0] = rows;
  return t;
}

inline char* row_at(const TensorView& t, std::int64_t r) {
  return static_cast<char*>(t.data) + r * t.strides[0] * dtype_bytes(t.dtype);
}

// Rows of equal type and width; nothing to do if they are the same memory.
inline void copy_rows(const TensorView& from, const TensorView& to) {
  if (from.data == to.data && (from.strides[0] == to.strides[0] || from.sizes[0] <= 1)) {
    return;
  }
  const auto bytes = static_cast<std::size_t>(from.sizes[1] * dtype_bytes(from.dtype));
  const std::int64_t step = rows_per_task(from.sizes[1]);
  parallel_for(task_count(from.sizes[0], step), [&](std::int64_t task) {
    for (std::int64_t r = task * step; r < std::min(from.sizes[0], (task + 1) * step); ++r) {
      std::memcpy(row_at(to, r), row_at(from, r), bytes);
    }
  });
}

// The slots of a token in the order of their experts, those of one expert in their own: the order in which moe_experts
// adds up, too.
inline void slots_by_expert(const std::int32_t* ids, std::int64_t slots, std::int64_t* order) {
  for (std::int64_t s = 0; s < slots; ++s) {
    std::int64_t at = s;
    for (; at > 0 && ids[order[at - 1]] > ids[s]; --at) {
      order[at] = order[at - 1];
    }
    order[at] = s;
  }
}

// [T,K] of any float type as fp32; absent: left empty.
inline void read_weights(std::string_view op, Named w, std::int64_t T, std::int64_t K, std::vector<float>& list) {
  if (!w.tensor.defined()) {
    return;
  }
  check_shape(op, w, {T, K});
  check_float(op, w);
  list.resize(static_cast<std::size_t>(T * K));
  for (std::int64_t i = 0; i < T * K; ++i) {
    list[static_cast<std::size_t>(i)] = static_cast<float>(read_element(w.tensor, offset_of(w.tensor, i / K, i % K)));
  }
}

}  // namespace tidegate::ep
