// Macros for vectorised loops. No includes.

#pragma once

#define FDDP_INLINE inline __attribute__((always_inline))

// FDDP_INDEPENDENT marks a loop whose iterations are independent, even if source and target are the same memory.
// FDDP_ROLLED marks one whose values leave the registers if it is unrolled.
#if defined(__clang__)
#define FDDP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define FDDP_ROLLED _Pragma("clang loop unroll(disable)")
#else
#define FDDP_INDEPENDENT _Pragma("GCC ivdep")
#define FDDP_ROLLED _Pragma("GCC unroll 1")
#endif
