// What a machine can do at best: the loops that kernel.cpp compiles for each instruction set.
#pragma once

#include <stdint.h>

namespace tidegate {

// Runs `steps` steps on registers and a few cached bytes and returns the operations done (a multiply-add is two). Part
// of the result goes to *sink, so that nothing can be left out.
using ComputeLoop = int64_t (*)(int64_t steps, float* sink);

struct LimitLoops {
  ComputeLoop fp32_fma;
  ComputeLoop bf16_dot;   // one operand in registers, one from L1; widened to fp32 where there is no bf16 instruction
  ComputeLoop int8_dot;   // u8 x s8 into int32: multiply and add pairs twice, then add; null in the scalar build
  ComputeLoop int8_vnni;  // the same as one vpdpbusd; null without AVX-512, and the CPU must be asked for VNNI
  bool bf16_instruction;

  // Memory loops over n floats at 64-byte aligned addresses, n a multiple of 128.
  void (*read)(const float* x, int64_t n, float* sink);
  void (*read_modify_write)(float* x, int64_t n);
  void (*copy)(const float* x, float* y, int64_t n);
  void (*stream_copy)(const float* x, float* y, int64_t n);  // stores past the caches
};

}  // namespace tidegate
