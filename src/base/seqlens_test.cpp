#include "tidegate/seqlens.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "tidegate/error.h"

namespace tidegate {
namespace {

using List = std::vector<std::int64_t>;
using Triples = std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>;

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

Triples triples(const SeqLens& seq) {
  Triples list;
  for (const Sequence& s : seq.sequences()) {
    list.emplace_back(s.row, s.begin, s.end);
  }
  return list;
}

Triples chunks(const SeqLens& seq, std::int64_t chunk_size) {
  Triples list;
  for (const Chunk& c : seq.chunks(chunk_size)) {
    list.emplace_back(c.sequence, c.begin, c.end);
  }
  return list;
}

std::string cu_error(const List& cu, std::int64_t tokens, bool allow_tail = false) {
  return error_of([&] { SeqLens::from_cu(cu, tokens, allow_tail, "causal_conv1d_fwd"); });
}

std::string seq_idx_error(const List& ids) {
  return error_of([&] { SeqLens::from_seq_idx(ids, "op"); });
}

std::string ids_error(const List& ids, int axes = 1, std::string_view op = "seqlens") {
  return error_of([&] { SeqLens::from_position_ids(ids, axes, op); });
}

TEST(SeqLensFromCu, KeepsEmptySequencesAndThePaddedTail) {
  const SeqLens seq = SeqLens::from_cu(List{0, 5, 5, 6, 6, 6}, 6);
  EXPECT_EQ(triples(seq), (Triples{{0, 0, 5}, {0, 5, 5}, {0, 5, 6}, {0, 6, 6}, {0, 6, 6}}));
  EXPECT_EQ(seq.count(), 5);
  EXPECT_EQ(seq.rows(), 1);
  EXPECT_EQ(seq.tokens(), 6);
  EXPECT_EQ(seq.longest(), 5);
  EXPECT_TRUE(seq.covers_all_tokens());
  EXPECT_EQ(seq[2].length(), 1);
}

TEST(SeqLensFromCu, NoTokens) {
  const SeqLens seq = SeqLens::from_cu(List{0, 0}, 0);
  EXPECT_EQ(triples(seq), (Triples{{0, 0, 0}}));
  EXPECT_EQ(seq.longest(), 0);
  EXPECT_TRUE(seq.covers_all_tokens());
  EXPECT_TRUE(seq.chunks(4).empty());
  EXPECT_TRUE(seq.seq_idx().empty());
  EXPECT_EQ(seq.boundaries(), List{0});
}

TEST(SeqLensFromCu, TailOnlyWhenAllowed) {
  const SeqLens seq = SeqLens::from_cu(List{0, 2, 3}, 5, true);
  EXPECT_EQ(seq.tokens(), 5);
  EXPECT_FALSE(seq.covers_all_tokens());
  EXPECT_EQ(seq.seq_idx(), (List{0, 0, 1, -1, -1}));
  EXPECT_EQ(seq.boundaries(), (List{0, 2, 3}));
  EXPECT_EQ(cu_error({0, 2, 3}, 5), "causal_conv1d_fwd: cu_seqlens[2]: expected 5 (tokens), got 3");
  EXPECT_EQ(cu_error({0, 2, 6}, 5, true), "causal_conv1d_fwd: cu_seqlens[2]: expected <= 5 (tokens), got 6");
}

TEST(SeqLensFromCu, Violations) {
  EXPECT_EQ(cu_error({1, 16}, 16), "causal_conv1d_fwd: cu_seqlens[0]: expected 0, got 1");
  EXPECT_EQ(cu_error({0, 12, 8, 16}, 16), "causal_conv1d_fwd: cu_seqlens[2]: expected >= 12, got 8");
  EXPECT_EQ(cu_error({0, 20}, 16), "causal_conv1d_fwd: cu_seqlens[1]: expected <= 16 (tokens), got 20");
  EXPECT_EQ(cu_error({0, 20, 16}, 16), "causal_conv1d_fwd: cu_seqlens[1]: expected <= 16 (tokens), got 20");
  EXPECT_EQ(cu_error({0, 4, 8, 12}, 16), "causal_conv1d_fwd: cu_seqlens[3]: expected 16 (tokens), got 12");
  EXPECT_EQ(cu_error({0}, 0), "causal_conv1d_fwd: cu_seqlens: expected at least 2 entries, got 1");
  EXPECT_EQ(cu_error({}, 0), "causal_conv1d_fwd: cu_seqlens: expected at least 2 entries, got 0");
  EXPECT_EQ(cu_error({0, 0}, -1), "causal_conv1d_fwd: tokens: expected >= 0, got -1");
}

TEST(SeqLensFromLengths, PrefixSum) {
  const SeqLens seq = SeqLens::from_lengths(List{3, 0, 2});
  EXPECT_EQ(triples(seq), (Triples{{0, 0, 3}, {0, 3, 3}, {0, 3, 5}}));
  EXPECT_EQ(seq.tokens(), 5);
  EXPECT_EQ(seq.longest(), 3);
  EXPECT_TRUE(seq.covers_all_tokens());
  EXPECT_EQ(SeqLens::from_lengths(List{}).count(), 0);
}

TEST(SeqLensFromLengths, Violations) {
  EXPECT_EQ(error_of([] { SeqLens::from_lengths(List{3, -3}); }), "seqlens: lengths[1]: expected >= 0, got -3");
  EXPECT_EQ(SeqLens::from_lengths(List{kMax - 1, 1}).tokens(), kMax);
  const List overflow = {kMax - 1, 2};
  EXPECT_EQ(error_of([&] { SeqLens::from_lengths(overflow, "op"); }),
            "op: lengths[1]: expected <= 1 (the sum must fit in int64), got 2");
}

TEST(SeqLensFromSeqIdx, RunsOfAnyIds) {
  const SeqLens seq = SeqLens::from_seq_idx(List{7, 7, -1, -1, -1, 0});
  EXPECT_EQ(triples(seq), (Triples{{0, 0, 2}, {0, 2, 5}, {0, 5, 6}}));
  EXPECT_EQ(seq.seq_idx(), (List{0, 0, 1, 1, 1, 2}));
  EXPECT_EQ(seq.longest(), 3);
  EXPECT_EQ(SeqLens::from_seq_idx(List{}).count(), 0);
  EXPECT_EQ(SeqLens::from_seq_idx(List{}).boundaries(), List{0});
}

TEST(SeqLensFromSeqIdx, AnIdMustNotComeBack) {
  EXPECT_EQ(seq_idx_error({0, 1, 1, 0}), "op: seq_idx[3]: expected an id not used before, got 0");
  EXPECT_EQ(seq_idx_error({-1, 2, -1, -1}), "op: seq_idx[2]: expected an id not used before, got -1");
}

TEST(SeqLensFromPositionIds, TextRestartsAtTheFirstPosition) {
  EXPECT_EQ(triples(SeqLens::from_position_ids(List{0, 1, 2, 0, 0, 1})), (Triples{{0, 0, 3}, {0, 3, 4}, {0, 4, 6}}));
  EXPECT_EQ(triples(SeqLens::from_position_ids(List{5, 6, 5, 6, 7})), (Triples{{0, 0, 2}, {0, 2, 5}}));
  EXPECT_EQ(triples(SeqLens::from_position_ids(List{4})), (Triples{{0, 0, 1}}));
  EXPECT_EQ(SeqLens::from_position_ids(List{}).count(), 0);
}

TEST(SeqLensFromPositionIds, TextViolations) {
  List ids(25, 7);
  std::iota(ids.begin(), ids.end() - 1, 0);
  EXPECT_EQ(ids_error(ids), "seqlens: position_ids[24]: expected 24 (same sequence) or 0 (new sequence), got 7");
  EXPECT_EQ(ids_error({3, 4, 0}), "seqlens: position_ids[2]: expected 5 (same sequence) or 3 (new sequence), got 0");
  EXPECT_EQ(ids_error({0, 1, -1}), "seqlens: position_ids[2]: expected >= 0, got -1");
  EXPECT_EQ(ids_error({-1, 0, 1}, 1, "op"), "op: position_ids[0]: expected >= 0, got -1");
  EXPECT_EQ(ids_error({0, 1}, 2), "seqlens: axes: expected 1 or 3, got 2");
  EXPECT_EQ(SeqLens::from_position_ids(List{kMax, kMax}).count(), 2);  // the largest position has no successor
}

TEST(SeqLensFromPositionIds, MropeStartsWhereAllAxesAreZero) {
  // The image at tokens 0..2 has zeros in single axes; the token at 4 is the only other (0, 0, 0).
  const List ids = {0, 0, 0, 2, 0, 1,   // time
                    0, 0, 1, 2, 0, 1,   // height
                    0, 1, 0, 2, 0, 1};  // width
  EXPECT_EQ(triples(SeqLens::from_position_ids(ids, 3)), (Triples{{0, 0, 4}, {0, 4, 6}}));
  EXPECT_EQ(triples(SeqLens::from_position_ids(List{9, 0, 9, 0, 9, 0}, 3)), (Triples{{0, 0, 1}, {0, 1, 2}}));
  EXPECT_EQ(SeqLens::from_position_ids(List{}, 3).count(), 0);
}

TEST(SeqLensFromPositionIds, MropeViolations) {
  EXPECT_EQ(ids_error({0, 1, 0, 1, 0, -2}, 3), "seqlens: position_ids[5]: expected >= 0, got -2");
  EXPECT_EQ(ids_error({0, 1, 2, 3}, 3), "seqlens: position_ids: expected a multiple of 3 entries, got 4");
}

TEST(SeqLensFromMask, LeftAndRightPaddedRows) {
  const SeqLens seq = SeqLens::from_mask(List{0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0}, 4, 4);
  EXPECT_EQ(triples(seq), (Triples{{0, 1, 4}, {1, 0, 2}, {2, 0, 0}, {3, 1, 3}}));
  EXPECT_EQ(std::tuple(seq.rows(), seq.tokens(), seq.longest()), std::tuple(4, 4, 3));
  EXPECT_FALSE(seq.covers_all_tokens());
  EXPECT_EQ(seq.seq_idx(), (List{-1, 0, 0, 0, 1, 1, -1, -1, -1, -1, -1, -1, -1, 3, 3, -1}));
  EXPECT_TRUE(SeqLens::from_mask(List{1, 1}, 2, 1).covers_all_tokens());
  EXPECT_EQ(triples(SeqLens::from_mask(List{}, 2, 0)), (Triples{{0, 0, 0}, {1, 0, 0}}));
}

TEST(SeqLensFromMask, Violations) {
  const auto mask_error = [](const List& mask, std::int64_t rows, std::int64_t tokens) {
    return error_of([&] { SeqLens::from_mask(mask, rows, tokens); });
  };
  EXPECT_EQ(mask_error({1, 1, 1, 1, 0, 1}, 2, 3),
            "seqlens: mask[5]: expected 0 (the ones of row 1 ended at column 1), got 1");
  EXPECT_EQ(mask_error({0, 1, 2, 1}, 2, 2), "seqlens: mask[2]: expected 0 or 1, got 2");
  EXPECT_EQ(mask_error({-1}, 1, 1), "seqlens: mask[0]: expected 0 or 1, got -1");
  EXPECT_EQ(mask_error({1, 1, 1}, 2, 2), "seqlens: mask: expected 4 entries (2 rows of 2 tokens), got 3");
  EXPECT_EQ(mask_error({}, -1, 2), "seqlens: rows: expected >= 0, got -1");
  EXPECT_EQ(mask_error({}, 2, -2), "seqlens: tokens: expected >= 0, got -2");
  EXPECT_EQ(mask_error({}, std::int64_t{1} << 32, std::int64_t{1} << 32),
            "seqlens: tokens: expected <= 2147483647 (4294967296 rows must fit in int64), got 4294967296");
}

TEST(SeqLensDense, OneSequencePerRow) {
  const SeqLens seq = SeqLens::dense(2, 3);
  EXPECT_EQ(triples(seq), (Triples{{0, 0, 3}, {1, 0, 3}}));
  EXPECT_EQ(std::tuple(seq.rows(), seq.tokens(), seq.longest()), std::tuple(2, 3, 3));
  EXPECT_TRUE(seq.covers_all_tokens());
  EXPECT_EQ(seq.seq_idx(), (List{0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(SeqLens::dense(0, 3).count(), 0);
  EXPECT_EQ(triples(SeqLens::dense(1, 0)), (Triples{{0, 0, 0}}));
  EXPECT_EQ(error_of([] { SeqLens::dense(-2, 3); }), "seqlens: rows: expected >= 0, got -2");
  EXPECT_EQ(error_of([] { SeqLens::dense(2, -3); }), "seqlens: tokens: expected >= 0, got -3");
  EXPECT_EQ(error_of([] { SeqLens::dense(2, kMax); }),
            "seqlens: tokens: expected <= 4611686018427387903 (2 rows must fit in int64), got 9223372036854775807");
}

TEST(SeqLensChunks, GridRestartsAtEverySequence) {
  const SeqLens seq = SeqLens::from_cu(List{0, 5, 5, 6}, 6);
  EXPECT_EQ(chunks(seq, 4), (Triples{{0, 0, 4}, {0, 4, 5}, {2, 5, 6}}));
  EXPECT_EQ(chunks(seq, 5), (Triples{{0, 0, 5}, {2, 5, 6}}));
  EXPECT_EQ(chunks(seq, kMax), (Triples{{0, 0, 5}, {2, 5, 6}}));
  EXPECT_EQ(seq.chunks(1).size(), 6u);
  EXPECT_EQ(error_of([&] { seq.chunks(0); }), "seqlens: chunk_size: expected >= 1, got 0");
  const SeqLens padded = SeqLens::from_mask(List{0, 1, 1, 1, 1, 1, 0, 0}, 2, 4);
  EXPECT_EQ(chunks(padded, 2), (Triples{{0, 1, 3}, {0, 3, 4}, {1, 0, 2}}));
}

TEST(SeqLensBoundaries, WithoutEmptySequences) {
  EXPECT_EQ(SeqLens::from_cu(List{0, 0, 5, 5, 6, 6}, 6).boundaries(), (List{0, 5, 6}));
  EXPECT_EQ(SeqLens::from_mask(List{0, 0, 1, 1, 0}, 1, 5).boundaries(), (List{2, 4}));
  EXPECT_EQ(error_of([] { SeqLens::dense(2, 3).boundaries(); }), "seqlens: boundaries: expected 1 row, got 2");
}

TEST(SeqLensAgree, EmptySequencesDoNotCount) {
  const SeqLens seq_idx = SeqLens::from_seq_idx(List{4, 4, 4, 9, 9});
  EXPECT_NO_THROW(SeqLens::check_agree(SeqLens::from_cu(List{0, 0, 3, 3, 5, 5}, 5), "cu", seq_idx, "seq_idx"));
  EXPECT_NO_THROW(SeqLens::check_agree(seq_idx, "seq_idx", SeqLens::from_position_ids(List{0, 1, 2, 0, 1}), "ids"));
  EXPECT_NO_THROW(SeqLens::check_agree(SeqLens::dense(2, 2), "x", SeqLens::from_mask(List{1, 1, 1, 1}, 2, 2), "mask"));
}

TEST(SeqLensAgree, NamesTheFirstDifference) {
  const auto agree_error = [](const SeqLens& a, const SeqLens& b) {
    return error_of([&] { SeqLens::check_agree(a, "cu_seqlens", b, "ids", "op"); });
  };
  const SeqLens cu = SeqLens::from_cu(List{0, 5, 5, 12}, 12);
  EXPECT_EQ(agree_error(cu, SeqLens::from_lengths(List{5, 3, 4})),
            "op: ids: expected 12 (end of sequence 2 in cu_seqlens), got 8");
  EXPECT_EQ(agree_error(cu, SeqLens::from_lengths(List{5, 6})),
            "op: ids: expected 1 x 12 tokens (as cu_seqlens), got 1 x 11");
  EXPECT_EQ(agree_error(cu, SeqLens::dense(2, 12)), "op: ids: expected 1 x 12 tokens (as cu_seqlens), got 2 x 12");
  EXPECT_EQ(agree_error(cu, SeqLens::from_cu(List{0, 5, 5}, 12, true)),
            "op: ids: expected sequence 2 of cu_seqlens, got no more sequences");
  EXPECT_EQ(agree_error(SeqLens::from_cu(List{0, 5}, 12, true), cu),
            "op: ids: expected no more sequences (as cu_seqlens), got sequence 2");
  const SeqLens mask = SeqLens::from_mask(List{0, 0, 1, 1}, 2, 2);
  EXPECT_EQ(agree_error(SeqLens::dense(2, 2), mask), "op: ids: expected 0 (row of sequence 0 in cu_seqlens), got 1");
  EXPECT_EQ(agree_error(SeqLens::dense(1, 2), SeqLens::from_mask(List{0, 1}, 1, 2)),
            "op: ids: expected 0 (begin of sequence 0 in cu_seqlens), got 1");
}

}  // namespace
}  // namespace tidegate
