// What a chunk operator must leave alone: earlier tokens, other sequences and heads, tokens of no sequence.
#pragma once

#include "chunk_suite.h"

namespace tidegate::test {

// NaN in one element of one input at a token: other sequences, earlier tokens and other groups of heads keep their
// bits.
inline void expect_causal(const Stage& stage) {
  const ChunkCase c{.T = 140, .HK = 2, .G = 2, .K = 19, .V = 22, .C = 64, .lengths = {20, 100, 20}};
  constexpr std::int64_t kSequence = 1;
  for_each_isa([&] {
    for (const Input input : stage.inputs) {
      for (const std::int64_t position : {5, 66, 99}) {  // in the sequence: first chunk, second chunk, last token
        Random random;
        ChunkTensors t = make_chunk(random, c);
        const ChunkCall call = t.call();
        const std::vector<Tensor> clean = results(stage, call);
        TensorView in = call.*input;
        const bool states = input == &ChunkCall::initial;
        const bool chunks = input == &ChunkCall::h;
        const std::int64_t token = 20 + position;
        const std::int64_t place = states   ? kSequence
                                   : chunks ? chunks_of(call, kSequence).first + position / 64
                                            : token;
        const std::int64_t heads = in.sizes[1];
        const std::int64_t head = 0;  // of two key heads or four value heads
        in = part(part(in, 0, place, place + 1), 1, head, head + 1);
        write_element(in, offset_at(in, in.numel() - 1 - (in.numel() > 5 ? 5 : 0)), std::nan(""));
        if (input == &ChunkCall::A0 || input == &ChunkCall::A) {
          write_element(in, 0, std::nan(""));  // a column that every row reads
        }
        const std::int64_t touched = heads == c.HK ? c.G : 1;  // value heads [0, touched) may change
        const std::vector<Tensor> got = results(stage, call);
        // Everything from this token on may change; a state changes its whole sequence, h of a chunk that chunk.
        const std::int64_t from = states ? 20 : chunks ? 20 + position / 64 * 64 : token;
        for (std::size_t i = 0; i < got.size(); ++i) {
          const Kind kind = stage.outputs(c)[i].kind;
          const TensorView& a = got[i];
          const TensorView& b = clean[i];
          EXPECT_TRUE(same_bits(part(a, 1, touched, c.HV()), part(b, 1, touched, c.HV()))) << "another head";
          for (const std::int64_t n : {0, 2}) {
            EXPECT_TRUE(same_bits(sequence_part(call, kind, a, n), sequence_part(call, kind, b, n)))
                << "sequence " << n;
          }
          if (kind == Kind::kGate || kind == Kind::kTokens) {
            EXPECT_TRUE(same_bits(part(a, 0, 20, from), part(b, 0, 20, from))) << "before token " << position;
          } else if (kind == Kind::kChunks && !states) {
            const std::int64_t first = chunks_of(call, kSequence).first;
            const std::int64_t same = first + position / 64 + 1;  // h is the state before the chunk
            EXPECT_TRUE(same_bits(part(a, 0, first, same), part(b, 0, first, same))) << "h before " << position;
          }
        }
        bool seen = false;
        for (const Tensor& out : got) {
          for (const double x : values(out)) {
            seen = seen || std::isnan(x);
          }
        }
        EXPECT_TRUE(seen) << "the NaN is lost";
      }
    }
  });
}

// Tokens that belong to no sequence: not read (they hold NaN), not written (they keep their bytes).
inline void expect_padding_untouched(const Stage& stage) {
  for_each_isa([&] {
    ChunkCase c{.B = 2, .T = 50, .HK = 1, .G = 2, .K = 18, .V = 20, .C = 32, .layout = Layout::kBSND};
    Random random;
    ChunkTensors t = make_chunk(random, c);
    ChunkCall call = t.call();
    std::vector<std::int64_t> mask(100, 0);
    std::fill(mask.begin() + 10, mask.begin() + 50, 1);  // row 0: tokens 10 .. 49
    std::fill(mask.begin() + 50, mask.begin() + 83, 1);  // row 1: tokens 0 .. 32
    call.seq = SeqLens::from_mask(mask, 2, 50);
    const auto fill_padding = [&](const TensorView& tensor) {
      for (std::int64_t i = 0; i < tensor.numel(); ++i) {
        if (mask[static_cast<std::size_t>(i / (tensor.numel() / 100))] == 0) {
          write_element(tensor, offset_at(tensor, i), std::nan(""));
        }
      }
    };
    for (const Input in : kGateInputs) fill_padding(call.*in);
    for (const Input in : kTokenInputs) fill_padding(call.*in);
    const std::vector<Tensor> blank = blank_outputs(stage, c);
    const std::vector<Tensor> got = results(stage, call);
    for (std::size_t i = 0; i < got.size(); ++i) {
      const Output output = stage.outputs(c)[i];
      if (output.kind != Kind::kGate && output.kind != Kind::kTokens) {
        continue;
      }
      const auto row = [](const TensorView& x, std::int64_t r, std::int64_t begin, std::int64_t end) {
        return part(part(x, 0, r, r + 1), 1, begin, end);
      };
      EXPECT_TRUE(same_bits(row(got[i], 0, 0, 10), row(blank[i], 0, 0, 10))) << output.name;
      EXPECT_TRUE(same_bits(row(got[i], 1, 33, 50), row(blank[i], 1, 33, 50))) << output.name;
      for (const TensorView& x : {row(got[i], 0, 10, 50), row(got[i], 1, 0, 33)}) {
        for (const double value : values(x)) {
          ASSERT_TRUE(std::isfinite(value)) << output.name;
        }
      }
    }
  });
}

}  // namespace tidegate::test
