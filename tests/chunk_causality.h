// What a chunk operator must leave alone: earlier tokens, other sequences and heads, tokens of no sequence.
#pragma once

#include "chunk_suite.h"

namespace tidegate::test {

// The case of the tests below: NaN goes into sequence 1, at a token of its first chunk, of its second one, and at the
// last token, or the last but one: not everything of the last token has a gradient.
inline const ChunkCase kNaNCase{.T = 140, .HK = 2, .G = 2, .K = 19, .V = 22, .C = 64, .lengths = {20, 100, 20}};
inline constexpr std::int64_t kNaNSequence = 1, kNaNBegin = 20;

// NaN in one element of an input, at a token of the first head (of two key heads or four value heads). Returns the
// number of value heads that read it.
inline std::int64_t poison(const ChunkCall& call, Input input, std::int64_t position) {
  TensorView in = call.*input;
  const std::int64_t place = is_one_of(kStateInputs, input)   ? kNaNSequence
                             : is_one_of(kChunkInputs, input) ? chunks_of(call, kNaNSequence).first + position / 64
                                                              : kNaNBegin + position;
  const std::int64_t heads = in.sizes[1];
  in = part(part(in, 0, place, place + 1), 1, 0, 1);
  if (input == &ChunkCall::dA) {  // the last column of its chunk
    write_element(in, position < 64 ? 63 : 99 - 64, std::nan(""));
    return 1;
  }
  write_element(in, offset_at(in, in.numel() - 1 - (in.numel() > 5 ? 5 : 0)), std::nan(""));
  if (input == &ChunkCall::A0 || input == &ChunkCall::A) {  // a column that every row reads
    write_element(in, input == &ChunkCall::A ? position % 64 : 0, std::nan(""));
  }
  return heads == call.c.HK ? call.c.G : 1;
}

inline bool has_nan(const std::vector<Tensor>& tensors) {
  for (const Tensor& t : tensors) {
    for (const double x : values(t)) {
      if (std::isnan(x)) {
        return true;
      }
    }
  }
  return false;
}

// Other sequences and other groups of heads keep their bits.
inline void expect_others_kept(const Stage& stage, const ChunkCall& call, std::int64_t touched,
                               const std::vector<Tensor>& got, const std::vector<Tensor>& clean) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    const Output output = stage.outputs(call.c)[i];
    const TensorView& a = got[i];
    const TensorView& b = clean[i];
    const std::int64_t first = output.keys ? 1 : touched;
    EXPECT_TRUE(same_bits(part(a, 1, first, a.sizes[1]), part(b, 1, first, a.sizes[1]))) << "another head";
    for (const std::int64_t n : {0, 2}) {
      EXPECT_TRUE(same_bits(sequence_part(call, output.kind, a, n), sequence_part(call, output.kind, b, n)))
          << "sequence " << n;
    }
  }
}

// body(call, input, position, clean results, results with a NaN)
template <class Body>
void for_each_nan(const Stage& stage, Body body) {
  for_each_isa([&] {
    for (const Input input : stage.inputs) {
      for (const std::int64_t position : {5, 66, stage.backward ? 98 : 99}) {
        Random random;
        const ChunkTensors t = make_chunk(random, case_of(stage, kNaNCase));
        const ChunkCall call = t.call();
        const std::vector<Tensor> clean = results(stage, call);
        const std::int64_t touched = poison(call, input, position);
        const std::vector<Tensor> got = results(stage, call);
        expect_others_kept(stage, call, touched, got, clean);
        EXPECT_TRUE(has_nan(got)) << "the NaN is lost";
        body(call, input, position, clean, got);
      }
    }
  });
}

// Earlier tokens keep their bits too.
inline void expect_causal(const Stage& stage) {
  for_each_nan(stage, [&](const ChunkCall& call, Input input, std::int64_t position, const auto& clean,
                          const auto& got) {
    const bool states = is_one_of(kStateInputs, input);
    // Everything from this token on may change; a state changes its whole sequence, h of a chunk that chunk.
    const std::int64_t from = kNaNBegin + (states ? 0 : is_one_of(kChunkInputs, input) ? position / 64 * 64 : position);
    for (std::size_t i = 0; i < got.size(); ++i) {
      const Kind kind = stage.outputs(call.c)[i].kind;
      const TensorView& a = got[i];
      const TensorView& b = clean[i];
      if (kind == Kind::kGate || kind == Kind::kTokens) {
        EXPECT_TRUE(same_bits(part(a, 0, kNaNBegin, from), part(b, 0, kNaNBegin, from))) << "before " << position;
      } else if (kind == Kind::kChunks && !states) {
        const std::int64_t first = chunks_of(call, kNaNSequence).first;
        const std::int64_t same = first + position / 64 + 1;  // h is the state before the chunk
        EXPECT_TRUE(same_bits(part(a, 0, first, same), part(b, 0, first, same))) << "h before " << position;
      }
    }
  });
}

// Gradients flow back in time: later chunks keep their bits.
inline void expect_anticausal(const Stage& stage) {
  for_each_nan(stage,
               [&](const ChunkCall& call, Input input, std::int64_t position, const auto& clean, const auto& got) {
                 if (is_one_of(kStateInputs, input)) {
                   return;
                 }
                 const std::int64_t from = kNaNBegin + (position < 64 ? 64 : 100);
                 for (std::size_t i = 0; i < got.size(); ++i) {
                   const Kind kind = stage.outputs(call.c)[i].kind;
                   const TensorView& a = got[i];
                   const TensorView& b = clean[i];
                   if (kind == Kind::kGate || kind == Kind::kTokens) {
                     EXPECT_TRUE(same_bits(part(a, 0, from, 120), part(b, 0, from, 120))) << "after " << position;
                   } else if (kind == Kind::kChunks) {
                     const auto [first, last] = chunks_of(call, kNaNSequence);
                     const std::int64_t same = first + position / 64;  // dh is the gradient at the end of the chunk
                     EXPECT_TRUE(same_bits(part(a, 0, same, last), part(b, 0, same, last))) << "dh after " << position;
                   }
                 }
               });
}

// Tokens that belong to no sequence: not read (they hold NaN), not written (they keep their bytes).
inline void expect_padding_untouched(const Stage& stage) {
  for_each_isa([&] {
    ChunkCase c{.B = 2, .T = 50, .HK = 1, .G = 2, .K = 18, .V = 20, .C = 32, .layout = Layout::kBSND};
    Random random;
    ChunkTensors t = make_chunk(random, case_of(stage, c));
    ChunkCall call = t.call();
    std::vector<std::int64_t> mask(100, 0);
    std::fill(mask.begin() + 10, mask.begin() + 50, 1);  // row 0: tokens 10 .. 49
    std::fill(mask.begin() + 50, mask.begin() + 83, 1);  // row 1: tokens 0 .. 32
    call.seq = SeqLens::from_mask(mask, 2, 50);
    const auto fill_padding = [&](const TensorView& tensor) {
      for (std::int64_t i = 0; tensor.defined() && i < tensor.numel(); ++i) {
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
