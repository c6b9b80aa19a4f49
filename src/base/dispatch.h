// From an operator's table of kernels to the one for an instruction set.
#pragma once

#include "tidegate/isa.h"

// Declares `name` in every ISA namespace (kernel.cpp defines it there) and a function name_for(isa) that picks one.
#define TIDEGATE_KERNEL_TABLE(Table, name)  \
  namespace tidegate {                      \
  namespace scalar {                        \
  extern const Table name;                  \
  }                                         \
  namespace avx2 {                          \
  extern const Table name;                  \
  }                                         \
  namespace avx512 {                        \
  extern const Table name;                  \
  }                                         \
  namespace avx512_bf16 {                   \
  extern const Table name;                  \
  }                                         \
  inline const Table& name##_for(Isa isa) { \
    switch (isa) {                          \
      case Isa::kAvx2:                      \
        return avx2::name;                  \
      case Isa::kAvx512:                    \
        return avx512::name;                \
      case Isa::kAvx512Bf16:                \
        return avx512_bf16::name;           \
      default:                              \
        return scalar::name;                \
    }                                       \
  }                                         \
  }

namespace tidegate {

// Kernel tables are indexed by data type: float, bf16, f16. (fp64 goes to the reference.)
inline constexpr int kDataTypes = 3;

}  // namespace tidegate
