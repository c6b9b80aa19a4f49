// What every chunk operator promises, written once: accuracy, and bits that do not depend on layout, memory, packing
// or threads.
#pragma once

#include <map>

#include "chunk_case.h"
#include "toolkit.h"

namespace tidegate::test {

struct Output {
  std::string name;
  Kind kind;
  DType type;
  std::int64_t width = 0;
  bool keys = false;  // as many heads as q and k, otherwise as v
};

struct Stage {
  std::string name;
  std::vector<Input> inputs;
  std::vector<Output> (*outputs)(const ChunkCase&);
  void (*run)(const ChunkCall&, const Views& out);
  void (*plain)(const ChunkProblem&, const ChunkCall&, const Views& out);  // the reference in fp32
  double bound = 1e-6;
  bool backward = false;
};

// The inputs of the backward stages are made only for them.
inline ChunkCase case_of(const Stage& stage, ChunkCase c) {
  c.backward = stage.backward;
  return c;
}

inline std::vector<Tensor> blank_outputs(const Stage& stage, const ChunkCase& c) {
  std::vector<Tensor> out;
  for (const Output& o : stage.outputs(c)) {
    out.emplace_back(o.type, c.sizes(o.kind, o.keys ? c.HK : c.HV(), o.width), c.form);
  }
  return out;
}

inline std::vector<Tensor> results(const Stage& stage, const ChunkCall& call) {
  std::vector<Tensor> out = blank_outputs(stage, call.c);
  stage.run(call, views_of(out));
  return out;
}

inline ChunkProblem problem_of(const ChunkCall& call) {
  const ChunkCase& c = call.c;
  return chunk_problem({c.B, c.T, c.HK, c.HV(), c.K, c.V}, c.C, c.layout, call.seq);
}

// Head sizes of real and odd kinds, every chunk size, short last chunks, GVA ratios 1 to 4, all layouts.
inline std::vector<ChunkCase> accuracy_cases() {
  return {
      {.T = 1, .K = 1, .V = 1, .C = 16},
      {.T = 150, .G = 2, .K = 60, .V = 100, .C = 64, .layout = Layout::kNTD},
      {.B = 2, .T = 70, .HK = 2, .G = 3, .K = 64, .V = 16, .C = 32, .layout = Layout::kBSND},
      {.T = 300, .K = 128, .V = 128, .C = 128, .lengths = {129, 0, 1, 170}, .v_first = true},
      {.B = 2, .T = 67, .HK = 1, .G = 1, .K = 100, .V = 70, .C = 64, .layout = Layout::kBNSD, .initial = false},
      {.T = 40, .HK = 1, .G = 4, .K = 256, .V = 33, .C = 16, .lengths = {17, 23}},
  };
}

inline void expect_accuracy(const Stage& stage) {
  const std::vector<std::pair<DType, DType>> types = {{DType::kF32, DType::kF32},
                                                      {DType::kBF16, DType::kF32},
                                                      {DType::kBF16, DType::kBF16},
                                                      {DType::kF16, DType::kF32},
                                                      {DType::kF16, DType::kF16}};
  for (const auto& [dtype, inter] : types) {
    std::map<std::pair<Isa, std::string>, Accuracy> accuracy;
    std::map<std::string, double> bounds;
    Random random(7);
    for (ChunkCase c : accuracy_cases()) {
      SCOPED_TRACE(c.text());
      c.dtype = dtype;
      c.inter = inter;
      c.beta_type = c.T % 2 == 0 ? dtype : DType::kF32;
      const ChunkTensors t = make_chunk(random, case_of(stage, c));
      const ChunkTensors x = in_wide(t);
      const std::vector<Tensor> truth = results(stage, x.call());
      const std::vector<Tensor> plain = blank_outputs(stage, c);
      stage.plain(problem_of(t.call()), t.call(), views_of(plain));
      for_each_isa([&] {
        const std::vector<Tensor> got = results(stage, t.call());
        const std::vector<Output> outputs = stage.outputs(c);
        for (std::size_t i = 0; i < outputs.size(); ++i) {
          accuracy[{active_isa(), outputs[i].name}].add(got[i], plain[i], truth[i], stage.bound);
          bounds[outputs[i].name] = stored(outputs[i].type, stage.bound);
        }
      });
    }
    for (const auto& [key, value] : accuracy) {
      value.expect(key.second + "_" + std::string(dtype_name(dtype)) + "_" + std::string(dtype_name(inter)) + "_" +
                       std::string(isa_name(key.first)),
                   bounds[key.second]);
    }
  }
}

// As in layout kTND: heads and tokens exchanged, a batch of one dropped.
inline TensorView token_major(const ChunkCase& c, Kind kind, TensorView t) {
  if (kind == Kind::kStates) {
    return t;
  }
  if (has_batch(c.layout)) {
    --t.rank;
    for (int d = 0; d < t.rank; ++d) {
      t.sizes[d] = t.sizes[d + 1];
      t.strides[d] = t.strides[d + 1];
    }
  }
  return is_head_major(c.layout) ? exchanged(t, 0, 1) : t;
}

// Layouts, gaps between rows, negative strides, the ends of memory: the same bits, and nothing else touched.
inline void expect_layouts_and_memory(const Stage& stage) {
  for_each_isa([&] {
    for (const DType dtype : kKernelTypes) {
      ChunkCase c{
          .T = 45, .HK = 2, .G = 2, .K = 21, .V = 37, .C = 32, .dtype = dtype, .inter = dtype, .lengths = {40, 5}};
      Random random(3);
      const ChunkTensors first = make_chunk(random, case_of(stage, c));
      const std::vector<Tensor> want = results(stage, first.call());
      for (const Layout layout : {Layout::kTND, Layout::kBSND, Layout::kNTD, Layout::kBNSD}) {
        for (const Form& form : {Form{}, low(), padded(), low(reversed())}) {
          c.layout = layout;
          c.form = form;
          SCOPED_TRACE(c.text());
          Random again(3);
          const ChunkTensors t = make_chunk(again, case_of(stage, c));
          const std::vector<Tensor> got = results(stage, t.call());
          for (std::size_t i = 0; i < got.size(); ++i) {
            const Kind kind = stage.outputs(c)[i].kind;
            EXPECT_TRUE(same_bits(token_major(c, kind, got[i]), token_major(first.c, kind, want[i])));
            EXPECT_TRUE(got[i].gaps_untouched());
          }
        }
      }
    }
  });
}

inline TensorView sequence_part(const ChunkCall& call, Kind kind, const TensorView& t, std::int64_t n) {
  const auto [first, last] = chunks_of(call, n);
  return kind == Kind::kStates   ? part(t, 0, n, n + 1)
         : kind == Kind::kChunks ? tokens_of(call.c, t, first, last)
                                 : tokens_of(call.c, t, call.seq[n].begin, call.seq[n].end);
}

inline void expect_packed_as_separate(const Stage& stage) {
  for_each_isa([&] {
    for (const std::int64_t C : {16, 64}) {
      for (const Layout layout : {Layout::kTND, Layout::kNTD}) {
        const ChunkCase c{.T = 218,
                          .HK = 1,
                          .G = 2,
                          .K = 33,
                          .V = 40,
                          .C = C,
                          .dtype = DType::kBF16,
                          .layout = layout,
                          .lengths = {65, 0, 1, 7, 129, 0, 16}};
        Random random;
        const ChunkTensors t = make_chunk(random, case_of(stage, c));
        const ChunkCall call = t.call();
        const std::vector<Tensor> packed = results(stage, call);
        for (std::int64_t n = 0; n < call.seq.count(); ++n) {
          const ChunkCall one = sequence_of(call, n);
          const std::vector<Tensor> alone = results(stage, one);
          for (std::size_t i = 0; i < alone.size(); ++i) {
            EXPECT_TRUE(same_bits(sequence_part(call, stage.outputs(c)[i].kind, packed[i], n), alone[i]))
                << "sequence " << n << ", " << c.text();
          }
        }
      }
    }
  });
}

inline void expect_same_bits_for_threads(const Stage& stage) {
  for_each_isa([&] {
    Random random;
    const ChunkCase c{
        .T = 330, .HK = 3, .G = 2, .K = 24, .V = 80, .C = 32, .dtype = DType::kBF16, .lengths = {130, 3, 197}};
    const ChunkTensors t = make_chunk(random, case_of(stage, c));
    const std::vector<Tensor> once = results(stage, t.call());
    const auto again = [&] {
      const std::vector<Tensor> got = results(stage, t.call());
      for (std::size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(same_bits(got[i], once[i]));
      }
    };
    for_each_thread_count(again);
    on_eight_callers([&](int) { again(); });
    const FlushDenormals flush;
    again();
    EXPECT_TRUE(flush.still_set());
  });
}

// Results with key heads are the fp32 sums of what the value heads give one by one, in their order. kNTD, one key head.
inline void expect_sum_over_heads(const Stage& stage, const ChunkCall& call) {
  const std::vector<Tensor> whole = results(stage, call);
  std::vector<Tensor> sums;
  for (std::int64_t head = 0; head < call.c.HV(); ++head) {
    ChunkCall one = call;
    one.c.G = 1;
    for (const Input in : stage.inputs) {
      if ((call.*in).sizes[0] == call.c.HV()) {
        one.*in = part(call.*in, 0, head, head + 1);
      }
    }
    std::vector<Tensor> alone = results(stage, one);
    for (std::size_t i = 0; i < alone.size(); ++i) {
      if (!stage.outputs(call.c)[i].keys) {
        EXPECT_TRUE(same_bits(alone[i], part(whole[i], 0, head, head + 1)));
      } else if (head > 0) {
        alone[i].fill(
            [&](std::int64_t n) { return static_cast<float>(sums[i].get(n)) + static_cast<float>(alone[i].get(n)); });
      }
    }
    sums = std::move(alone);
  }
  for (std::size_t i = 0; i < sums.size(); ++i) {
    EXPECT_TRUE(!stage.outputs(call.c)[i].keys || same_bits(sums[i], whole[i]));
  }
}

inline void expect_stage(const Stage& stage) {
  expect_layouts_and_memory(stage);
  expect_packed_as_separate(stage);
  expect_same_bits_for_threads(stage);
}

}  // namespace tidegate::test
