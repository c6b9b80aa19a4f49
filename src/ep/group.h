// The ranks of a buffer: their windows, the order of operations, waiting, and failure.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "ep/plan.h"
#include "ep/window.h"
#include "tidegate/error.h"

namespace tidegate::ep {

enum class Op : std::uint32_t { kNone, kDispatch, kCachedDispatch, kCombine, kCollect };
std::string_view op_name(Op op);

// What all ranks must say alike in one generation. Numbers only, so that a difference can be named.
struct Terms {
  static constexpr int kFields = 10;
  static const std::string_view kNames[kFields];
  // operator, row bytes, slots, dtype, int8, needs_backward, weights, handle, smooth_scale, static_shape
  std::uint64_t field[kFields] = {};
};
// Throws Failure, which begins with the prefix, if the terms of two ranks differ.
void compare_terms(const std::string& prefix, int rank, const Terms& mine, int other, const Terms& theirs);

// At the beginning of every slot.
struct Header {
  Terms terms;
  std::int64_t tokens;
};

// At the beginning of every window.
struct Control {
  struct alignas(64) Signal {               // written by the owner
    std::atomic<std::uint32_t> generation;  // the last one whose slot is complete
    std::atomic<Op> op;
  } ready;
  // Written by all: how many slots have been completed by all ranks together. The owner waits for this one number, so
  // that it is woken once in a generation, by the last rank to come.
  struct alignas(64) Arrivals {
    std::atomic<std::uint32_t> count;
    std::atomic<std::uint32_t> sleepers;
  } arrivals;
  enum State : std::uint32_t { kAlive, kFailed, kClosed };
  struct alignas(64) Fate {
    std::atomic<std::uint32_t> state;
    char text[508];  // why, when it is kFailed
  } fate;
};

class Group {
 public:
  Group(const Config& config, int rank, int ranks);
  ~Group();
  std::string address() const;
  void connect(const std::vector<std::string>& addresses);

  // Runs one collective operation; whatever it throws poisons the group and reaches the other ranks.
  template <class F>
  auto operation(std::string_view name, F body) {
    check_healthy();
    try {
      return body();
    } catch (const std::exception& e) {
      poison(name, e.what());
      throw;
    }
  }
  // The next generation's slot in my window: free, because every rank has begun the one before.
  char* next_slot() const { return slot(rank, generation + 1); }
  // Hands my slot to the others, waits for theirs, and compares their terms with mine.
  void exchange(std::string_view name, Op op, const Terms& terms, std::int64_t tokens);
  char* slot(int of, std::uint32_t g) const { return at(of) + slots_begin_ + (g % 2) * layout.slot; }
  char* current(int of) const { return slot(of, generation); }
  const Header& header(int of) const { return *reinterpret_cast<const Header*>(current(of)); }

  void check_healthy() const;
  void poison(std::string_view name, const std::string& text) noexcept;

  Config config;
  int rank, ranks;
  std::vector<std::int64_t> expert_begin;
  WindowLayout layout;
  std::uint32_t generation = 0;
  std::uint64_t epoch = 0;           // tells the handles of one life of the group from those before a reset
  std::uint64_t signature = 0;       // of the handle whose rows the current generation holds; 0: none
  std::int64_t row_bytes = 0;        // of them
  DType dtype = DType::kF32;         // of them
  bool int8 = false;                 // whether they are int8 in the windows
  bool smooth = false;               // whether expand makes them int8
  std::vector<std::int64_t> waited;  // microseconds, by rank

 private:
  struct Peer {
    Mapping window;
    Fd life;
  };
  char* at(int of) const { return peers_[static_cast<std::size_t>(of)].window.data(); }
  Control& control(int of) const { return *reinterpret_cast<Control*>(at(of)); }
  bool arrived(int of, std::uint32_t g) const;
  bool reached(std::uint32_t count) const, all_arrived() const, all_published() const;
  void wait(std::string_view name);
  void wake_others() const;
  void give_up(std::string_view name, std::chrono::steady_clock::time_point begin) const;
  void check_others(std::string_view name, std::chrono::steady_clock::time_point begin) const;
  void compare(std::string_view name, const Terms& mine) const;
  std::string prefix(std::string_view name) const;

  std::int64_t slots_begin_;
  int owner_;  // the process that made it: a forked child must not speak for it
  bool connected_ = false;
  std::string failure_;
  Fd window_;
  std::unique_ptr<Doorway> doorway_;  // until all ranks have come
  std::vector<Peer> peers_;
};

}  // namespace tidegate::ep
