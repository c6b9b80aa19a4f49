// The instruction sets that kernels are compiled for. Apart from cpu.h because kernel files include nothing of C++'s
// library.
#pragma once

#include <stdint.h>

namespace tidegate {

// Ordered from plain to best; one word everywhere: namespace, CMake key, environment value, test name.
enum class Isa : uint8_t { kScalar, kAvx2, kAvx512, kAvx512Bf16 };
inline constexpr int kIsaCount = 4;

}  // namespace tidegate
