// Who sends what: against the order that one process would produce on all tokens in rank order.
#include "ep/plan.h"

#include <gtest/gtest.h>

#include "toolkit.h"

namespace tidegate::test {
namespace {

using namespace ep;
using Ids = std::vector<std::int32_t>;

struct Lists {
  std::vector<std::int32_t> offsets, src;
};
Lists sorted(const Ids& ids, std::int64_t experts) {
  Lists l;
  for (std::int32_t e = 0; e < experts; ++e) {
    l.offsets.push_back(static_cast<std::int32_t>(l.src.size()));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] == e) {
        l.src.push_back(static_cast<std::int32_t>(i));
      }
    }
  }
  l.offsets.push_back(static_cast<std::int32_t>(l.src.size()));
  return l;
}

std::vector<Handle> placed(const std::vector<Ids>& ids, std::int64_t slots, const std::vector<std::int64_t>& begin) {
  std::vector<Lists> lists;
  std::vector<SourcePairs> sources;
  for (const Ids& list : ids) {
    lists.push_back(sorted(list, begin.back()));
  }
  for (std::size_t r = 0; r < ids.size(); ++r) {
    sources.push_back(
        {static_cast<std::int64_t>(ids[r].size()) / slots, lists[r].offsets.data(), lists[r].src.data(), nullptr});
  }
  std::vector<Handle> handles(ids.size());
  for (std::size_t r = 0; r < ids.size(); ++r) {
    handles[r].tokens = sources[r].tokens;
    handles[r].slots = slots;
    place_rows(handles[r], static_cast<std::int64_t>(r), begin, sources);
  }
  return handles;
}

TEST(EpPlan, SharesAreEvenAndCoverAllExperts) {
  using List = std::vector<std::int64_t>;
  EXPECT_EQ(even_shares(10, 4), (List{0, 2, 5, 7, 10}));
  EXPECT_EQ(even_shares(2, 4), (List{0, 0, 1, 1, 2}));
  EXPECT_EQ(even_shares(256, 2), (List{0, 128, 256}));
}

TEST(EpPlan, Example) {
  const auto h = placed({{0, 3}, {3, 2, -1, 0}}, 2, even_shares(4, 2));
  EXPECT_EQ(h[0].expert_rows, (std::vector<std::int64_t>{2, 0}));
  EXPECT_EQ(h[0].row_rank, (Ids{0, 1}));
  EXPECT_EQ(h[0].row_pair, (Ids{0, 3}));
  EXPECT_EQ(h[1].expert_rows, (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(h[1].row_rank, (Ids{1, 0, 1}));
  EXPECT_EQ(h[1].row_pair, (Ids{1, 1, 0}));
  EXPECT_EQ(h[1].rank, (Ids{1, 1, -1, 0}));
  EXPECT_EQ(h[1].place, (Ids{2, 0, -1, 1}));
  EXPECT_EQ(h[1].source_tokens, (std::vector<std::int64_t>{1, 2}));
}

TEST(EpPlan, RowsStandWhereTheirPairsSay) {
  Random random;
  for (int round = 0; round < 50; ++round) {
    const std::int64_t ranks = random.integer(1, 6);
    const std::int64_t experts = random.integer(1, 9);
    const std::int64_t slots = random.integer(1, 4);
    std::vector<Ids> ids(static_cast<std::size_t>(ranks));
    for (Ids& list : ids) {
      list.resize(static_cast<std::size_t>(random.integer(0, 7) * slots));
      for (std::int32_t& id : list) {
        id = static_cast<std::int32_t>(random.integer(-1, experts - 1));
      }
    }
    const auto begin = even_shares(experts, ranks);
    const auto handles = placed(ids, slots, begin);
    std::size_t received = 0, sent = 0;
    for (std::size_t r = 0; r < ids.size(); ++r) {
      const Handle& h = handles[r];
      received += h.row_pair.size();
      ASSERT_EQ(h.rows, static_cast<std::int64_t>(h.row_pair.size()));
      for (std::size_t p = 0; p < ids[r].size(); ++p) {
        ASSERT_EQ(h.rank[p] < 0, ids[r][p] < 0);
        if (h.rank[p] < 0) {
          continue;
        }
        ++sent;
        const Handle& owner = handles[static_cast<std::size_t>(h.rank[p])];
        const auto place = static_cast<std::size_t>(h.place[p]);
        ASSERT_EQ(owner.row_rank.at(place), static_cast<std::int32_t>(r));
        ASSERT_EQ(owner.row_pair.at(place), static_cast<std::int32_t>(p));
        // Its expert's rows are where expert_rows says.
        std::int64_t first = 0, e = begin[static_cast<std::size_t>(h.rank[p])];
        while (first + owner.expert_rows.at(static_cast<std::size_t>(e - begin[static_cast<std::size_t>(h.rank[p])])) <=
               h.place[p]) {
          first += owner.expert_rows[static_cast<std::size_t>(e - begin[static_cast<std::size_t>(h.rank[p])])];
          ++e;
        }
        ASSERT_EQ(e, ids[r][p]);
      }
      // Inside an expert: by rank, then by pair.
      for (std::size_t j = 1; j < h.row_pair.size(); ++j) {
        const auto expert = [&](std::size_t i) {
          return ids[static_cast<std::size_t>(h.row_rank[i])][static_cast<std::size_t>(h.row_pair[i])];
        };
        ASSERT_LT(std::tuple(expert(j - 1), h.row_rank[j - 1], h.row_pair[j - 1]),
                  std::tuple(expert(j), h.row_rank[j], h.row_pair[j]));
      }
    }
    ASSERT_EQ(received, sent);
  }
}

TEST(EpPlan, WindowHoldsTheWorstCase) {
  Config c;
  c.experts = 256;
  c.slots = 8;
  c.max_tokens = 32;
  c.row_bytes = 100;
  const WindowLayout w = window_layout(c, 4, 640, 80);
  EXPECT_EQ(w.row_capacity, 32 * 8 * 4);
  EXPECT_GE(w.src - w.offsets, 4 * 257);
  EXPECT_GE(w.weights - w.src, 4 * 256);
  EXPECT_GE(w.scales - w.weights, 4 * 256);
  EXPECT_GE(w.rows - w.scales, 4 * 32);
  EXPECT_GE(w.rows - w.values, 4 * w.row_capacity);
  EXPECT_EQ(w.slot - w.rows, 128 * w.row_capacity);
  EXPECT_EQ(w.bytes, 4096 + 2 * w.slot);
}

TEST(EpPlan, Errors) {
  const auto wrong = [](auto change, int rank, int ranks, const std::string& text) {
    Config c;
    c.experts = 4;
    c.slots = 2;
    c.max_tokens = 8;
    c.row_bytes = 16;
    change(c);
    expect_error([&] { check_config(c, rank, ranks); }, "ep_buffer: " + text);
  };
  const auto same = [](Config&) {};
  wrong(same, 2, 2, "rank: expected 0..1, got 2");
  wrong([](Config& c) { c.experts = 0; }, 0, 2, "experts: expected at least 1, got 0");
  wrong([](Config& c) { c.slots = 0; }, 0, 2, "slots: expected at least 1, got 0");
  wrong([](Config& c) { c.row_bytes = 0; }, 0, 2, "row_bytes: expected at least 1, got 0");
  wrong([](Config& c) { c.expert_begin = {0, 4}; }, 0, 2, "expert_begin: expected 3 numbers, got 2");
  wrong(
      [](Config& c) {
        c.expert_begin = {0, 3, 2};
      },
      0, 2, "expert_begin: expected numbers that do not decrease from 0 to 4, got 0 to 2");
  wrong([](Config& c) { c.max_tokens = std::int64_t{1} << 40; }, 0, 2,
        "max_tokens: expected at most 536870911 with 2 slots and 2 ranks, got 1099511627776");
}

}  // namespace
}  // namespace tidegate::test
