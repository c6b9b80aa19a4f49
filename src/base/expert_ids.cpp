#include "base/expert_ids.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "base/element.h"
#include "tidegate/parallel.h"

namespace tidegate {
namespace {

// Reads values -1 .. limit-1; `foreign` reads as -1.
const std::int32_t* read_indices(std::string_view op, Named t, std::int64_t limit, std::int64_t foreign,
                                 Scratch& scratch) {
  const TensorView& v = t.tensor;
  check_index_type(op, t);
  check(v.numel() <= std::numeric_limits<std::int32_t>::max(), op, ": ", t.name,
        ": expected at most 2^31 - 1 entries, got ", v.numel());
  auto* out = take<std::int32_t>(scratch, v.numel());
  const std::int64_t columns = v.rank == 2 ? v.sizes[1] : 1;
  const std::int64_t step = v.rank == 2 ? v.strides[1] : 0;
  for (std::int64_t r = 0; r < v.sizes[0]; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) {
      const std::int64_t at = r * v.strides[0] + c * step;
      const std::int64_t id = v.dtype == DType::kI32 ? v.as<const std::int32_t>()[at] : v.as<const std::int64_t>()[at];
      if ((id < -1 || id >= limit) && id != foreign) [[unlikely]] {
        const std::string column = v.rank == 2 ? "," + std::to_string(c) : "";
        const std::string others = limit > 0 ? " or 0.." + std::to_string(limit - 1) : " (there are none)";
        check(false, op, ": ", t.name, "[", r, column, "]: expected -1", others, ", got ", id);
      }
      out[r * columns + c] = id == foreign ? -1 : static_cast<std::int32_t>(id);
    }
  }
  return out;
}

}  // namespace

ExpertIds parse_expert_ids(std::string_view op, std::string_view name) {
  if (name == "plain") return ExpertIds::kPlain;
  if (name == "transformers_ep") return ExpertIds::kTransformersEp;
  check(false, op, ": ids_convention: expected plain or transformers_ep, got ", name);
  return ExpertIds::kPlain;
}

const std::int32_t* read_expert_ids(std::string_view op, Named ids, std::int64_t experts, ExpertIds convention,
                                    Scratch& scratch) {
  return read_indices(op, ids, experts, convention == ExpertIds::kTransformersEp ? experts : -1, scratch);
}

const std::int32_t* read_places(std::string_view op, Named places, std::int64_t limit, Scratch& scratch) {
  return read_indices(op, places, limit, -1, scratch);
}

Routing sort_pairs(const std::int32_t* ids, std::int64_t pairs, std::int64_t experts, Scratch& scratch) {
  Routing r{experts, pairs, take<std::int64_t>(scratch, experts + 1), take<std::int32_t>(scratch, pairs),
            take<std::int32_t>(scratch, pairs)};
  // A block counts into a row of its own, so it must be longer than the row for the counting to be worth sharing.
  const std::int64_t block = std::max<std::int64_t>(8192, 8 * experts);
  const std::int64_t blocks = (pairs + block - 1) / block;
  auto* next = take<std::int32_t>(scratch, blocks * experts);  // first the counts, then the next place
  parallel_for(blocks, [&](std::int64_t b) {
    std::int32_t* count = next + b * experts;
    std::memset(count, 0, static_cast<std::size_t>(experts) * sizeof *count);
    for (std::int64_t i = b * block; i < std::min(pairs, (b + 1) * block); ++i) {
      if (ids[i] >= 0) {
        ++count[ids[i]];
      }
    }
  });
  std::int64_t place = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    r.offsets[e] = place;
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::int32_t count = next[b * experts + e];
      next[b * experts + e] = static_cast<std::int32_t>(place);
      place += count;
    }
  }
  r.offsets[experts] = place;
  parallel_for(blocks, [&](std::int64_t b) {
    for (std::int64_t i = b * block; i < std::min(pairs, (b + 1) * block); ++i) {
      r.pos[i] = ids[i] >= 0 ? next[b * experts + ids[i]]++ : -1;
      if (ids[i] >= 0) {
        r.src[r.pos[i]] = static_cast<std::int32_t>(i);
      }
    }
  });
  for (std::int64_t j = place; j < pairs; ++j) {
    r.src[j] = -1;
  }
  return r;
}

}  // namespace tidegate
