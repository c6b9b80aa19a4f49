// One operation after the other: publish a slot, wait for the slots of the others, compare.
#include "ep/group.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>

namespace tidegate::ep {
namespace {

using Clock = std::chrono::steady_clock;

// A rank on another core answers within microseconds. Then its core may be ours, so let it run. Then sleep: waking up
// takes about as long as the yields before it.
constexpr int kSpins = 200;
constexpr double kYieldSeconds = 200e-6;
constexpr int kSleepMilliseconds = 20;  // how late a failure elsewhere may be noticed

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t value) {
  const timespec limit{0, kSleepMilliseconds * 1000000L};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &limit, nullptr, 0);
}
void wake_all(std::atomic<std::uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0); }

std::string decimal(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", x);
  return text;
}

}  // namespace

const std::string_view Terms::kNames[Terms::kFields] = {"operator", "bytes of a row", "slots",         "dtype",
                                                        "int8",     "needs_backward", "weights given", "handle"};

std::string_view op_name(Op op) {
  constexpr std::string_view names[] = {"none", "dispatch", "cached dispatch", "combine", "collect"};
  return static_cast<std::size_t>(op) < std::size(names) ? names[static_cast<std::size_t>(op)] : "unknown";
}

Group::~Group() {
  if (getpid() == owner_ && connected_) {
    Control& mine = control(rank);
    if (mine.fate.state.load() == Control::kAlive) {
      mine.fate.state.store(Control::kClosed);
    }
    wake_all(mine.ready.generation);
  }
}

std::string Group::prefix(std::string_view name) const {
  return std::string(name) + ": group " + config.name + ", generation " + std::to_string(generation) + ", rank " +
         std::to_string(rank) + ": ";
}

void Group::check_healthy() const {
  if (!failure_.empty()) {
    throw Failure(failure_);
  }
  if (!connected_) {
    throw Failure("ep_buffer: group " + config.name + ": not connected yet");
  }
}

void Group::poison(std::string_view name, const std::string& text) noexcept {
  if (!failure_.empty()) {
    return;
  }
  failure_ = text.empty() ? std::string(name) + " failed" : text;
  if (!connected_) {
    return;
  }
  Control& mine = control(rank);
  const std::size_t length = std::min(failure_.size(), sizeof mine.fate.text - 1);
  std::memcpy(mine.fate.text, failure_.data(), length);
  mine.fate.text[length] = '\0';
  mine.fate.state.store(Control::kFailed);
  wake_all(mine.ready.generation);
}

bool Group::arrived(int of, std::uint32_t g) const {
  // Generations wrap around after 2^32 operations.
  return static_cast<std::int32_t>(control(of).ready.generation.load(std::memory_order_acquire) - g) >= 0;
}

void Group::exchange(std::string_view name, Op op, const Terms& terms, std::int64_t tokens) {
  auto* mine = reinterpret_cast<Header*>(next_slot());
  mine->terms = terms;
  mine->tokens = tokens;
  ++generation;
  Control::Signal& ready = control(rank).ready;
  ready.op.store(op, std::memory_order_relaxed);
  ready.generation.store(generation);  // sequentially consistent, as the sleepers' side is: no sleeper is overlooked
  if (ready.sleepers.load() != 0) {
    wake_all(ready.generation);
  }
  const Clock::time_point begin = Clock::now();
  Clock::time_point last = begin;
  for (int r = 0; r < ranks; ++r) {
    if (!arrived(r, generation)) {
      wait_for(name, r, generation, begin);
      const Clock::time_point now = Clock::now();
      waited[static_cast<std::size_t>(r)] += std::chrono::duration_cast<std::chrono::microseconds>(now - last).count();
      last = now;
    }
  }
  compare(name, terms);
}

void Group::wait_for(std::string_view name, int of, std::uint32_t g, Clock::time_point begin) {
  for (int i = 0; i < kSpins; ++i) {
    pause();
    if (arrived(of, g)) {
      return;
    }
  }
  for (const Clock::time_point yields = Clock::now(); seconds_since(yields) < kYieldSeconds;) {
    sched_yield();
    if (arrived(of, g)) {
      return;
    }
  }
  Control::Signal& s = control(of).ready;
  while (true) {
    s.sleepers.fetch_add(1);
    const std::uint32_t seen = s.generation.load();
    if (!arrived(of, g)) {
      sleep_while(s.generation, seen);
    }
    s.sleepers.fetch_sub(1);
    if (arrived(of, g)) {
      return;
    }
    check_others(name, of);
    if (seconds_since(begin) > config.timeout_seconds) {
      give_up(name, begin);
    }
    if (is_gone(peers_[static_cast<std::size_t>(of)].life) && !arrived(of, g)) {
      give_up(name, begin);
    }
  }
}

void Group::check_others(std::string_view name, int of) const {
  for (int r = 0; r < ranks; ++r) {
    const Control::Fate& fate = control(r).fate;
    const std::uint32_t state = fate.state.load(std::memory_order_acquire);
    if (state == Control::kFailed) {
      std::string text(fate.text, strnlen(fate.text, sizeof fate.text));
      // What that rank heard from another one is passed on as it is.
      const std::size_t cause = text.rfind(" failed: ");
      if (cause != std::string::npos) {
        const std::size_t who = text.rfind("rank ", cause);
        throw Failure(prefix(name) + text.substr(who));
      }
      throw Failure(prefix(name) + "rank " + std::to_string(r) + " failed: " + text);
    }
    if (state == Control::kClosed && r == of && !arrived(r, generation)) {
      throw Failure(prefix(name) + "rank " + std::to_string(r) + " has closed its buffer");
    }
  }
}

void Group::give_up(std::string_view name, Clock::time_point begin) const {
  std::vector<int> missing, gone;
  for (int r = 0; r < ranks; ++r) {
    if (!arrived(r, generation)) {
      missing.push_back(r);
      if (is_gone(peers_[static_cast<std::size_t>(r)].life)) {
        gone.push_back(r);
      }
    }
  }
  std::string list, details;
  for (const int r : gone.empty() ? missing : gone) {
    list += (list.empty() ? "" : ", ") + std::to_string(r);
    const Control::Signal& s = control(r).ready;
    details += (details.empty() ? "; rank " : ", rank ") + std::to_string(r) +
               (gone.empty() ? " last at generation " : ": process gone, last at generation ") +
               std::to_string(s.generation.load()) + " (" + std::string(op_name(s.op.load())) + ")";
  }
  throw Failure(prefix(name) + "waited " + decimal(seconds_since(begin)) + " s for ranks [" + list + "]" + details);
}

void Group::compare(std::string_view name, const Terms& mine) const {
  for (int r = 0; r < ranks; ++r) {
    const Terms& theirs = header(r).terms;
    for (int i = 0; i < Terms::kFields; ++i) {
      if (theirs.field[i] == mine.field[i]) {
        continue;
      }
      const auto text = [&](const Terms& t) {
        return i == 0 ? std::string(op_name(static_cast<Op>(t.field[i]))) : std::to_string(t.field[i]);
      };
      throw Failure(prefix(name) + "rank " + std::to_string(rank) + " and rank " + std::to_string(r) +
                    " disagree: " + std::string(Terms::kNames[i]) + " is " + text(mine) + " on rank " +
                    std::to_string(rank) + " and " + text(theirs) + " on rank " + std::to_string(r));
    }
  }
}

}  // namespace tidegate::ep
