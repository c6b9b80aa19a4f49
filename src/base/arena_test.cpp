#include "base/arena.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <thread>
#include <utility>

namespace tidegate {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::uintptr_t address(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

// A thread of its own has an arena of its own, empty at the start.
template <class F>
void in_new_thread(F&& f) {
  std::thread(std::forward<F>(f)).join();
}

TEST(Arena, EverySizeIsAlignedAndApart) {
  Scratch scratch;
  std::uintptr_t end = 0;
  for (const std::size_t n : {1u, 63u, 64u, 65u, 100u, 4096u, 5000u}) {
    void* p = scratch.bytes(n);
    EXPECT_EQ(address(p) % 64, 0u) << n;
    EXPECT_GE(address(p), end) << n;
    std::memset(p, 0xff, n);
    end = address(p) + n;
  }
  EXPECT_EQ(address(scratch.floats(3)) % 64, 0u);
  EXPECT_NE(scratch.bytes(0), nullptr);
}

TEST(Arena, ASecondScopeGetsTheSameAddresses) {
  in_new_thread([] {
    float* first[2];
    {
      Scratch scratch;
      first[0] = scratch.floats(1000);
      first[1] = scratch.floats(10);
    }
    const std::size_t held = arena_capacity();
    Scratch scratch;
    EXPECT_EQ(scratch.floats(1000), first[0]);
    EXPECT_EQ(scratch.floats(10), first[1]);
    EXPECT_EQ(arena_capacity(), held);
  });
}

TEST(Arena, AnInnerScopeGivesBackOnlyItsOwn) {
  in_new_thread([] {
    Scratch outer;
    float* a = outer.floats(100);
    a[0] = 1.0f;
    a[99] = 2.0f;
    float* b = nullptr;
    {
      Scratch inner;
      b = inner.floats(100);
      EXPECT_GE(address(b), address(a + 100));
      std::memset(b, 0xff, 100 * sizeof(float));
      Scratch innermost;
      EXPECT_GE(address(innermost.floats(1)), address(b + 100));
    }
    EXPECT_EQ(outer.floats(100), b);
    EXPECT_EQ(a[0], 1.0f);
    EXPECT_EQ(a[99], 2.0f);
  });
}

TEST(Arena, GrowthMovesNothing) {
  in_new_thread([] {
    Scratch outer;
    EXPECT_EQ(arena_capacity(), 0u);
    auto* small = static_cast<char*>(outer.bytes(100));
    std::memset(small, 7, 100);
    const std::size_t held = arena_capacity();
    EXPECT_GE(held, 100u);
    char* large = nullptr;
    {
      Scratch inner;
      large = static_cast<char*>(inner.bytes(3 * held));
      std::memset(large, 8, 3 * held);
      EXPECT_GE(arena_capacity(), 4 * held);
    }
    for (int i = 0; i < 100; ++i) {
      ASSERT_EQ(small[i], 7);
    }
    // Back in the first block: what is small still fits there, what is large finds its block again.
    EXPECT_EQ(address(outer.bytes(1)), address(small) + 128);
    EXPECT_EQ(outer.bytes(3 * held), large);
  });
}

TEST(Arena, PiecesThatFillABlockDoNotOverlap) {
  in_new_thread([] {
    Scratch scratch;
    constexpr std::size_t kPiece = kMiB + kMiB / 2;
    char* pieces[5];
    for (int i = 0; i < 5; ++i) {
      pieces[i] = static_cast<char*>(scratch.bytes(kPiece));
      std::memset(pieces[i], i, kPiece);
    }
    for (int i = 0; i < 5; ++i) {
      EXPECT_EQ(pieces[i][0], i);
      EXPECT_EQ(pieces[i][kPiece - 1], i);
    }
  });
}

TEST(Arena, RequestsThatGrowStepByStepDoNotPileUp) {
  in_new_thread([] {
    for (std::size_t n = kMiB; n <= 200 * kMiB; n += kMiB) {
      Scratch scratch;
      scratch.bytes(n);
    }
    EXPECT_GE(arena_capacity(), 200 * kMiB);
    EXPECT_LE(arena_capacity(), 800 * kMiB);
  });
}

TEST(Arena, BlocksStartOnAHugePage) {
  in_new_thread([] {
    Scratch scratch;
    EXPECT_EQ(address(scratch.bytes(1)) % (2 * kMiB), 0u);
    EXPECT_EQ(address(scratch.bytes(5 * kMiB)) % (2 * kMiB), 0u);
  });
}

TEST(Arena, ImpossibleSizesThrowAndLeaveTheArenaUsable) {
  in_new_thread([] {
    Scratch scratch;
    float* p = scratch.floats(16);
    p[15] = 3.0f;
    EXPECT_THROW(scratch.bytes(std::numeric_limits<std::size_t>::max()), std::bad_alloc);
    EXPECT_THROW(scratch.bytes(std::size_t{1} << 50), std::bad_alloc);
    EXPECT_THROW(scratch.floats(-1), std::bad_alloc);
    EXPECT_THROW(scratch.floats(std::numeric_limits<std::int64_t>::max()), std::bad_alloc);
    EXPECT_THROW(scratch.floats(std::int64_t{1} << 62), std::bad_alloc);  // 4 of it would wrap around to 0 bytes
    scratch.floats(16)[15] = 4.0f;
    EXPECT_EQ(p[15], 3.0f);
  });
}

TEST(Arena, ThreadsAreIndependent) {
  Scratch mine;
  float* a = mine.floats(1000);
  a[0] = 1.0f;
  const std::size_t held = arena_capacity();
  in_new_thread([a] {
    EXPECT_EQ(arena_capacity(), 0u);
    Scratch theirs;
    float* b = theirs.floats(8 << 20);
    EXPECT_TRUE(address(b + (8 << 20)) <= address(a) || address(a + 1000) <= address(b));
    b[0] = 2.0f;
  });
  EXPECT_EQ(arena_capacity(), held);
  EXPECT_EQ(a[0], 1.0f);
}

}  // namespace
}  // namespace tidegate
