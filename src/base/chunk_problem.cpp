#include "base/chunk_problem.h"

#include <algorithm>
#include <cmath>

#include "tidegate/chunk.h"

namespace tidegate {

ChunkProblem chunk_problem(const DeltaSizes& size, std::int64_t chunk_size, Layout layout, const SeqLens& seq) {
  ChunkProblem p{size, chunk_size, layout, seq.count(), {}};
  std::vector<std::int64_t> count(static_cast<std::size_t>(seq.rows()), 0);
  for (const Chunk& c : seq.chunks(chunk_size)) {
    const std::int64_t row = seq[c.sequence].row;
    p.chunks.push_back({c.sequence, row, c.begin, c.end - c.begin, count[static_cast<std::size_t>(row)]++});
  }
  return p;
}

std::int64_t chunks_per_row(const SeqLens& seq, std::int64_t chunk_size) {
  std::vector<std::int64_t> count(static_cast<std::size_t>(seq.rows()), 0);
  for (const Chunk& c : seq.chunks(chunk_size)) {
    ++count[static_cast<std::size_t>(seq[c.sequence].row)];
  }
  return count.empty() ? 0 : *std::max_element(count.begin(), count.end());
}

void check_chunk_size(std::string_view op, Named where, std::int64_t chunk_size) {
  const bool known = chunk_size == 16 || chunk_size == 32 || chunk_size == 64 || chunk_size == 128;
  check(known, op, ": ", where.name, where.tensor.defined() ? ": expected a last size" : ": expected a chunk size",
        " of 16, 32, 64 or 128, got ", chunk_size);
}

double scale_or_default(std::string_view op, std::optional<double> scale, std::int64_t K) {
  const double value = scale.value_or(1.0 / std::sqrt(static_cast<double>(K)));
  check(std::isfinite(value), op, ": scale: expected a finite number, got ", value);
  return value;
}

DeltaSizes gate_sizes(std::string_view op, Named t, Layout layout) {
  check_rank(op, t, has_batch(layout) ? 3 : 2);
  check_data_type(op, t);
  DeltaSizes s{};
  s.B = has_batch(layout) ? t.tensor.size(0) : 1;
  s.T = t.tensor.size(is_head_major(layout) ? -1 : -2);
  s.HV = t.tensor.size(is_head_major(layout) ? -2 : -1);
  return s;
}

void gate_heads(std::string_view op, Named t, Named k, Layout layout, DeltaSizes& s) {
  const std::int64_t heads = gate_sizes(op, t, layout).HV;
  check(heads >= 1 && heads % s.HK == 0, op, ": ", t.name, ": expected a multiple of ", s.HK, " (heads of ", k.name,
        ") heads, got ", heads);
  s.HV = heads;
}

void check_intermediate_type(std::string_view op, Named t, Named data) {
  const DType type = data.tensor.dtype;
  if (type == DType::kF64 || type == DType::kF32) {
    check_same_dtype(op, t, data);
  } else {
    check(t.tensor.dtype == DType::kF32 || t.tensor.dtype == type, op, ": ", t.name, ": expected dtype float32 or ",
          type, " (as ", data.name, "), got dtype ", t.tensor.dtype);
  }
}

void check_keys(std::string_view op, Named k, Named q) {
  check_same_shape(op, k, q);
  check_same_dtype(op, k, q);
  check_inner_stride(op, k);
}

void check_gc(std::string_view op, Named gc, Named data, Layout layout, const DeltaSizes& s) {
  check_tokens_heads(op, gc, layout, s, s.HV, 0);
  check_dtype(op, gc, data.tensor.dtype == DType::kF64 ? DType::kF64 : DType::kF32);
}

void check_beta(std::string_view op, Named beta, Named data, Layout layout, const DeltaSizes& s) {
  check_tokens_heads(op, beta, layout, s, s.HV, 0);
  check_intermediate_type(op, beta, data);
}

void check_intermediate(std::string_view op, Named t, Named data, Layout layout, const DeltaSizes& s,
                        std::int64_t width) {
  check_tokens_heads(op, t, layout, s, s.HV, width);
  check_intermediate_type(op, t, data);
}

void check_key_gradient(std::string_view op, Named t, Named data, Layout layout, const DeltaSizes& s) {
  check_tokens_heads(op, t, layout, s, s.HK, s.K);
  check_intermediate_type(op, t, data);
}

void check_chunk_states(std::string_view op, Named h, Named data, Layout layout, const DeltaSizes& s, std::int64_t NT) {
  const bool head_major = is_head_major(layout);
  const std::int64_t first = head_major ? s.HV : NT;
  const std::int64_t second = head_major ? NT : s.HV;
  if (has_batch(layout)) {
    check_shape(op, h, {s.B, first, second, s.K, s.V});
  } else {
    check_shape(op, h, {first, second, s.K, s.V});
  }
  check_intermediate_type(op, h, data);
  check_inner_stride(op, h);
}

void check_states(std::string_view op, Named t, std::int64_t sequences, const DeltaSizes& s, bool v_first) {
  check_rank(op, t, 4);
  check(t.tensor.size(0) == sequences, op, ": ", t.name, ": expected ", sequences, " states (one per sequence), got ",
        t.tensor.size(0));
  check_shape(op, t, {sequences, s.HV, v_first ? s.V : s.K, v_first ? s.K : s.V});
  check_inner_stride(op, t);
}

SequenceStates states_of(const TensorView& t, bool v_first) {
  if (!t.defined()) {
    return {};
  }
  return {t.data,       data_type_index(t.dtype),   t.strides[0],
          t.strides[1], t.strides[v_first ? 3 : 2], t.strides[v_first ? 2 : 3]};
}

// Where the chunks of every sequence begin in the list, and its end.
std::vector<std::size_t> first_chunks(const ChunkProblem& p) {
  std::vector<std::size_t> first(static_cast<std::size_t>(p.sequences) + 1, 0);
  for (const ChunkSpan& c : p.chunks) {
    ++first[static_cast<std::size_t>(c.sequence) + 1];
  }
  for (std::size_t n = 1; n < first.size(); ++n) {
    first[n] += first[n - 1];
  }
  return first;
}

TypedHeads typed_heads(const TensorView& t, Layout layout) {
  return {heads_of(t, layout), t.defined() ? data_type_index(t.dtype) : 0};
}

}  // namespace tidegate
