// Macros for vectorised loops. No includes.

#pragma once

#define FDDP_INLINE inline __attribute__((always_inline))

// Marks a loop whose iterations are independent, even if source and target are the same memory.
#if defined(__clang__)
#define FDDP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define FDDP_INDEPENDENT _Pragma("GCC ivdep")
#endif
