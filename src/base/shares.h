// Pieces of work handed out to workers: each takes its own stretch of them in order, so that what it reads lies in
// order too, and helps the others when it is done. Who takes a piece must not change what it computes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace tidegate {

class Shares {
 public:
  Shares(std::int64_t pieces, std::int64_t workers)
      : pieces_(pieces),
        workers_(std::max<std::int64_t>(std::min(workers, pieces), 1)),
        count_(std::min(workers_, kMost)) {
    for (std::int64_t i = 0; i < count_; ++i) {
      share_[i].next.store(begin(i), std::memory_order_relaxed);
    }
  }
  // How many workers there is work for.
  std::int64_t workers() const { return workers_; }

  // The next piece for a worker, or -1 when all are taken.
  std::int64_t take(std::int64_t worker) {
    for (std::int64_t i = 0; i < count_; ++i) {
      const std::int64_t share = (worker + i) % count_;
      if (share_[share].next.load(std::memory_order_relaxed) < begin(share + 1)) {
        const std::int64_t piece = share_[share].next.fetch_add(1, std::memory_order_relaxed);
        if (piece < begin(share + 1)) {
          return piece;
        }
      }
    }
    return -1;
  }

 private:
  static constexpr std::int64_t kMost = 64;  // stretches; more workers than that share them
  struct alignas(64) Share {                 // a cache line each
    std::atomic<std::int64_t> next;
  };
  std::int64_t begin(std::int64_t share) const { return pieces_ * share / count_; }

  std::int64_t pieces_, workers_, count_;
  Share share_[kMost];
};

}  // namespace tidegate
