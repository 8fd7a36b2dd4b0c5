// Number types of tensors, for reductions in shared memory.

#pragma once

#include "../shm/sums.h"

#include <c10/core/ScalarType.h>

namespace fddp {

// Return the type of the numbers in a tensor; complex numbers are pairs of them. Return kOpaque for
// dtypes that cannot be summed.
inline shm::NumberType number_type_of(at::ScalarType dtype) {
  if (dtype == at::kComplexHalf) return shm::NumberType::kOpaque;
  switch (c10::toRealValueType(dtype)) {
    case at::kDouble:
      return shm::NumberType::kF64;
    case at::kFloat:
      return shm::NumberType::kF32;
    case at::kHalf:
      return shm::NumberType::kF16;
    case at::kBFloat16:
      return shm::NumberType::kBF16;
    case at::kByte:
      return shm::NumberType::kU8;
    case at::kChar:
      return shm::NumberType::kI8;
    case at::kInt:
      return shm::NumberType::kI32;
    case at::kLong:
      return shm::NumberType::kI64;
    default:
      return shm::NumberType::kOpaque;
  }
}

}  // namespace fddp
