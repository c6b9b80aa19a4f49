// One operation after the other: publish a slot, wait for the slots of the others, compare.
#include "ep/group.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
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

// False: the word had another value already.
bool sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t value) {
  const timespec limit{0, kSleepMilliseconds * 1000000L};
  return syscall(SYS_futex, &word, FUTEX_WAIT, value, &limit, nullptr, 0) == 0 || errno != EAGAIN;
}
void wake_all(std::atomic<std::uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0); }

std::string decimal(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", x);
  return text;
}

}  // namespace

const std::string_view Terms::kNames[Terms::kFields] = {
    "operator", "bytes of a row",     "slots",       "dtype", "int8", "needs_backward", "weights given",
    "handle",   "smooth_scale given", "static_shape"};

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
    wake_others();
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
  wake_others();
}

void Group::wake_others() const {
  for (int r = 0; r < ranks; ++r) {
    wake_all(control(r).arrivals.count);
  }
}

bool Group::arrived(int of, std::uint32_t g) const {
  // Generations wrap around after 2^32 operations.
  return static_cast<std::int32_t>(control(of).ready.generation.load(std::memory_order_acquire) - g) >= 0;
}

// Whether so many arrivals include all of this generation. There may be more: ranks that have been told everything are
// in the next one before the last rank of this one has told everybody.
bool Group::reached(std::uint32_t count) const {
  return static_cast<std::int32_t>(count - generation * static_cast<std::uint32_t>(ranks)) >= 0;
}

bool Group::all_arrived() const { return reached(control(rank).arrivals.count.load(std::memory_order_acquire)); }

// The same by looking at every rank. One that died between publishing and telling everybody still counts.
bool Group::all_published() const {
  for (int r = 0; r < ranks; ++r) {
    if (!arrived(r, generation)) {
      return false;
    }
  }
  return true;
}

void Group::exchange(std::string_view name, Op op, const Terms& terms, std::int64_t tokens) {
  auto* mine = reinterpret_cast<Header*>(next_slot());
  mine->terms = terms;
  mine->tokens = tokens;
  ++generation;
  Control::Signal& ready = control(rank).ready;
  ready.op.store(op, std::memory_order_relaxed);
  ready.generation.store(generation, std::memory_order_release);
  // Each rank begins with its neighbour: no line is wanted by all at once. All are told before any is woken, because a
  // woken rank may take this core.
  std::vector<bool> asleep(static_cast<std::size_t>(ranks));
  for (int i = 1; i <= ranks; ++i) {
    const int r = (rank + i) % ranks;
    Control::Arrivals& theirs = control(r).arrivals;
    // Sequentially consistent, as the sleepers' side is: no sleeper is overlooked.
    const std::uint32_t count = theirs.count.fetch_add(1) + 1;
    asleep[static_cast<std::size_t>(r)] = reached(count) && theirs.sleepers.load() != 0;
  }
  for (int r = 0; r < ranks; ++r) {
    if (asleep[static_cast<std::size_t>(r)]) {
      wake_all(control(r).arrivals.count);
    }
  }
  if (!all_arrived()) {
    wait(name);
  }
  compare(name, terms);
}

void Group::wait(std::string_view name) {
  const Clock::time_point begin = Clock::now();
  std::vector<bool> missing(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r) {
    missing[static_cast<std::size_t>(r)] = !arrived(r, generation);
  }
  bool done = false;
  for (int i = 0; i < kSpins && !done; ++i) {
    pause();
    done = all_arrived();
  }
  while (!done && seconds_since(begin) < kYieldSeconds) {
    sched_yield();
    done = all_arrived();
  }
  Control::Arrivals& mine = control(rank).arrivals;
  while (!done) {
    mine.sleepers.store(1);
    const std::uint32_t seen = mine.count.load();
    const bool slept = !reached(seen) && sleep_while(mine.count, seen);
    mine.sleepers.store(0);
    done = all_arrived() || (slept && all_published());
    if (!done && slept) {
      check_others(name, begin);
    }
  }
  const auto spent = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin).count();
  for (int r = 0; r < ranks; ++r) {
    waited[static_cast<std::size_t>(r)] += missing[static_cast<std::size_t>(r)] ? spent : 0;
  }
}

void Group::check_others(std::string_view name, Clock::time_point begin) const {
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
    if (arrived(r, generation)) {
      continue;
    }
    if (state == Control::kClosed) {
      throw Failure(prefix(name) + "rank " + std::to_string(r) + " has closed its buffer");
    }
    if (is_gone(peers_[static_cast<std::size_t>(r)].life) && !arrived(r, generation)) {
      give_up(name, begin);
    }
  }
  if (seconds_since(begin) > config.timeout_seconds) {
    give_up(name, begin);
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

void compare_terms(const std::string& prefix, int rank, const Terms& mine, int other, const Terms& theirs) {
  for (int i = 0; i < Terms::kFields; ++i) {
    if (theirs.field[i] == mine.field[i]) {
      continue;
    }
    const auto text = [&](const Terms& t) {
      return i == 0 ? std::string(op_name(static_cast<Op>(t.field[i]))) : std::to_string(t.field[i]);
    };
    throw Failure(prefix + "rank " + std::to_string(rank) + " and rank " + std::to_string(other) +
                  " disagree: " + std::string(Terms::kNames[i]) + " is " + text(mine) + " on rank " +
                  std::to_string(rank) + " and " + text(theirs) + " on rank " + std::to_string(other));
  }
}

void Group::compare(std::string_view name, const Terms& mine) const {
  for (int r = 0; r < ranks; ++r) {
    compare_terms(prefix(name), rank, mine, r, header(r).terms);
  }
}

}  // namespace tidegate::ep
