// Element-wise reductions over ranks other than sums: extrema, products and bitwise operations.

#pragma once

#include "sums.h"

#include <cstdint>

namespace fddp::shm {

enum class Reduction : uint32_t { kSum, kAverage, kProduct, kMin, kMax, kAnd, kOr, kXor };
inline constexpr uint32_t kReductionCount = 8;

// Return true if `sum` computes the reduction.
constexpr bool is_sum(Reduction reduction) {
  return reduction == Reduction::kSum || reduction == Reduction::kAverage;
}

// Return true if the reduction is defined for numbers of this type: averages of floating-point
// numbers, bitwise operations on integers, and all others on both.
constexpr bool is_defined(Reduction reduction, NumberType type) {
  const bool floating = type <= NumberType::kBF16;
  if (type == NumberType::kOpaque) return false;
  if (reduction == Reduction::kAverage) return floating;
  return reduction < Reduction::kAnd || !floating;
}

// Combine the numbers [begin, begin + count) of all sources in rank order and write the result to
// the same positions of all targets. The minimum and maximum of numbers with a NaN are NaN. A
// product of float16 or bfloat16 is computed in float and rounded once; products of integers wrap
// around.
void reduce(
    Reduction reduction, NumberType type, const SumBuffers& buffers, int64_t begin, int64_t count);

}  // namespace fddp::shm
