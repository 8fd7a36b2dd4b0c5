// Access to the numbers of a tensor in the type in which they are combined.

#pragma once

#include "../tensor/loops.h"
#include "half.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace fddp::shm {

// `Wide` is the type of sums: integers wrap around, float16 and bfloat16 are accumulated in float.
template <class T>
struct Traits {
  using Wide = typename std::conditional_t<
      std::is_integral_v<T>, std::make_unsigned<T>, std::type_identity<T>>::type;
  static FDDP_INLINE Wide read(T value) {
    return static_cast<Wide>(value);
  }
  static FDDP_INLINE void write(Wide value, T& target) {
    target = static_cast<T>(value);
  }
};

template <class H>
struct HalfTraits {
  using Wide = float;
  static FDDP_INLINE float read(H value) {
    return widen(value);
  }
  static FDDP_INLINE void write(float value, H& target) {
    narrow(value, target);
  }
};
template <>
struct Traits<Half> : HalfTraits<Half> {};
template <>
struct Traits<BFloat16> : HalfTraits<BFloat16> {};

// Return `size` numbers from memory of any alignment.
template <class T>
FDDP_INLINE const T* load_numbers(const char* source, int64_t begin, int64_t size, T* scratch) {
  const char* from = source + begin * static_cast<int64_t>(sizeof(T));
  if (reinterpret_cast<uintptr_t>(from) % alignof(T) == 0) return reinterpret_cast<const T*>(from);
  std::memcpy(scratch, from, static_cast<size_t>(size) * sizeof(T));
  return scratch;
}

}  // namespace fddp::shm
