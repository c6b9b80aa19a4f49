// Several processes in one test: forked, with a bootstrap in memory that they share.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <new>
#include <thread>
#include <vector>

#include "tidegate/ep_nodes.h"
#include "tidegate/parallel.h"

// Of a build for coverage, absent elsewhere: a process that ends by _exit writes what it counted only when asked to.
extern "C" int __llvm_profile_write_file() __attribute__((weak));

namespace tidegate::test {

// Rounds of all_gather are separated by counters; every rank has room of its own in each round.
struct SharedRoom {
  static constexpr int kRanks = 16, kRounds = 40, kBytes = 1 << 16;  // memory is taken as it is used
  std::atomic<int> arrived[kRounds];
  int length[kRounds][kRanks];
  char text[kRounds][kRanks][kBytes];
};

class SharedBootstrap : public ep::Wire {
 public:
  SharedBootstrap(SharedRoom* room, int rank, int size) : room_(room), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<std::string> all_gather(const std::string& mine) override {
    const int round = round_++;
    room_->length[round][rank_] = static_cast<int>(mine.size());
    std::memcpy(room_->text[round][rank_], mine.data(), mine.size());
    room_->arrived[round].fetch_add(1);
    while (room_->arrived[round].load() < size_) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    std::vector<std::string> all;
    for (int r = 0; r < size_; ++r) {
      all.emplace_back(room_->text[round][r], static_cast<std::size_t>(room_->length[round][r]));
    }
    return all;
  }
  // Everything to everybody; each takes what is meant for it.
  void all_to_all(const char* send, const std::vector<std::int64_t>& sent, char* receive,
                  const std::vector<std::int64_t>& received) override {
    std::string mine(reinterpret_cast<const char*>(sent.data()), sent.size() * sizeof(std::int64_t));
    std::int64_t bytes = 0;
    for (const std::int64_t n : sent) {
      bytes += n;
    }
    mine.append(send, static_cast<std::size_t>(bytes));
    const std::vector<std::string> all = all_gather(mine);
    for (int r = 0; r < size_; ++r) {
      const std::string& theirs = all[static_cast<std::size_t>(r)];
      const auto* counts = reinterpret_cast<const std::int64_t*>(theirs.data());
      std::int64_t at = static_cast<std::int64_t>(sizeof(std::int64_t)) * size_;
      for (int before = 0; before < rank_; ++before) {
        at += counts[before];
      }
      EXPECT_EQ(counts[rank_], received[static_cast<std::size_t>(r)]);
      if (counts[rank_] > 0) {  // else there may be no memory to receive in
        std::memcpy(receive, theirs.data() + at, static_cast<std::size_t>(counts[rank_]));
        receive += counts[rank_];
      }
    }
  }

 private:
  SharedRoom* room_;
  int rank_, size_, round_ = 0;
};

class Ranks {
 public:
  // Starts the processes; each runs body and exits with 0 if no expectation failed.
  Ranks(int count, const std::function<void(SharedBootstrap&)>& body) {
    void* memory = mmap(nullptr, sizeof(SharedRoom), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    room_ = new (memory) SharedRoom{};
    fflush(nullptr);
    for (int r = 0; r < count; ++r) {
      const pid_t pid = fork();
      if (pid == 0) {
        alarm(60);  // whatever goes wrong, no process stays behind
        // The pool's threads were not forked.
        set_parallel_backend([](std::int64_t tasks, ParallelBody run, void* context) { run(context, 0, tasks); });
        SharedBootstrap bootstrap(room_, r, count);
        try {
          body(bootstrap);
        } catch (const std::exception& e) {
          ADD_FAILURE() << "rank " << r << ": " << e.what();
        }
        fflush(nullptr);
        if (__llvm_profile_write_file != nullptr) {
          __llvm_profile_write_file();
        }
        _exit(testing::Test::HasFailure() ? 1 : 0);
      }
      pids_.push_back(pid);
    }
  }
  ~Ranks() { munmap(room_, sizeof(SharedRoom)); }
  void kill(int rank) { ::kill(pids_[static_cast<std::size_t>(rank)], SIGKILL); }
  // Waits for all; a rank in `killed` must have died of SIGKILL.
  void expect_success(int killed = -1) {
    for (std::size_t r = 0; r < pids_.size(); ++r) {
      int status = 0;
      waitpid(pids_[r], &status, 0);
      if (static_cast<int>(r) == killed) {
        EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "rank " << r;
      } else {
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << r << ": status " << status;
      }
    }
  }
  const std::vector<pid_t>& pids() const { return pids_; }

 private:
  SharedRoom* room_;
  std::vector<pid_t> pids_;
};

inline void run_ranks(int count, const std::function<void(SharedBootstrap&)>& body) {
  Ranks(count, body).expect_success();
}

}  // namespace tidegate::test
