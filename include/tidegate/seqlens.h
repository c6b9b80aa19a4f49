// SeqLens: where the sequences of a step begin and end. Built once per step, checked there, shared by all layers.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "tidegate/tensor.h"

namespace tidegate {

// Tokens [begin, end) of one row. Rows matter only for dense batches and masks; packed input has one row.
struct Sequence {
  std::int64_t row;
  std::int64_t begin;
  std::int64_t end;
  std::int64_t length() const { return end - begin; }
};

// A chunk of one sequence. The grid restarts at every sequence's first token; only a sequence's last chunk is short.
struct Chunk {
  std::int64_t sequence;
  std::int64_t begin;
  std::int64_t end;
};

class SeqLens {
 public:
  // Every constructor throws Error naming op, tensor, index, expected and got. Zero-length sequences are legal.
  // `op` is the name that the message starts with.

  // cu: N+1 offsets, first 0, non-decreasing, last == tokens (or <= tokens with allow_tail).
  static SeqLens from_cu(std::span<const std::int64_t> cu, std::int64_t tokens, bool allow_tail = false,
                         std::string_view op = "seqlens");
  static SeqLens from_lengths(std::span<const std::int64_t> lengths, std::string_view op = "seqlens");
  // A change of value starts a sequence; ids need not be consecutive but must not come back.
  static SeqLens from_seq_idx(std::span<const std::int64_t> seq_idx, std::string_view op = "seqlens");
  // axes == 1: text positions, a sequence starts where the position is not the previous one plus 1, and the new
  // position must equal the very first one. axes == 3: mRoPE ids [3, T], a sequence starts where all three are 0.
  static SeqLens from_position_ids(std::span<const std::int64_t> ids, int axes = 1, std::string_view op = "seqlens");
  // mask [rows, tokens] of 0/1, the ones of a row contiguous: sequence n = the ones of row n.
  static SeqLens from_mask(std::span<const std::int64_t> mask, std::int64_t rows, std::int64_t tokens,
                           std::string_view op = "seqlens");
  // rows sequences of tokens each.
  static SeqLens dense(std::int64_t rows, std::int64_t tokens);

  std::int64_t count() const { return static_cast<std::int64_t>(sequences_.size()); }
  std::int64_t rows() const { return rows_; }
  std::int64_t tokens() const { return tokens_; }  // per row
  std::int64_t longest() const { return longest_; }
  bool covers_all_tokens() const { return covered_ == rows_ * tokens_; }
  const Sequence& operator[](std::int64_t n) const { return sequences_[static_cast<std::size_t>(n)]; }
  std::span<const Sequence> sequences() const { return sequences_; }

  // The canonical chunk list, sequence by sequence. chunk_size >= 1.
  std::vector<Chunk> chunks(std::int64_t chunk_size) const;
  // The sequence of every token (row by row), -1 where a token belongs to none.
  std::vector<std::int64_t> seq_idx() const;
  // Offsets without empty sequences, for one row: what two sources must agree on.
  std::vector<std::int64_t> boundaries() const;

  // Throws unless both describe the same boundaries after empty sequences are removed; names the first difference.
  static void check_agree(const SeqLens& a, std::string_view name_a, const SeqLens& b, std::string_view name_b,
                          std::string_view op = "seqlens");

 private:
  SeqLens(std::int64_t rows, std::int64_t tokens) : rows_(rows), tokens_(tokens) {}
  void add(Sequence s);

  std::vector<Sequence> sequences_;
  std::int64_t rows_ = 0;
  std::int64_t tokens_ = 0;
  std::int64_t longest_ = 0;
  std::int64_t covered_ = 0;
};

}  // namespace tidegate
