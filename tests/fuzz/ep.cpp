// Expert parallelism: the ranks are threads of this process, each with a buffer of its own.
#include "tidegate/ep.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <memory>
#include <numeric>
#include <thread>

#include "base/element.h"
#include "fuzz/drivers.h"
#include "tidegate/cpu.h"

namespace tidegate::fuzz {
namespace {

using test::normal;
using test::uniform;

// Stands for an expert: a factor of its own, rounded to the type of the rows.
double factor(std::int64_t expert) { return 1.0 + 0.37 * static_cast<double>(expert); }

struct Setting {
  ep::Config config;
  Sizes first;  // token of every rank, and the end
  std::int64_t K = 0, H = 0;
  DType dtype = DType::kF32;
  bool weighted = false;

  int ranks() const { return static_cast<int>(first.size()) - 1; }
  TensorView of_rank(const TensorView& t, int r) const {
    const auto i = static_cast<std::size_t>(r);
    return t.defined() ? test::part(t, 0, first[i], first[i + 1]) : t;
  }
};

// in: x, ids, weights, shared_x; out: the sums, and of every pair the rank and the row there.
void work_of_rank(const Setting& s, ep::Buffer& buffer, const std::vector<std::string>& addresses, const Views& in,
                  const Views& out) {
  buffer.connect(addresses);
  const int r = buffer.rank();
  const ep::HandlePtr h = buffer.dispatch(s.of_rank(in[0], r), s.of_rank(in[1], r), {.weights = s.of_rank(in[2], r)});
  std::vector<char> memory(static_cast<std::size_t>(h->rows * s.H * dtype_bytes(s.dtype)) + 1);
  const TensorView rows = contiguous(memory.data(), s.dtype, {h->rows, s.H});
  buffer.expand(*h, rows);
  const TensorView y = buffer.window_rows(h->rows, s.H, s.dtype);
  std::int64_t j = 0;
  for (std::size_t e = 0; e < h->expert_rows.size(); ++e) {
    for (const std::int64_t end = j + h->expert_rows[e]; j < end; ++j) {
      for (std::int64_t c = 0; c < s.H; ++c) {
        const double value =
            read_element(rows, j * s.H + c) * factor(buffer.first_expert() + static_cast<std::int64_t>(e));
        write_element(y, offset_of(y, j, c), value);
      }
    }
  }
  buffer.combine(y, *h, s.of_rank(out[0], r), {.shared_x = s.of_rank(in[3], r)});
  const std::int64_t begin = s.first[static_cast<std::size_t>(r)] * s.K;
  for (std::size_t i = 0; i < h->rank.size(); ++i) {
    out[1].as<std::int32_t>()[begin + static_cast<std::int64_t>(i)] = h->rank[i];
    out[2].as<std::int32_t>()[begin + static_cast<std::int64_t>(i)] = h->place[i];
  }
}

void run_ranks(const Setting& s, const Views& in, const Views& out) {
  std::vector<std::unique_ptr<ep::Buffer>> buffers;
  std::vector<std::string> addresses;
  for (int r = 0; r < s.ranks(); ++r) {
    buffers.push_back(std::make_unique<ep::Buffer>(s.config, r, s.ranks()));
    addresses.push_back(buffers.back()->address());
  }
  std::vector<std::exception_ptr> errors(buffers.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < buffers.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        work_of_rank(s, *buffers[r], addresses, in, out);
      } catch (...) {
        errors[r] = std::current_exception();
      }
    });
  }
  for (std::thread& t : threads) {
    t.join();
  }
  for (const std::exception_ptr& error : errors) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
}

// The same in one process: sums in the order of ids, rows in the order of expert, rank, token, slot.
void one_process(const Setting& s, const Views& in, const Views& out) {
  const std::int64_t T = s.first.back();
  const auto id = [&](std::int64_t p) { return static_cast<std::int64_t>(read_element(in[1], p)); };
  const std::vector<std::int64_t> share = ep::even_shares(s.config.experts, s.ranks());
  const Tensor row(s.dtype, {1});
  for (std::int64_t t = 0; t < T; ++t) {
    std::vector<std::int64_t> pairs(static_cast<std::size_t>(s.K));
    std::iota(pairs.begin(), pairs.end(), t * s.K);
    std::stable_sort(pairs.begin(), pairs.end(), [&](std::int64_t a, std::int64_t b) { return id(a) < id(b); });
    for (std::int64_t c = 0; c < s.H; ++c) {
      float total = 0.0f;
      for (const std::int64_t p : pairs) {
        if (id(p) >= 0) {
          write_element(row, 0, read_element(in[0], offset_of(in[0], t, c)) * factor(id(p)));
          const float w = s.weighted ? static_cast<float>(read_element(in[2], p)) : 1.0f;
          const auto y = static_cast<float>(row.get(0));
          total = active_isa() == Isa::kScalar ? w * y + total : std::fma(w, y, total);
        }
      }
      if (in[3].defined()) {
        total += static_cast<float>(read_element(in[3], offset_of(in[3], t, c)));
      }
      write_element(out[0], offset_of(out[0], t, c), total);
    }
  }
  for (std::int64_t p = 0; p < T * s.K; ++p) {
    std::int32_t rank = -1, place = -1;
    if (id(p) >= 0) {
      rank = 0;
      while (share[static_cast<std::size_t>(rank) + 1] <= id(p)) {
        ++rank;
      }
      place = 0;
      for (std::int64_t other = 0; other < T * s.K; ++other) {  // those of earlier experts there, and before it
        const bool here = id(other) >= share[static_cast<std::size_t>(rank)];
        place += (here && id(other) < id(p)) || (id(other) == id(p) && other < p) ? 1 : 0;
      }
    }
    out[1].as<std::int32_t>()[p] = rank;
    out[2].as<std::int32_t>()[p] = place;
  }
}

Problem ranks(const Line& line) {
  Random random = numbers(line);
  Setting s;
  s.first = {0};
  s.config.max_tokens = 1;
  for (const std::int64_t tokens : line.list("tokens")) {
    s.first.push_back(s.first.back() + tokens);
    s.config.max_tokens = std::max(s.config.max_tokens, tokens);
  }
  const std::int64_t T = s.first.back();
  s.K = line.integer("k", 1, 16);
  s.H = line.size("H");
  s.dtype = line.dtype();
  s.weighted = line.flag("weights");
  s.config.experts = line.size("E");
  s.config.slots = s.K;
  s.config.row_bytes = s.H * dtype_bytes(s.dtype);
  s.config.timeout_seconds = 60.0;
  Problem p;
  p.in = {{"x", normal(random, s.dtype, {T, s.H}, line.form())},
          {"ids", draw_ids(random, line, T, s.K, s.config.experts)},
          {"weights", s.weighted ? uniform(random, DType::kF32, {T, s.K}, 0.0, 1.0) : Tensor()},
          {"shared_x", line.flag("shared") ? normal(random, s.dtype, {T, s.H}, line.form()) : Tensor()}};
  p.out = {{"out", Tensor(s.dtype, {T, s.H}, line.form())},
           {"rank", Tensor(DType::kI32, {T, s.K})},
           {"place", Tensor(DType::kI32, {T, s.K})}};
  p.call = [s](const Views& in, const Views& out, const SeqLens&) { run_ranks(s, in, out); };
  p.exact = [s](const Views& in, const Views& out, const SeqLens&) { one_process(s, in, out); };
  return p;
}

}  // namespace

std::vector<Driver> ep_drivers() {
  return {{"ep",
           "dispatch to the ranks of the experts, and combine",
           {{"tokens", "3,0,5"},
            {"E", "8"},
            {"k", "2"},
            {"H", "32"},
            {"ids", "random", "random|one|none"},
            {"weights", "1"},
            {"shared", "0"}},
           [](Random& random, Line& line) {
             std::string tokens;
             for (std::int64_t r = random.integer(1, 4); r > 0; --r) {
               tokens += (tokens.empty() ? "" : ",") + std::to_string(pick<std::int64_t>(random, {0, 1, 2, 5, 17}));
             }
             line.set("tokens", tokens);
             line.set("E", random.integer(1, 12));
             line.set("k", random.integer(1, 6));
             line.set("H", draw_width(random, 300));
             line.set("ids", pick_text(random, {"random", "random", "one", "none"}));
             line.set("weights", random.integer(0, 1));
             line.set("shared", random.integer(0, 1));
           },
           ranks}};
}

}  // namespace tidegate::fuzz
