#include "reductions.h"

#include "numbers.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace fddp::shm {
namespace {

// Numbers per tile, which stays in cache while all ranks' numbers are combined.
constexpr int64_t kReducedTile = 1024;

// Type in which numbers are combined: that of the numbers, or float for 16-bit numbers.
template <class T>
using Combined = std::conditional_t<std::is_arithmetic_v<T>, T, float>;

struct Product {
  template <class T>
  static FDDP_INLINE T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    } else {
      return a * b;
    }
  }
};

// A comparison with itself is false for NaN.
struct Min {
  template <class T>
  static FDDP_INLINE T apply(T a, T b) {
    return a < b || !(a == a) ? a : b;
  }
};

struct Max {
  template <class T>
  static FDDP_INLINE T apply(T a, T b) {
    return a > b || !(a == a) ? a : b;
  }
};

struct And {
  template <class T>
  static FDDP_INLINE T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct Or {
  template <class T>
  static FDDP_INLINE T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct Xor {
  template <class T>
  static FDDP_INLINE T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

template <class T>
FDDP_INLINE Combined<T> read(T number) {
  if constexpr (std::is_arithmetic_v<T>) {
    return number;
  } else {
    return widen(number);
  }
}

template <class T>
FDDP_INLINE void write(Combined<T> number, T& target) {
  if constexpr (std::is_arithmetic_v<T>) {
    target = number;
  } else {
    narrow(number, target);
  }
}

template <class T, class Operator>
void reduce_tiles(const SumBuffers& buffers, int64_t begin, int64_t count) {
  Combined<T> total[kReducedTile];
  T scratch[kReducedTile];
  for (int64_t done = 0; done < count; done += kReducedTile) {
    const int64_t first = begin + done;
    const int64_t size = std::min(kReducedTile, count - done);
    for (size_t s = 0; s < buffers.n_sources; ++s) {
      const T* source = load_numbers(buffers.sources[s], first, size, scratch);
      for (int64_t i = 0; i < size; ++i) {
        const Combined<T> number = read(source[i]);
        total[i] = s == 0 ? number : Operator::apply(total[i], number);
      }
    }
    for (int64_t i = 0; i < size; ++i) write(total[i], scratch[i]);
    for (size_t t = 0; t < buffers.n_targets; ++t) {
      char* to = buffers.targets[t] + first * static_cast<int64_t>(sizeof(T));
      std::memcpy(to, scratch, static_cast<size_t>(size) * sizeof(T));
    }
  }
}

template <class T>
void reduce_numbers(
    Reduction reduction, const SumBuffers& buffers, int64_t begin, int64_t count) {
  switch (reduction) {
    case Reduction::kProduct:
      return reduce_tiles<T, Product>(buffers, begin, count);
    case Reduction::kMin:
      return reduce_tiles<T, Min>(buffers, begin, count);
    case Reduction::kMax:
      return reduce_tiles<T, Max>(buffers, begin, count);
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (reduction) {
      case Reduction::kAnd:
        return reduce_tiles<T, And>(buffers, begin, count);
      case Reduction::kOr:
        return reduce_tiles<T, Or>(buffers, begin, count);
      case Reduction::kXor:
        return reduce_tiles<T, Xor>(buffers, begin, count);
      default:
        return;
    }
  }
}

}  // namespace

void reduce(
    Reduction reduction, NumberType type, const SumBuffers& buffers, int64_t begin, int64_t count) {
  if (count <= 0 || buffers.n_targets == 0) return;
  switch (type) {
    case NumberType::kF64:
      return reduce_numbers<double>(reduction, buffers, begin, count);
    case NumberType::kF32:
      return reduce_numbers<float>(reduction, buffers, begin, count);
    case NumberType::kF16:
      return reduce_numbers<Half>(reduction, buffers, begin, count);
    case NumberType::kBF16:
      return reduce_numbers<BFloat16>(reduction, buffers, begin, count);
    case NumberType::kU8:
      return reduce_numbers<uint8_t>(reduction, buffers, begin, count);
    case NumberType::kI8:
      return reduce_numbers<int8_t>(reduction, buffers, begin, count);
    case NumberType::kI32:
      return reduce_numbers<int32_t>(reduction, buffers, begin, count);
    case NumberType::kI64:
      return reduce_numbers<int64_t>(reduction, buffers, begin, count);
    case NumberType::kOpaque:
      return;
  }
}

}  // namespace fddp::shm
