// Loads and stores touch the bytes they are given and no other; the memory around them faults.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "simd_suite.h"

namespace tidegate {
namespace {

constexpr int kSize[kDataTypes] = {4, 2, 2};
constexpr int kMaxLanes = 16;

// A page of memory between two that may not be touched.
class GuardedPage {
 public:
  GuardedPage() : page_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {
    void* all = mmap(nullptr, 3 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED || mprotect(static_cast<char*>(all) + page_, page_, PROT_READ | PROT_WRITE) != 0) {
      ADD_FAILURE() << "no guarded memory";
      std::abort();
    }
    begin_ = static_cast<unsigned char*>(all) + page_;
  }
  ~GuardedPage() { munmap(begin_ - page_, 3 * page_); }
  GuardedPage(const GuardedPage&) = delete;
  GuardedPage& operator=(const GuardedPage&) = delete;

  unsigned char* begin() const { return begin_; }
  unsigned char* end() const { return begin_ + page_; }

 private:
  std::size_t page_;
  unsigned char* begin_ = nullptr;
};

class SimdMemory : public SimdSuite {};

TEST_P(SimdMemory, PartialLoadsTouchOnlyTheirElements) {
  const GuardedPage page;
  for (int type = 0; type < kDataTypes; ++type) {
    for (int n = 0; n <= probe.lanes; ++n) {
      for (unsigned char* p : {page.begin(), page.end() - n * kSize[type]}) {
        std::vector<float> values(kMaxLanes, 0.0f);
        std::vector<unsigned char> stored(kMaxLanes * 4);
        for (int i = 0; i < n; ++i) {
          values[i] = static_cast<float>(i + 1);
        }
        probe.store[type](stored.data(), values.data(), probe.lanes);
        std::memcpy(p, stored.data(), static_cast<std::size_t>(n * kSize[type]));
        std::vector<float> out(kMaxLanes, 0.0f);
        probe.load_n[type](p, out.data(), n);
        EXPECT_EQ(out, values) << "type " << type << ", n " << n;
        std::fill_n(p, n * kSize[type], 0xff);
      }
    }
  }
}

TEST_P(SimdMemory, PartialStoresTouchOnlyTheirElements) {
  const GuardedPage page;
  constexpr int kApart = 128;  // bytes that must keep their value on the open side
  for (int type = 0; type < kDataTypes; ++type) {
    for (int n = 0; n <= probe.lanes; ++n) {
      std::vector<float> values(kMaxLanes);
      for (int i = 0; i < kMaxLanes; ++i) {
        values[i] = static_cast<float>(i + 1);
      }
      std::vector<unsigned char> expected(kMaxLanes * 4);
      probe.store[type](expected.data(), values.data(), probe.lanes);
      const int size = n * kSize[type];

      std::fill(page.begin(), page.end(), 0xa5);
      unsigned char* last = page.end() - size;
      probe.store_n[type](page.begin(), values.data(), n);
      probe.store_n[type](last, values.data(), n);
      EXPECT_EQ(std::memcmp(page.begin(), expected.data(), static_cast<std::size_t>(size)), 0);
      EXPECT_EQ(std::memcmp(last, expected.data(), static_cast<std::size_t>(size)), 0);
      const auto untouched = [](unsigned char byte) { return byte == 0xa5; };
      EXPECT_TRUE(std::all_of(page.begin() + size, page.begin() + size + kApart, untouched)) << type << ", " << n;
      EXPECT_TRUE(std::all_of(last - kApart, last, untouched)) << type << ", " << n;
    }
  }
}

TEST_P(SimdMemory, WholeLoadsAndStoresStayInside) {
  const GuardedPage page;
  const std::vector<float> values(kMaxLanes, 3.0f);
  for (int type = 0; type < kDataTypes; ++type) {
    for (unsigned char* p : {page.begin(), page.end() - probe.lanes * kSize[type]}) {
      std::vector<float> out(kMaxLanes, 3.0f);
      std::fill(page.begin(), page.end(), 0);
      probe.store[type](p, values.data(), probe.lanes);
      probe.load[type](p, out.data(), probe.lanes);
      EXPECT_EQ(out, values);
      std::fill(page.begin(), page.end(), 0);
      probe.stream[type](p, values.data(), probe.lanes);
      probe.load[type](p, out.data(), probe.lanes);
      EXPECT_EQ(out, values);
    }
  }
}

TIDEGATE_EVERY_ISA(SimdMemory);

}  // namespace
}  // namespace tidegate
