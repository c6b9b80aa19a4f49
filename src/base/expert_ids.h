// Lists of expert ids and places: read once, checked while they are read.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/arena.h"
#include "base/checks.h"
#include "tidegate/moe.h"

namespace tidegate {

template <class T>
T* take(Scratch& scratch, std::int64_t n) {
  return static_cast<T*>(scratch.bytes(static_cast<std::size_t>(n) * sizeof(T)));
}

// ids [T,k] as dense int32, each -1 or below `experts`; with kTransformersEp `experts` itself reads as -1.
const std::int32_t* read_expert_ids(std::string_view op, Named ids, std::int64_t experts, ExpertIds convention,
                                    Scratch& scratch);

// The same of an index tensor of rank 1 or 2: values -1 .. limit-1.
const std::int32_t* read_places(std::string_view op, Named places, std::int64_t limit, Scratch& scratch);

// Index tensors that are written: int32 or int64.
inline void check_index_type(std::string_view op, Named t) {
  check(t.tensor.dtype == DType::kI32 || t.tensor.dtype == DType::kI64, op, ": ", t.name,
        ": expected dtype int32 or int64, got dtype ", t.tensor.dtype);
}
inline void write_index(const TensorView& t, std::int64_t offset, std::int64_t value) {
  if (t.dtype == DType::kI32) {
    t.as<std::int32_t>()[offset] = static_cast<std::int32_t>(value);
  } else {
    t.as<std::int64_t>()[offset] = value;
  }
}

// Pairs in the order of their experts. offsets[e] .. offsets[e+1] are the places of expert e.
struct Routing {
  std::int64_t experts, pairs;  // pairs: T * k
  std::int64_t* offsets;        // [experts + 1]
  std::int32_t* src;            // [pairs]: the pair of a place
  std::int32_t* pos;            // [pairs]: the place of a pair, or -1
  std::int64_t routed() const { return offsets[experts]; }
};

// A stable counting sort in blocks of pairs: one result, whoever does which block.
Routing sort_pairs(const std::int32_t* ids, std::int64_t pairs, std::int64_t experts, Scratch& scratch);

}  // namespace tidegate
