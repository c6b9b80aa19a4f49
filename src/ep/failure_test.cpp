// What happens when a rank dies, does not come, says something else, or is given wrong arguments: the others learn who
// and why, soon, and nothing stays behind.
#include <fstream>

#include "ep/test_case.h"
#include "tidegate/error.h"

namespace tidegate::test {
namespace {

using ep::Buffer;
using ep::Failure;
using ep::HandlePtr;
using Clock = std::chrono::steady_clock;

EpProblem problem(int ranks, DType dtype = DType::kF32) {
  return EpProblem(
      {ranks, 8, 2, 16, std::vector<std::int64_t>(static_cast<std::size_t>(ranks), 4), EpCase::kUniform, dtype});
}

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// Runs f, which must throw Failure, and returns its text.
std::string failure_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Failure& e) {
    return e.what();
  }
  ADD_FAILURE() << "expected a Failure";
  return {};
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "\"" << text << "\" does not contain \"" << part << "\"";
}

struct Step {
  HandlePtr handle;
  Tensor rows, out;
};
Step dispatched(Buffer& b, const EpProblem& p) {
  Step s;
  s.handle =
      b.dispatch(p.part_of(p.x, b.rank()), p.part_of(p.ids, b.rank()), {.weights = p.part_of(p.weights, b.rank())});
  s.rows = Tensor(p.what.dtype, {s.handle->rows, p.what.H});
  b.expand(*s.handle, s.rows);
  s.out = Tensor(p.what.dtype, {s.handle->tokens, p.what.H});
  return s;
}
void one_round(Buffer& b, const EpProblem& p) {
  Step s = dispatched(b, p);
  b.combine(s.rows, *s.handle, s.out);
}

void expect_nothing_left(const std::vector<pid_t>& pids) {
  std::ifstream sockets("/proc/net/unix");
  for (std::string line; std::getline(sockets, line);) {
    for (const pid_t pid : pids) {
      EXPECT_EQ(line.find("tidegate-ep-" + std::to_string(pid) + "-"), std::string::npos) << line;
    }
  }
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    EXPECT_EQ(line.find("tidegate-ep"), std::string::npos) << line;
  }
}

enum When { kBeforeDispatch, kBeforeCombine };
void kill_one(int ranks, When when) {
  Ranks processes(ranks, [&](SharedBootstrap& bootstrap) {
    const EpProblem p = problem(bootstrap.size());
    const auto buffer = Buffer::create(p.config(), bootstrap);
    one_round(*buffer, p);
    const bool victim = bootstrap.rank() == 1;
    if (victim && when == kBeforeDispatch) {
      raise(SIGKILL);
    }
    const auto begin = Clock::now();
    const std::string text = failure_of([&] {
      Step s = dispatched(*buffer, p);
      if (victim) {
        raise(SIGKILL);
      }
      buffer->combine(s.rows, *s.handle, s.out);
    });
    EXPECT_LT(seconds_since(begin), 5.0);  // long before the timeout of 20 s
    expect_contains(text, "rank 1");
    expect_contains(text, "process gone, last at generation " +
                              std::string(when == kBeforeDispatch ? "2 (combine)" : "3 (dispatch)"));
    EXPECT_EQ(failure_of([&] { one_round(*buffer, p); }), text);  // poisoned: at once and with the same text
  });
  processes.expect_success(1);
  expect_nothing_left(processes.pids());
}
TEST(EpFailure, KilledInDispatch) {
  for (const int ranks : {2, 4}) kill_one(ranks, kBeforeDispatch);
}
TEST(EpFailure, KilledInCombine) {
  for (const int ranks : {2, 4}) kill_one(ranks, kBeforeCombine);
}

TEST(EpFailure, KilledAtAnyMoment) {
  for (int round = 0; round < 5; ++round) {
    Ranks processes(3, [&](SharedBootstrap& bootstrap) {
      const EpProblem p = problem(3);
      const auto buffer = Buffer::create(p.config(), bootstrap);
      bootstrap.all_gather("");
      const std::string text = failure_of([&] {
        while (true) {
          one_round(*buffer, p);
        }
      });
      expect_contains(text, "rank 2");
      expect_contains(text, "process gone");
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(60 + 7 * round));
    processes.kill(2);
    processes.expect_success(2);
    expect_nothing_left(processes.pids());
  }
}

TEST(EpFailure, ARankThatDoesNotComeIsNamed) {
  run_ranks(4, [](SharedBootstrap& bootstrap) {
    const EpProblem p = problem(4);
    ep::Config config = p.config();
    config.timeout_seconds = 0.5;
    const auto buffer = Buffer::create(config, bootstrap);
    const auto begin = Clock::now();
    if (bootstrap.rank() % 2 == 0) {
      const std::string text = failure_of([&] { dispatched(*buffer, p); });
      EXPECT_LT(seconds_since(begin), 3.0);
      if (text.find("failed: ") == std::string::npos) {  // the first one to notice
        expect_contains(text, "ep_dispatch: group moe, generation 1, rank " + std::to_string(bootstrap.rank()));
        expect_contains(text, "s for ranks [1, 3]; rank 1 last at generation 0 (none), rank 3 last at");
      }
    }
    bootstrap.all_gather("");  // nobody leaves before all have seen it
  });
}

TEST(EpFailure, AClosedBufferIsNamed) {
  run_ranks(2, [](SharedBootstrap& bootstrap) {
    const EpProblem p = problem(2);
    auto buffer = Buffer::create(p.config(), bootstrap);
    one_round(*buffer, p);
    if (bootstrap.rank() == 1) {
      buffer.reset();
    } else {
      expect_contains(failure_of([&] { one_round(*buffer, p); }), "rank 1 has closed its buffer");
    }
    bootstrap.all_gather("");
  });
}

TEST(EpFailure, WrongArgumentsReachAllRanksAndResetHeals) {
  run_ranks(3, [](SharedBootstrap& bootstrap) {
    const EpProblem p = problem(3);
    const auto buffer = Buffer::create(p.config(), bootstrap);
    Tensor ids = copied(p.part_of(p.ids, bootstrap.rank()));
    const std::string wrong = "ep_dispatch: ids[1,1]: expected -1 or 0..7, got 9";
    const auto begin = Clock::now();
    if (bootstrap.rank() == 1) {
      ids.set(3, 9);
      expect_error([&] { buffer->dispatch(p.part_of(p.x, 1), ids); }, wrong);
    } else {
      const std::string text = failure_of([&] { buffer->dispatch(p.part_of(p.x, bootstrap.rank()), ids); });
      expect_contains(text, "rank 1 failed: " + wrong);
    }
    EXPECT_LT(seconds_since(begin), 2.0);
    EXPECT_FALSE(failure_of([&] { one_round(*buffer, p); }).empty());
    buffer->reset(bootstrap);
    one_round(*buffer, p);
  });
}

// One rank calls with something else; every rank must hear of it. `differ` runs on rank 1, `usual` elsewhere.
void expect_disagreement(const std::function<void(Buffer&, const EpProblem&)>& usual,
                         const std::function<void(Buffer&, const EpProblem&)>& differ, const std::string& what) {
  run_ranks(3, [&](SharedBootstrap& bootstrap) {
    const EpProblem p = problem(3);
    const auto buffer = Buffer::create(p.config(), bootstrap);
    const std::string text = failure_of([&] { (bootstrap.rank() == 1 ? differ : usual)(*buffer, p); });
    expect_contains(text, "disagree: " + what);
    expect_contains(text, "rank 1");
    bootstrap.all_gather("");
  });
}
TEST(EpFailure, RanksThatDisagree) {
  const auto plain = [](Buffer& b, const EpProblem& p) { dispatched(b, p); };
  expect_disagreement(
      plain,
      [](Buffer& b, const EpProblem& p) {
        b.dispatch(p.part_of(p.x, 1), part(p.part_of(p.ids, 1), 1, 0, 1),
                   {.weights = part(p.part_of(p.weights, 1), 1, 0, 1)});
      },
      "slots is ");
  expect_disagreement(
      plain,
      [](Buffer& b, const EpProblem& p) {
        b.dispatch(p.part_of(p.x, 1), p.part_of(p.ids, 1),
                   {.weights = p.part_of(p.weights, 1), .needs_backward = true});
      },
      "needs_backward is ");
  expect_disagreement(
      plain, [](Buffer& b, const EpProblem& p) { b.dispatch(p.part_of(p.x, 1), p.part_of(p.ids, 1)); },
      "weights given is ");
  expect_disagreement(
      [](Buffer& b, const EpProblem& p) {
        const HandlePtr first = dispatched(b, p).handle;
        const HandlePtr second = dispatched(b, p).handle;
        b.dispatch(p.part_of(p.x, b.rank()), *second);
      },
      [](Buffer& b, const EpProblem& p) {
        const HandlePtr first = dispatched(b, p).handle;
        const HandlePtr second = dispatched(b, p).handle;
        b.dispatch(p.part_of(p.x, b.rank()), *first);
      },
      "handle is ");
  expect_disagreement(
      [](Buffer& b, const EpProblem& p) {
        Step s = dispatched(b, p);
        b.combine(s.rows, *s.handle, s.out);
      },
      [](Buffer& b, const EpProblem& p) { dispatched(b, p), dispatched(b, p); }, "operator is ");
  const auto smooth = [](Buffer& b, const EpProblem& p) {
    const Tensor scale = Tensor(DType::kF32, {p.what.E, p.what.H}).fill(1.0);
    b.dispatch(p.part_of(p.x, b.rank()), p.part_of(p.ids, b.rank()), {.int8 = true, .smooth_scale = scale});
  };
  expect_disagreement(
      smooth, [](Buffer& b, const EpProblem& p) { b.dispatch(p.part_of(p.x, 1), p.part_of(p.ids, 1), {.int8 = true}); },
      "bytes of a row is ");
  expect_disagreement(
      smooth, [](Buffer& b, const EpProblem& p) { b.dispatch(p.part_of(p.x, 1), p.part_of(p.ids, 1)); }, "int8 is ");
  const auto combined = [](Buffer& b, const EpProblem& p) {
    Step s = dispatched(b, p);
    b.combine(s.rows, *s.handle, s.out, {.needs_backward = b.rank() == 1});
  };
  expect_disagreement(combined, combined, "needs_backward is ");
}

TEST(EpFailure, ConfigurationsThatDisagree) {
  run_ranks(2, [](SharedBootstrap& bootstrap) {
    ep::Config config = problem(2).config();
    config.experts = 8 + bootstrap.rank();
    expect_contains(failure_of([&] { Buffer::create(config, bootstrap); }), "disagree: experts is ");
    config.experts = 8;
    config.node_id = bootstrap.rank() == 0 ? "north" : "south";
    expect_contains(failure_of([&] { Buffer::create(config, bootstrap); }), "is on node ");
    bootstrap.all_gather("");
  });
}

TEST(EpFailure, WrongSizesSayWhatIsNeeded) {
  run_ranks(1, [](SharedBootstrap& bootstrap) {
    const EpProblem p({1, 8, 2, 16, {6}, EpCase::kUniform, DType::kF32});
    const auto expect = [&](auto change, auto call, const std::string& text) {
      ep::Config config = p.config();
      change(config);
      const auto buffer = Buffer::create(config, bootstrap);
      expect_error([&] { call(*buffer); }, text);
    };
    ep::Config small = p.config();
    small.max_tokens = 5;
    const auto dispatch = [&](Buffer& b) { b.dispatch(p.x, p.ids); };
    const auto same = [](ep::Config&) {};
    expect([](ep::Config& c) { c.max_tokens = 5; }, dispatch,
           "ep_dispatch: x: expected at most 5 tokens (max_tokens of the buffer), got 6; a buffer for them has windows "
           "of " +
               std::to_string(window_bytes(p.config(), 1)) + " bytes instead of " +
               std::to_string(window_bytes(small, 1)));
    expect([](ep::Config& c) { c.row_bytes = 60; }, dispatch,
           "ep_dispatch: x: expected rows of at most 60 bytes (row_bytes of the buffer), got 64");
    expect([](ep::Config& c) { c.slots = 1; }, dispatch,
           "ep_dispatch: ids: expected 1 to 1 slots (slots of the buffer), got 2");
    expect(
        same,
        [&](Buffer& b) {
          const HandlePtr h = b.dispatch(p.x, p.ids);
          b.combine(part(p.x, 0, 0, 3), *h, p.x);
        },
        "ep_combine: y: expected shape [12, 16], got [3, 16]");
    expect(
        same, [&](Buffer& b) { b.dispatch(p.x, typed(p.ids, DType::kF32)); },
        "ep_dispatch: ids: expected dtype int32 or int64, got dtype float32");
    expect(
        same,
        [&](Buffer& b) {
          const HandlePtr h = b.dispatch(p.x, p.ids);
          b.dispatch(p.x, p.ids);
          Tensor rows(DType::kF32, {h->rows, 16});
          b.expand(*h, rows);
        },
        "ep_expand: handle: expected that of the last dispatch, got another one");
  });
}

}  // namespace
}  // namespace tidegate::test
