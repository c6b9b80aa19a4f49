// The low-rank additions of LoRA: products with narrow matrices beside those with the weights.
#pragma once

#include "ops/moe_experts/plan.h"
#include "tidegate/cpu.h"

namespace tidegate::moe_experts {

// Rows of the places, and the narrow matrices that take them to `rank` numbers.
struct Narrowing {
  const Weights* weights[2];  // the results of two are added; the second may be absent
  const void* const* rows[2];
  int row_type;
  bool transposed;  // rows times W instead of W times rows
  float scale;
};
// out[place][rank] for all places of a set.
inline void narrow(const Set& s, const Narrowing& n, std::int64_t rank, float* out, Scratch& scratch) {
  const grouped_matmul::BlockTasks tasks(s.offsets, s.groups, rank, scratch);
  const std::int64_t room_floats = grouped_matmul_kernels_for(active_isa()).room_floats;
  parallel_for(tasks.count(), [&](std::int64_t i) {
    const grouped_matmul::BlockTasks::Task t = tasks[i];
    Scratch own;
    float* room = own.floats(room_floats);
    float* to = out + t.row * rank + t.column;
    for (int j = 0; j < 2 && n.weights[j] != nullptr; ++j) {
      multiply({*n.weights[j], t.group, t.column, t.columns, n.transposed}, n.rows[j] + t.row, n.row_type, t.rows, to,
               rank, j == 1, room);
    }
    for (std::int64_t r = 0; r < t.rows; ++r) {
      for (std::int64_t c = 0; c < t.columns; ++c) {
        to[r * rank + c] *= n.scale;
      }
    }
  });
}

// Adds the product of `weight` with rows of `rank` numbers, those of the places from `place` on.
inline void widen(const Factor& weight, const float* narrow_rows, std::int64_t rank, std::int64_t place,
                  std::int64_t count, float* out, std::int64_t pitch, float* room) {
  const void* rows[grouped_matmul::kBlockRows];
  for (std::int64_t r = 0; r < count; ++r) {
    rows[r] = narrow_rows + (place + r) * rank;
  }
  constexpr int kFloat = 0;
  multiply(weight, rows, kFloat, count, out, pitch, true, room);
}

inline const void** narrow_rows(const Set& s, const float* rows, std::int64_t rank, Scratch& scratch) {
  return grouped_matmul::row_pointers(s.places, scratch, [&](std::int64_t j) { return rows + j * rank; });
}

// [places][width] in x's type, by pointers.
inline const void** hidden_rows(const Plan& p, const Set& s, const char* data, Scratch& scratch) {
  return grouped_matmul::row_pointers(s.places, scratch,
                                      [&](std::int64_t j) { return data + j * s.width() * p.bytes; });
}

// gate and up of a block of places: where they are kept, or scratch memory.
struct HiddenBlock {
  float *gate, *up;
  std::int64_t pitch;
};
inline HiddenBlock hidden_place(const Set& s, const grouped_matmul::BlockTasks::Task& t, Scratch& own) {
  if (s.hidden != nullptr) {
    float* gate = s.hidden + t.row * s.hidden_row + t.column;
    return {gate, gate + s.hidden_up, s.hidden_row};
  }
  const std::int64_t size = t.rows * grouped_matmul::kBlockColumns;
  return {own.floats(size), own.floats(size), grouped_matmul::kBlockColumns};
}

// Computes them, with their additions. later: the weight of the next block, or null. same_rows: as in the block before.
inline void hidden_block(const Plan& p, const Set& s, const grouped_matmul::BlockTasks::Task& t, const HiddenBlock& h,
                         float* room, const void* later = nullptr, bool same_rows = false) {
  const Weights* weights[] = {&s.gate, &s.up};
  float* to[] = {h.gate, h.up};
  const LowRank& l = s.hidden_lora;
  for (int i = 0; i < 2; ++i) {
    const void* next = i == 0 ? s.up.at(t.group, t.column, 0) : later;
    // gate and up of a shared expert may be unlike, and then their products pack rows differently, or not at all; an
    // addition uses the room for itself.
    const bool alike = s.gate.type == s.up.type && s.gate.row == s.up.row && s.gate.column == s.up.column;
    const bool packed = (i == 1 || same_rows) && alike && l.rank == 0;
    multiply({*weights[i], t.group, t.column, t.columns, false, next, packed}, s.x_rows + t.row, p.type, t.rows, to[i],
             h.pitch, false, room);
    if (l.rank > 0) {
      widen({l.b[i], t.group, t.column, t.columns, false}, l.u, l.rank, t.row, t.rows, to[i], h.pitch, room);
    }
  }
}

// u of gate and up, from x; of down, from silu(gate) * up.
inline void narrow_x(const Plan& p, const Set& s, Scratch& scratch) {
  const LowRank& l = s.hidden_lora;
  if (l.rank > 0) {
    narrow(s, {{&l.a, nullptr}, {s.x_rows, nullptr}, p.type, false, l.scale}, l.rank, l.u, scratch);
  }
}
inline void narrow_hidden(const Plan& p, const Set& s, Scratch& scratch) {
  const LowRank& l = s.down_lora;
  if (l.rank > 0) {
    narrow(s, {{&l.a, nullptr}, {hidden_rows(p, s, s.a, scratch), nullptr}, p.type, false, l.scale}, l.rank, l.u,
           scratch);
  }
}

}  // namespace tidegate::moe_experts
