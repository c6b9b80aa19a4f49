// Which instruction sets this CPU has, and which one the kernels use.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tidegate/isa.h"

namespace tidegate {

std::string_view isa_name(Isa isa);  // "scalar", "avx2", "avx512", "avx512_bf16"

// Instruction sets that this CPU and this build can run, in the order of the enum. Never empty.
std::vector<Isa> available_isas();

// The instruction set in use: the best available one, or the one named by the environment variable TIDEGATE_ISA.
// Throws Error when that variable holds an unknown or an unsupported name; the message lists the valid ones.
Isa active_isa();

// Overrides the choice (tests and benchmarks run every instruction set in one process).
void set_isa(Isa isa);
void set_isa(std::string_view name);

}  // namespace tidegate
