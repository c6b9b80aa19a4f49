// Scratch memory of one thread, reused from call to call.
//
//   Scratch scratch;                                  // everything below is given back when it goes out of scope
//   float* row = scratch.floats(n);                   // 64-byte aligned, not initialised
//
// Blocks are never returned to the system while the thread lives: page faults on fresh buffers cost several times what
// the arithmetic costs. Large blocks ask for huge pages.
//
// A scope belongs to the thread that made it, and only a thread's innermost scope may take memory: what an outer one
// took meanwhile would be given back with the inner one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tidegate {

class Scratch {
 public:
  Scratch();
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* bytes(std::size_t n);  // these throw std::bad_alloc, also for sizes that no memory could have
  float* floats(std::int64_t n);

 private:
  std::size_t block_;  // where the thread's arena stood when this scope began
  std::size_t used_;
};

// Bytes that the calling thread's arena holds.
std::size_t arena_capacity();

}  // namespace tidegate
