#include "tidegate/cpu.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tidegate/error.h"

namespace tidegate {
namespace {

std::string valid_names() {
  std::string list;
  for (const Isa isa : available_isas()) {
    list += (list.empty() ? "" : ", ") + std::string(isa_name(isa));
  }
  return list;
}

std::string set_isa_error(std::string_view name) {
  try {
    set_isa(name);
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

// The first of those this CPU or build cannot run; kScalar if it can run all of them.
Isa unavailable() {
  const std::vector<Isa> list = available_isas();
  for (int i = 0; i < kIsaCount; ++i) {
    if (std::find(list.begin(), list.end(), static_cast<Isa>(i)) == list.end()) {
      return static_cast<Isa>(i);
    }
  }
  return Isa::kScalar;
}

class CpuTest : public testing::Test {
 protected:
  void TearDown() override { set_isa(before_); }
  const Isa before_ = active_isa();
};

TEST(CpuNames, OneWordPerIsa) {
  EXPECT_EQ(isa_name(Isa::kScalar), "scalar");
  EXPECT_EQ(isa_name(Isa::kAvx2), "avx2");
  EXPECT_EQ(isa_name(Isa::kAvx512), "avx512");
  EXPECT_EQ(isa_name(Isa::kAvx512Bf16), "avx512_bf16");
  EXPECT_EQ(isa_name(static_cast<Isa>(kIsaCount)), "unknown");
}

TEST_F(CpuTest, AvailableStartsWithScalarAndAscends) {
  const std::vector<Isa> list = available_isas();
  ASSERT_FALSE(list.empty());
  EXPECT_EQ(list.front(), Isa::kScalar);
  EXPECT_TRUE(std::is_sorted(list.begin(), list.end()));
  EXPECT_NE(std::find(list.begin(), list.end(), before_), list.end());
}

TEST_F(CpuTest, EveryAvailableIsaCanBeChosen) {
  for (const Isa isa : available_isas()) {
    set_isa(isa);
    EXPECT_EQ(active_isa(), isa);
    set_isa("scalar");
    EXPECT_EQ(active_isa(), Isa::kScalar);
    set_isa(isa_name(isa));
    EXPECT_EQ(active_isa(), isa);
  }
}

TEST_F(CpuTest, UnknownNamesAreRejectedAndChangeNothing) {
  for (const std::string name : {"sse9", "AVX2", "avx2 ", "avx", ""}) {
    EXPECT_EQ(set_isa_error(name), "set_isa: expected one of " + valid_names() + ", got " + name);
  }
  EXPECT_THROW(set_isa(static_cast<Isa>(kIsaCount)), Error);
  EXPECT_EQ(active_isa(), before_);
}

TEST_F(CpuTest, UnsupportedNamesAreRejectedAndChangeNothing) {
  const Isa isa = unavailable();
  if (isa == Isa::kScalar) {
    GTEST_SKIP() << "this CPU runs every instruction set of this build";
  }
  const std::string name(isa_name(isa));
  EXPECT_EQ(set_isa_error(name),
            "set_isa: expected one of " + valid_names() + " (what this CPU supports), got " + name);
  EXPECT_THROW(set_isa(isa), Error);
  EXPECT_EQ(active_isa(), before_);
}

// The variable is read once in a process, so these run in a fresh one: 0 to 3 = the active ISA, 9 = an Error on stderr.
class CpuEnvironmentDeathTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  void TearDown() override { had_ ? setenv("TIDEGATE_ISA", before_.c_str(), 1) : unsetenv("TIDEGATE_ISA"); }
  [[noreturn]] static void report_active_isa() {
    try {
      std::_Exit(static_cast<int>(active_isa()));
    } catch (const Error& e) {
      std::fputs(e.what(), stderr);
      std::_Exit(9);
    }
  }
  const bool had_ = std::getenv("TIDEGATE_ISA") != nullptr;
  const std::string before_ = had_ ? std::getenv("TIDEGATE_ISA") : "";
};

TEST_F(CpuEnvironmentDeathTest, NamesTheIsa) {
  for (const Isa isa : available_isas()) {
    setenv("TIDEGATE_ISA", std::string(isa_name(isa)).c_str(), 1);
    EXPECT_EXIT(report_active_isa(), testing::ExitedWithCode(static_cast<int>(isa)), "");
  }
}

TEST_F(CpuEnvironmentDeathTest, UnsetOrEmptyMeansTheBest) {
  const int best = static_cast<int>(available_isas().back());
  unsetenv("TIDEGATE_ISA");
  EXPECT_EXIT(report_active_isa(), testing::ExitedWithCode(best), "");
  setenv("TIDEGATE_ISA", "", 1);
  EXPECT_EXIT(report_active_isa(), testing::ExitedWithCode(best), "");
}

TEST_F(CpuEnvironmentDeathTest, UnknownIsAnErrorThatListsTheValidNames) {
  setenv("TIDEGATE_ISA", "sse9", 1);
  EXPECT_EXIT(report_active_isa(), testing::ExitedWithCode(9),
              "TIDEGATE_ISA: expected one of " + valid_names() + ", got sse9");
}

}  // namespace
}  // namespace tidegate
