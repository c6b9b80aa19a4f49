// Expand: a rank takes its rows from the windows of all ranks.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/arena.h"
#include "base/checks.h"
#include "base/expert_ids.h"
#include "base/float_environment.h"
#include "base/row_checks.h"
#include "ep/group.h"
#include "ep/kernel.h"
#include "ep/rows.h"
#include "ops/quantize/kernel.h"
#include "tidegate/cpu.h"

namespace tidegate::ep {
namespace {

void check_current(std::string_view op, const Group& g, const Handle& h) {
  g.check_healthy();
  check(g.signature == h.signature, op, ": handle: expected that of the last dispatch, got another one");
}

const char* token_row(const Group& g, int source, std::int64_t token) {
  return g.current(source) + g.layout.rows + token * row_pitch(g.row_bytes);
}

// A token's row is read once and written to all its places: past the caches when the rows of all ranks do not fit into
// them, for then an ordinary store finds its line in no cache and reads it from memory first. The ranks of a node share
// the last cache. Below its size (of the machine on which this was measured) combine finds the rows still there: 15 MB
// of four ranks took 0.88 of the time of dispatch and combine, 29 MB of eight 0.95.
constexpr std::int64_t kCachedBytes = std::int64_t{32} << 20;

// Rows of a static shape behind those that came.
void clear_behind(const Handle& h, const TensorView& out, const TensorView& scales) {
  for (std::int64_t j = h.rows; j < h.shape_rows; ++j) {
    std::memset(row_at(out, j), 0, static_cast<std::size_t>(out.sizes[1] * dtype_bytes(out.dtype)));
    if (scales.defined()) {
      scales.as<float>()[j * scales.strides[0]] = 0.0f;
    }
  }
}

// Every row times the factors of its expert, quantised.
void expand_smooth(const Group& g, const Handle& h, const TensorView& out, const TensorView& scales,
                   const TensorView& smooth_scale) {
  const FloatEnvironment environment;
  const std::int64_t width = out.sizes[1];
  std::vector<std::int64_t> ends(h.expert_rows.size());
  std::partial_sum(h.expert_rows.begin(), h.expert_rows.end(), ends.begin());
  const auto scale_row = ep_kernels_for(active_isa()).scale_row[data_type_index(g.dtype)];
  const auto quantise = quantize_kernels_for(active_isa()).row[data_type_index(DType::kF32)];
  for_row_tasks(h.rows, width, [&](std::int64_t first, std::int64_t last, std::int64_t) {
    Scratch scratch;
    float* scaled = scratch.floats(width);
    for (std::int64_t j = first; j < last; ++j) {
      const auto i = static_cast<std::size_t>(j);
      const std::int64_t e = g.expert_begin[static_cast<std::size_t>(g.rank)] +
                             (std::upper_bound(ends.begin(), ends.end(), j) - ends.begin());
      scale_row(token_row(g, h.row_rank[i], h.row_pair[i] / h.slots),
                smooth_scale.as<const float>() + e * smooth_scale.strides[0], scaled, width);
      scales.as<float>()[j * scales.strides[0]] = quantise(scaled, width, out.as<std::int8_t>() + j * out.strides[0]);
    }
  });
}

}  // namespace

void Buffer::expand(const Handle& h, const TensorView& out, const TensorView& scales,
                    const TensorView& smooth_scale) const {
  constexpr std::string_view op = "ep_expand";
  const Group& g = *group_;
  check_current(op, g, h);
  check_rank(op, {"out", out}, 2);
  check_inner_stride(op, {"out", out});
  check_shape(op, {"out", out}, {h.shape_rows, out.sizes[1]});
  const bool int8 = g.int8 || g.smooth;
  const std::int64_t row_bytes = g.smooth ? g.row_bytes / dtype_bytes(g.dtype) : g.row_bytes;
  check(out.sizes[1] * dtype_bytes(out.dtype) == row_bytes, op, ": out: expected rows of ", row_bytes, " bytes, got ",
        out.sizes[1] * dtype_bytes(out.dtype));
  check(int8 == (out.dtype == DType::kI8), op, ": out: expected dtype ", int8 ? "int8" : "of the tokens",
        ", got dtype ", out.dtype);
  const auto check_given = [&](Named t, bool expected) {
    check(t.tensor.defined() == expected, op, ": ", t.name, ": expected ", expected ? "a tensor" : "none",
          " for the rows that were sent, got ", t.tensor.defined() ? "a tensor" : "none");
  };
  check_given({"scales", scales}, int8);
  check_given({"smooth_scale", smooth_scale}, g.smooth);
  if (int8) {
    check_shape(op, {"scales", scales}, {h.shape_rows});
    check_dtype(op, {"scales", scales}, DType::kF32);
  }
  clear_behind(h, out, scales);
  if (g.smooth) {
    check_smooth_scale(op, g.config, smooth_scale, out.sizes[1]);
    expand_smooth(g, h, out, scales, smooth_scale);
    return;
  }
  if (h.rows == 0) {
    return;
  }
  Scratch scratch;
  // Places of every pair that comes to me, source by source.
  std::vector<std::int64_t> first(1, 0);
  for (const std::int64_t tokens : h.source_tokens) {
    first.push_back(first.back() + tokens);
  }
  auto* places = take<std::int32_t>(scratch, first.back() * h.slots);
  std::memset(places, 0xff, static_cast<std::size_t>(first.back() * h.slots) * sizeof *places);
  for (std::size_t j = 0; j < h.row_pair.size(); ++j) {
    const std::int64_t source = first[static_cast<std::size_t>(h.row_rank[j])];
    places[source * h.slots + h.row_pair[j]] = static_cast<std::int32_t>(j);
  }
  const Kernels& kernels = ep_kernels_for(active_isa());
  const bool stream = first.back() * h.slots * g.row_bytes > kCachedBytes && should_stream_rows(out, 0);
  // Several tokens a task, because each task ends with a fence.
  for_row_tasks(first.back(), g.row_bytes / 4, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
    auto source = std::upper_bound(first.begin(), first.end(), begin) - first.begin() - 1;
    for (std::int64_t t = begin; t < end; ++t) {
      while (t >= first[static_cast<std::size_t>(source) + 1]) {
        ++source;
      }
      const int r = static_cast<int>(source);
      const std::int64_t token = t - first[static_cast<std::size_t>(source)];
      for (std::int64_t k = 0; k < h.slots; ++k) {
        const std::int64_t place = places[t * h.slots + k];
        if (place < 0) {
          continue;
        }
        char* to = static_cast<char*>(out.data) + place * out.strides[0] * dtype_bytes(out.dtype);
        if (stream) {
          kernels.stream_row(to, token_row(g, r, token), g.row_bytes);
        } else {
          std::memcpy(to, token_row(g, r, token), static_cast<std::size_t>(g.row_bytes));
        }
        if (g.int8) {
          scales.as<float>()[place * scales.strides[0]] =
              reinterpret_cast<const float*>(g.current(r) + g.layout.scales)[token];
        }
      }
    }
    if (stream) {
      kernels.fence();
    }
  });
}

std::vector<const void*> Buffer::row_pointers(const Handle& h) const {
  const Group& g = *group_;
  check_current("ep_row_pointers", g, h);
  std::vector<const void*> rows(h.row_pair.size());
  for (std::size_t j = 0; j < rows.size(); ++j) {
    rows[j] = token_row(g, h.row_rank[j], h.row_pair[j] / h.slots);
  }
  return rows;
}

}  // namespace tidegate::ep
