// What the chunk operators share before their kernels: the list of chunks, checks, and element access for references.
#pragma once

#include <optional>
#include <vector>

#include "base/chunk_data.h"
#include "base/delta_checks.h"
#include "base/element.h"

namespace tidegate {

struct ChunkProblem {
  DeltaSizes size;
  std::int64_t C;
  Layout layout;
  std::int64_t sequences;
  std::vector<ChunkSpan> chunks;  // sequence by sequence
};
ChunkProblem chunk_problem(const DeltaSizes& size, std::int64_t chunk_size, Layout layout, const SeqLens& seq);

void check_chunk_size(std::string_view op, Named where, std::int64_t chunk_size);

// The scale of q: a finite number, K^-0.5 if none is given.
double scale_or_default(std::string_view op, std::optional<double> scale, std::int64_t K);

// gc or another gate tensor without k beside it: B, T and HV.
DeltaSizes gate_sizes(std::string_view op, Named t, Layout layout);
// The value heads of a call that has k and gates but no v.
void gate_heads(std::string_view op, Named t, Named k, Layout layout, DeltaSizes& s);

// k beside q: the same shape and type.
void check_keys(std::string_view op, Named k, Named q);
// gc: fp32, or fp64 with fp64 data. beta: fp32 or the type of the data.
void check_gc(std::string_view op, Named gc, Named data, Layout layout, const DeltaSizes& s);
void check_beta(std::string_view op, Named beta, Named data, Layout layout, const DeltaSizes& s);
// fp32 or the type of the data; fp64 goes with fp64.
void check_intermediate_type(std::string_view op, Named t, Named data);
// w, u, v_new, A0, A: shape and type.
void check_intermediate(std::string_view op, Named t, Named data, Layout layout, const DeltaSizes& s,
                        std::int64_t width);
// dq, dk: shape and type.
void check_key_gradient(std::string_view op, Named t, Named data, Layout layout, const DeltaSizes& s);
// h, one state for every chunk; the type is checked too.
void check_chunk_states(std::string_view op, Named h, Named data, Layout layout, const DeltaSizes& s, std::int64_t NT);

// States, one for every sequence, and the strides of them. Absent: null.
void check_states(std::string_view op, Named t, std::int64_t sequences, const DeltaSizes& s, bool v_first);
SequenceStates states_of(const TensorView& t, bool v_first);
// Where the chunks of every sequence begin in the list, and its end.
std::vector<std::size_t> first_chunks(const ChunkProblem& p);

// Also of h, where chunks stand in the place of tokens. Absent: null.
TypedHeads typed_heads(const TensorView& t, Layout layout);

// One element at a time, for plain loops. Acc is the type of the arithmetic.
template <class Acc>
class Elements {
 public:
  Elements(const TensorView& t, Layout layout) : t_(t), at_(heads_of(t, layout)) {}
  bool defined() const { return t_.defined(); }
  Acc get(const ChunkSpan& c, std::int64_t i, std::int64_t head, std::int64_t d = 0) const {
    return static_cast<Acc>(read_element(t_, offset(c, i, head, d)));
  }
  void set(const ChunkSpan& c, std::int64_t i, std::int64_t head, std::int64_t d, Acc value) const {
    write_element(t_, offset(c, i, head, d), value);
  }

 private:
  std::int64_t offset(const ChunkSpan& c, std::int64_t i, std::int64_t head, std::int64_t d) const {
    return c.row * at_.row + (c.begin + i) * at_.token + head * at_.head + d;
  }
  TensorView t_;
  Heads at_;
};

// The same for the state of a chunk in h.
template <class Acc>
class StateElements {
 public:
  StateElements(const TensorView& h, Layout layout) : h_(h), at_(heads_of(h, layout)) {}
  Acc get(const ChunkSpan& c, std::int64_t head, std::int64_t k, std::int64_t v) const {
    return static_cast<Acc>(read_element(h_, offset(c, head, k, v)));
  }
  void set(const ChunkSpan& c, std::int64_t head, std::int64_t k, std::int64_t v, Acc value) const {
    write_element(h_, offset(c, head, k, v), value);
  }

 private:
  std::int64_t offset(const ChunkSpan& c, std::int64_t head, std::int64_t k, std::int64_t v) const {
    return c.row * at_.row + c.number * at_.token + head * at_.head + k * h_.stride(-2) + v;
  }
  TensorView h_;
  Heads at_;
};

// The offset of element (k, v) of a sequence's state.
inline std::int64_t state_offset(const TensorView& t, bool v_first, std::int64_t n, std::int64_t head, std::int64_t k,
                                 std::int64_t v) {
  return v_first ? offset_of(t, n, head, v, k) : offset_of(t, n, head, k, v);
}

}  // namespace tidegate
