// Several nodes: here they are names, and what carries rows between them is memory that the processes share.
#include "ep/test_case.h"
#include "tidegate/ep_nodes.h"
#include "tidegate/error.h"
#include "tidegate/quant.h"

namespace tidegate::test {
namespace {

using ep::NodesBuffer;
using ep::NodeSums;

void check_nodes(const std::vector<std::string>& nodes, const EpCase& c, NodeSums sums) {
  run_ranks(c.ranks, [&](SharedBootstrap& wire) {
    const EpProblem p(c);
    const int rank = wire.rank();
    ep::Config config = p.config();
    config.node_id = nodes[static_cast<std::size_t>(rank)];
    NodesBuffer buffer(config, wire, sums);
    EXPECT_EQ(buffer.nodes(), 2);
    const auto h = buffer.dispatch(p.part_of(p.x, rank), p.part_of(p.ids, rank), p.part_of(p.weights, rank));
    Tensor rows(c.dtype, {h->inner->rows, c.H}), y(c.dtype, {h->inner->rows, c.H});
    buffer.expand(*h, rows);
    apply_experts(rows, y, buffer.first_expert(), h->inner->expert_rows);
    Tensor out(c.dtype, {h->tokens, c.H});
    buffer.combine(y, *h, out);
    const Tensor want = one_process(p);
    const TensorView mine = p.part_of(want, rank);
    if (sums == NodeSums::kExact) {
      EXPECT_TRUE(same_bits(out, mine));
    } else {
      const auto got = values(out), wanted = values(mine);
      for (std::size_t i = 0; i < got.size(); ++i) {  // a rounding for each node instead of one
        EXPECT_NEAR(got[i], wanted[i], 3.0 * rounding_of(c.dtype) * (2.0 * std::abs(wanted[i]) + 10.0));
      }
    }
    // One row for every token and node that has one of its experts.
    for (std::size_t r = 0; r < h->sent.size(); ++r) {
      EXPECT_TRUE(std::is_sorted(h->sent[r].begin(), h->sent[r].end()));
      EXPECT_EQ(std::adjacent_find(h->sent[r].begin(), h->sent[r].end()), h->sent[r].end());
    }
  });
}

TEST(EpNodes, ExactHasTheBitsOfOneProcess) {
  check_nodes({"a", "a", "b", "b"}, {4, 10, 4, 24, {9, 0, 3, 5}, EpCase::kHoles, DType::kBF16}, NodeSums::kExact);
  check_nodes({"a", "b", "a"}, {3, 7, 3, 17, {2, 4, 1}, EpCase::kUniform, DType::kF32}, NodeSums::kExact);
  check_nodes({"a", "b"}, {2, 1, 2, 8, {3, 3}, EpCase::kOneExpert, DType::kF16}, NodeSums::kExact);
}

TEST(EpNodes, FastSumsByNode) {
  check_nodes({"a", "a", "b", "b"}, {4, 10, 4, 24, {9, 0, 3, 5}, EpCase::kHoles, DType::kBF16}, NodeSums::kFast);
  check_nodes({"a", "b", "a", "b"}, {4, 8, 2, 33, {1, 2, 0, 6}, EpCase::kUniform, DType::kF32}, NodeSums::kFast);
}

// Quantised once, by the token's own rank: what one node makes of the same tokens.
TEST(EpNodes, Int8RowsCarryTheirScale) {
  run_ranks(4, [&](SharedBootstrap& wire) {
    EpProblem p({4, 10, 4, 24, {9, 0, 3, 5}, EpCase::kHoles, DType::kBF16});
    const int rank = wire.rank();
    ep::Config config = p.config();
    config.row_bytes = 4 * 24;  // results are fp32
    config.node_id = rank < 2 ? "a" : "b";
    NodesBuffer buffer(config, wire);
    const auto h = buffer.dispatch(p.part_of(p.x, rank), p.part_of(p.ids, rank), p.part_of(p.weights, rank), true);
    const std::int64_t count = h->inner->rows;
    Tensor q(DType::kI8, {count, 24}), scales(DType::kF32, {count}), y(DType::kF32, {count, 24});
    buffer.expand(*h, q, scales);
    const auto whole = [](const Tensor& numbers, const Tensor& factors) {
      return Tensor(DType::kF32, {factors.view().sizes[0], 24}).fill([&](std::int64_t i) {
        return numbers.get(i) * factors.get(i / 24);
      });
    };
    apply_experts(whole(q, scales), y, buffer.first_expert(), h->inner->expert_rows);
    Tensor out(DType::kF32, {h->tokens, 24});
    buffer.combine(y, *h, out);
    Tensor all(DType::kI8, {p.first.back(), 24}), scale(DType::kF32, {p.first.back()});
    quantize(p.x, all, scale);
    p.x = whole(all, scale);
    p.what.dtype = DType::kF32;
    EXPECT_TRUE(same_bits(out, p.part_of(one_process(p), rank)));
  });
}

// Factors of each expert: what one process makes of all tokens, through a buffer inside its node.
TEST(EpNodes, SmoothScalesAreThoseOfTheExpert) {
  for (const std::vector<std::string>& nodes : {std::vector<std::string>{"a", "b", "a", "b"}, {"a", "a", "b", "b"}}) {
    run_ranks(4, [&](SharedBootstrap& wire) {
      const EpProblem p({4, 10, 4, 24, {9, 0, 3, 5}, EpCase::kHoles, DType::kBF16});
      const int rank = wire.rank();
      ep::Config config = p.config();
      config.row_bytes = 4 * 24;  // results are fp32
      config.node_id = nodes[static_cast<std::size_t>(rank)];
      Random random(9);
      const Tensor smooth = uniform(random, DType::kF32, {10, 24}, 0.1, 3.0);
      const auto results = [&](const Tensor& q, const Tensor& scales, auto& buffer, const ep::Handle& h) {
        Tensor y(DType::kF32, {h.rows, 24});
        const Tensor rows =
            Tensor(DType::kF32, {h.rows, 24}).fill([&](std::int64_t i) { return q.get(i) * scales.get(i / 24); });
        apply_experts(rows, y, buffer.first_expert(), h.expert_rows);
        return y;
      };
      NodesBuffer buffer(config, wire);
      const TensorView x = p.part_of(p.x, rank), ids = p.part_of(p.ids, rank), weights = p.part_of(p.weights, rank);
      const auto h = buffer.dispatch(x, ids, weights, true, smooth);
      Tensor q(DType::kI8, {h->inner->rows, 24}), scales(DType::kF32, {h->inner->rows});
      buffer.expand(*h, q, scales, smooth);
      Tensor out(DType::kF32, {h->tokens, 24});
      buffer.combine(results(q, scales, buffer, *h->inner), *h, out);

      config.max_tokens = p.first.back();
      ep::Buffer alone(config, 0, 1);
      alone.connect({alone.address()});
      const auto all = alone.dispatch(p.x, p.ids, {.weights = p.weights, .int8 = true, .smooth_scale = smooth});
      Tensor all_q(DType::kI8, {all->rows, 24}), all_scales(DType::kF32, {all->rows});
      alone.expand(*all, all_q, all_scales, smooth);
      Tensor want(DType::kF32, {all->tokens, 24});
      alone.combine(results(all_q, all_scales, alone, *all), *all, want);
      EXPECT_TRUE(same_bits(out, p.part_of(want, rank)));
    });
  }
}

TEST(EpNodes, RanksThatDisagree) {
  run_ranks(3, [&](SharedBootstrap& wire) {
    const EpProblem p({3, 6, 2, 8, {3, 2, 0}, EpCase::kUniform, DType::kF32});
    const int rank = wire.rank();
    ep::Config config = p.config();
    config.node_id = rank < 2 ? "a" : "b";
    NodesBuffer buffer(config, wire);
    const auto text_of = [&](std::int64_t slots, bool int8, DType dtype = DType::kF32) -> std::string {
      try {
        buffer.dispatch(typed(p.part_of(p.x, rank), dtype), part(p.part_of(p.ids, rank), 1, 0, slots), {}, int8);
      } catch (const ep::Failure& failure) {
        return failure.what();
      }
      return "nothing";
    };
    EXPECT_NE(text_of(2, rank == 2).find(" disagree: bytes of a row is "), std::string::npos);
    EXPECT_NE(text_of(rank == 1 ? 1 : 2, true).find(" disagree: slots is "), std::string::npos);
    const DType dtype = rank == 0 ? DType::kBF16 : DType::kF16;  // as many bytes
    EXPECT_NE(text_of(2, false, dtype).find(" disagree: dtype is "), std::string::npos);

    const auto h = buffer.dispatch(p.part_of(p.x, rank), p.part_of(p.ids, rank));
    const auto later = buffer.dispatch(p.part_of(p.x, rank), p.part_of(p.ids, rank));
    const auto text_of_combine = [&](const ep::NodesHandle& handle, DType type) -> std::string {
      try {
        buffer.combine(Tensor(type, {handle.inner->rows, 8}), handle, Tensor(type, {handle.tokens, 8}));
      } catch (const ep::Failure& failure) {
        return failure.what();
      }
      return "nothing";
    };
    EXPECT_NE(text_of_combine(*h, dtype).find("ep_combine: group moe: rank "), std::string::npos);
    EXPECT_NE(text_of_combine(rank == 1 ? *h : *later, DType::kF32).find(" disagree: handle is "), std::string::npos);
    EXPECT_EQ(text_of_combine(*h, DType::kF32), "nothing");
  });
}

// Rank 1 throws its own error, the others say who failed and why.
void expect_one_fails(int rank, const std::string& text, const std::function<void()>& call) {
  if (rank == 1) {
    expect_error(call, text);
    return;
  }
  std::string found = "nothing";
  try {
    call();
  } catch (const ep::Failure& failure) {
    found = failure.what();
  }
  EXPECT_NE(found.find(": group moe: rank 1 failed: " + text), std::string::npos) << found;
}

TEST(EpNodes, BuffersThatDiffer) {
  run_ranks(3, [&](SharedBootstrap& wire) {
    const EpProblem p({3, 6, 2, 8, {3, 2, 4}, EpCase::kUniform, DType::kF32});
    const int rank = wire.rank();
    const auto text_of = [&](const std::function<void(ep::Config&)>& change, NodeSums sums = NodeSums::kExact) {
      ep::Config config = p.config();
      config.node_id = rank < 2 ? "a" : "b";
      if (rank == 1) {
        change(config);
      }
      try {
        const NodesBuffer buffer(config, wire, sums);
      } catch (const std::exception& failure) {
        return std::string(failure.what());
      }
      return std::string("nothing");
    };
    const auto expect = [&](const std::string& found, const std::string& text) {
      EXPECT_NE(found.find(text), std::string::npos) << found;
    };
    expect(text_of([](ep::Config& c) { c.experts = 7; }), " disagree: experts is ");
    expect(text_of([](ep::Config& c) { c.slots = 3; }), " disagree: slots is ");
    expect(text_of([](ep::Config& c) { c.row_bytes = 64; }), " disagree: row_bytes is ");
    expect(text_of([](ep::Config& c) { c.max_tokens = 9; }), " disagree: max_tokens is ");
    expect(text_of([](ep::Config& c) { c.expert_begin = {0, 1, 2, 6}; }), " disagree: hash of expert_begin is ");
    expect(text_of([](ep::Config&) {}, rank == 1 ? NodeSums::kFast : NodeSums::kExact), " disagree: sums is ");
    expect(text_of([](ep::Config& c) { c.slots = 0; }), "ep_buffer: slots: expected at least 1, got 0");
    expect(text_of([](ep::Config& c) { c.copy_experts = 1; }),
           "special experts: expected none between nodes, got some");
    EXPECT_EQ(text_of([](ep::Config&) {}), "nothing");
  });
}

TEST(EpNodes, WrongArgumentsOfOneRank) {
  for (const NodeSums sums : {NodeSums::kExact, NodeSums::kFast}) {
    run_ranks(3, [&](SharedBootstrap& wire) {
      const EpProblem p({3, 6, 2, 8, {3, 2, 4}, EpCase::kUniform, DType::kF32});
      const int rank = wire.rank();
      const bool wrong = rank == 1;
      ep::Config config = p.config();
      config.node_id = rank < 2 ? "a" : "b";
      NodesBuffer buffer(config, wire, sums);
      const TensorView x = p.part_of(p.x, rank), ids = p.part_of(p.ids, rank), weights = p.part_of(p.weights, rank);
      const Tensor outside = Tensor(DType::kI32, {2, 2}).fill([](std::int64_t i) { return i == 2 ? 9.0 : 0.0; });
      expect_one_fails(rank, "ep_dispatch: ids[1,0]: expected -1 or 0..5, got 9",
                       [&] { buffer.dispatch(x, wrong ? outside : ids, weights); });
      expect_one_fails(rank, "ep_dispatch: weights: expected shape [2, 2], got [2, 1]",
                       [&] { buffer.dispatch(x, ids, wrong ? part(weights, 1, 0, 1) : weights); });
      expect_one_fails(rank, "ep_dispatch: x: expected rows of at most 32 bytes (row_bytes of the buffer), got 64",
                       [&] {
                         buffer.dispatch(wrong ? typed(x, DType::kF64) : Tensor(DType::kF32, {x.sizes[0], 8}), ids);
                       });
      expect_one_fails(rank, "ep_dispatch: ids: expected 1 to 2 slots (slots of the buffer), got 0",
                       [&] { buffer.dispatch(x, wrong ? part(ids, 1, 0, 0) : ids); });

      const auto h = buffer.dispatch(x, ids, weights);
      Tensor rows(DType::kF32, {h->inner->rows, 8}), out(DType::kF32, {h->tokens, 8}),
          again(DType::kF32, {h->tokens, 8});
      buffer.expand(*h, rows);
      buffer.combine(rows, *h, out);
      const std::string count = std::to_string(h->inner->rows), more = std::to_string(h->inner->rows + 1);
      const Tensor longer(DType::kF32, {h->inner->rows + (wrong ? 1 : 0), 8});
      // Only rank 1 knows how many rows it has.
      expect_one_fails(rank,
                       wrong ? "ep_combine: y: expected shape [" + count + ", 8], got [" + more + ", 8]"
                             : "ep_combine: y: expected shape [",
                       [&] { buffer.combine(longer, *h, out); });
      expect_one_fails(rank, "ep_combine: y: expected dtype float32, bfloat16, float16 or float64, got dtype int32",
                       [&] { buffer.combine(wrong ? typed(rows, DType::kI32) : typed(rows, DType::kF32), *h, out); });
      expect_one_fails(rank, "ep_combine: out: expected shape [2, 8], got [1, 8]",
                       [&] { buffer.combine(rows, *h, wrong ? part(out, 0, 0, 1) : out.view()); });
      const ep::NodesHandle foreign;
      expect_one_fails(rank, "ep_combine: handle: expected one of this buffer, got one of 0 ranks",
                       [&] { buffer.combine(rows, wrong ? foreign : *h, out); });
      // Nothing has travelled, so the handle is as good as before.
      buffer.combine(rows, *h, again);
      EXPECT_TRUE(same_bits(out, again));
    });
  }
}

TEST(EpNodes, TokensForANodeGoToItsRanksInTurn) {
  run_ranks(4, [&](SharedBootstrap& wire) {
    const EpProblem p({4, 8, 1, 8, {5, 5, 5, 5}, EpCase::kOneExpert, DType::kF32});  // on the last rank
    ep::Config config = p.config();
    const int rank = wire.rank();
    config.node_id = rank < 2 ? "a" : "b";
    NodesBuffer buffer(config, wire);
    const auto h = buffer.dispatch(p.part_of(p.x, rank), p.part_of(p.ids, rank));
    std::vector<std::size_t> counts;
    for (const auto& tokens : h->sent) {
      counts.push_back(tokens.size());
    }
    const std::vector<std::size_t> want[] = {{0, 0, 3, 2}, {0, 0, 2, 3}, {0, 0, 5, 0}, {0, 0, 0, 5}};
    EXPECT_EQ(counts, want[rank]);
    EXPECT_EQ(h->inner->rows, rank == 3 ? 20 : 0);
  });
}

TEST(EpNodes, Errors) {
  run_ranks(1, [](SharedBootstrap& wire) {
    const EpProblem p({1, 4, 2, 8, {3}, EpCase::kUniform, DType::kF32});
    ep::Config config = p.config();
    config.zero_experts = 1;
    expect_error([&] { NodesBuffer(config, wire); },
                 "ep_nodes: special experts: expected none between nodes, got some");
    config = p.config();
    config.max_tokens = 2;
    NodesBuffer small(config, wire);
    expect_error([&] { small.dispatch(p.x, p.ids); },
                 "ep_dispatch: x: expected at most 2 tokens (max_tokens of the buffer), got 3");
    NodesBuffer enough(p.config(), wire);
    expect_error([&] { enough.dispatch(p.x, typed(p.ids, DType::kF32)); },
                 "ep_dispatch: ids: expected dtype int32 or int64, got dtype float32");
    expect_error([&] { enough.dispatch(typed(p.x, DType::kF64), p.ids, {}, true); },
                 "ep_dispatch: x: expected dtype float32, bfloat16 or float16, got dtype float64");
    const Tensor smooth(DType::kF32, {4, 8});
    expect_error([&] { enough.dispatch(p.x, p.ids, {}, false, smooth); },
                 "ep_dispatch: smooth_scale: expected none without int8, got a tensor");
    expect_error([&] { enough.dispatch(p.x, p.ids, {}, true, part(smooth, 0, 0, 3)); },
                 "ep_dispatch: smooth_scale: expected shape [4, 8], got [3, 8]");
    const auto h = enough.dispatch(p.x, p.ids, {}, true, smooth);
    Tensor q(DType::kI8, {h->inner->rows, 8}), scales(DType::kF32, {h->inner->rows});
    expect_error([&] { enough.expand(*h, q, scales); },
                 "ep_expand: smooth_scale: expected a tensor for the rows that were sent, got none");
    expect_error([&] { enough.expand(*h, q, scales, part(smooth, 1, 0, 7)); },
                 "ep_expand: smooth_scale: expected shape [4, 8], got [4, 7]");
  });
}

}  // namespace
}  // namespace tidegate::test
