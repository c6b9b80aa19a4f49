#include "base/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

namespace tidegate {
namespace {

constexpr std::size_t kAlign = 64;                   // a cache line
constexpr std::size_t kHuge = std::size_t{1} << 21;  // a huge page, and the smallest block
constexpr std::size_t kLimit = PTRDIFF_MAX / 2;      // sizes up to here can be rounded up without overflow

std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

struct Block {
  char* data;
  std::size_t size;
};

class Arena {
 public:
  ~Arena() {
    for (const Block& b : blocks_) {
      munmap(b.data, b.size);
    }
  }

  void* take(std::size_t n) {
    if (n > kLimit) {
      throw std::bad_alloc();
    }
    n = round_up(n, kAlign);
    while (block < blocks_.size() && blocks_[block].size - used < n) {
      ++block;
      used = 0;
    }
    if (block == blocks_.size()) {
      add(n);
    }
    void* p = blocks_[block].data + used;
    used += n;
    return p;
  }

  std::size_t capacity() const {
    std::size_t total = 0;
    for (const Block& b : blocks_) {
      total += b.size;
    }
    return total;
  }

  std::size_t block = 0;
  std::size_t used = 0;

 private:
  // As large as all blocks before it: a scope that grows from call to call makes few blocks, not one for each size.
  void add(std::size_t n) {
    const std::size_t size = std::max(round_up(n, kHuge), capacity());
    blocks_.reserve(blocks_.size() + 1);
    // One huge page too many, and the ends cut off: only an aligned block can consist of huge pages.
    void* p = mmap(nullptr, size + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
      throw std::bad_alloc();
    }
    char* mapped = static_cast<char*>(p);
    const std::size_t address = reinterpret_cast<std::uintptr_t>(p);
    const std::size_t head = round_up(address, kHuge) - address;
    if (head > 0) {
      munmap(mapped, head);
    }
    munmap(mapped + head + size, kHuge - head);
    madvise(mapped + head, size, MADV_HUGEPAGE);  // advice: nothing depends on it
    blocks_.push_back({mapped + head, size});
    used = 0;
  }

  std::vector<Block> blocks_;
};

Arena& arena() {
  thread_local Arena instance;
  return instance;
}

}  // namespace

Scratch::Scratch() : block_(arena().block), used_(arena().used) {}
Scratch::~Scratch() {
  arena().block = block_;
  arena().used = used_;
}
void* Scratch::bytes(std::size_t n) { return arena().take(n); }
float* Scratch::floats(std::int64_t n) {
  const auto count = static_cast<std::size_t>(n);  // a negative n becomes larger than any memory
  return static_cast<float*>(bytes(count > kLimit / sizeof(float) ? SIZE_MAX : count * sizeof(float)));
}

std::size_t arena_capacity() { return arena().capacity(); }

}  // namespace tidegate
