// For loops that the compiler is to vectorise. Includes nothing.

#pragma once

#define FDDP_INLINE inline __attribute__((always_inline))

// Iterations do not depend on each other even where source and target are the same memory.
#if defined(__clang__)
#define FDDP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define FDDP_INDEPENDENT _Pragma("GCC ivdep")
#endif
