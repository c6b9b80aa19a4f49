// A test suite that runs once for every instruction set of this machine, with the vocabulary's functions for it.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "simd/probe.h"
#include "tidegate/cpu.h"

namespace tidegate {

// Sanitizers and debug builds take samples of what others test exhaustively.
#if defined(NDEBUG) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
inline constexpr bool kFastBuild = true;
#else
inline constexpr bool kFastBuild = false;
#endif

class SimdSuite : public testing::TestWithParam<Isa> {
 protected:
  const SimdProbe& probe = simd_probe_for(GetParam());
};

inline std::string isa_of(const testing::TestParamInfo<Isa>& info) { return std::string(isa_name(info.param)); }

#define TIDEGATE_EVERY_ISA(Suite) INSTANTIATE_TEST_SUITE_P(Isa, Suite, testing::ValuesIn(available_isas()), isa_of)

}  // namespace tidegate
