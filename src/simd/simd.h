// The vector vocabulary of the instruction set that this file is being compiled for.
//
// A kernel.cpp is compiled once per instruction set with -DTIDEGATE_ISA=<name>; everything it defines stands in
// namespace tidegate::TIDEGATE_ISA, so that the linker cannot pick code compiled for a newer CPU for an older one.
//
//   F32              kLanes floats            load, store      from and to float, bf16, f16 memory (stores round to
//   Mask             kLanes truth values                       nearest even); load_n, store_n touch n elements only
//   Bf16Pairs        2*kLanes bf16            stream           a store that does not fill the caches
//   + - * /, fma, min, max (b on NaN), abs, sqrt, round (|a| < 2^22, the sign of 0 is free), select, less, equal
//   sum (fixed order), dot (of pairs), scale_by_power, over_one_plus; exp, sigmoid, silu, softplus in math.h
#pragma once

#include "simd/types.h"

#define TIDEGATE_CONCAT_(a, b) a##b
#define TIDEGATE_CONCAT(a, b) TIDEGATE_CONCAT_(a, b)
#define TIDEGATE_ID_scalar 1
#define TIDEGATE_ID_avx2 2
#define TIDEGATE_ID_avx512 3
#define TIDEGATE_ID_avx512_bf16 4
#define TIDEGATE_ISA_ID TIDEGATE_CONCAT(TIDEGATE_ID_, TIDEGATE_ISA)

// Always inlined, or a debug build would turn every word of the vocabulary into a call.
#define TIDEGATE_INLINE [[gnu::always_inline]] static inline

#if TIDEGATE_ISA_ID == 1
#include "simd/scalar.h"
#elif TIDEGATE_ISA_ID == 2
#include "simd/avx2.h"
#else
#include "simd/avx512.h"
#endif
#include "simd/math.h"
