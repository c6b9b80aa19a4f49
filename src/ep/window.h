// Shared memory between processes of one node: an anonymous file that its owner hands to the others over a local
// socket. Nothing has a name in a file system, so nothing is left behind by a process that was killed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace tidegate::ep {

// A file descriptor that is closed with its owner.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd();
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Memory of a window in this process.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, std::size_t bytes);
  Mapping(Mapping&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Zeros, sparse, and sealed: it cannot shrink under a reader.
Fd make_window(std::size_t bytes);

// Hands out a window. The name goes to the other ranks, who connect; the secret keeps strangers out.
class Doorway {
 public:
  Doorway();
  const std::string& name() const { return name_; }
  std::uint64_t secret() const { return secret_; }
  // Waits for one visitor, gives it the file, and returns its rank. -1: nobody came in time, or somebody else did.
  int serve(int window, int wait_milliseconds);

 private:
  std::string name_;
  std::uint64_t secret_ = 0;
  Fd listener_;
};

// The other side of a Doorway.
class Visit {
 public:
  // Knocks; does not wait for an answer. Throws Failure if nobody listens there.
  Visit(const std::string& name, std::uint64_t secret, int my_rank);
  Fd receive(int wait_milliseconds);  // the window, or an invalid Fd when none came in time
  // Becomes readable when the process behind the doorway is gone.
  Fd life() const;

 private:
  Fd socket_;
};

// Whether what Visit::life returned says that the process is gone.
bool is_gone(const Fd& life);

}  // namespace tidegate::ep
