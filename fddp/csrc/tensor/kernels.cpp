#include "kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "loops.h"

// The loops below are written for auto-vectorisation. Each is compiled once per instruction set and
// selected at run time, so that a binary runs on any machine.
#if defined(__x86_64__)
#define FDDP_AVX2 __attribute__((target("avx2")))
#endif

namespace fddp {
namespace {

// Type in which values are scaled between Source and Target.
template <class Source, class Target>
using Arithmetic = std::
    conditional_t<std::is_same_v<Source, double> || std::is_same_v<Target, double>, double, float>;

// Return one if the exponent is all ones (NaN or infinity), else zero. Operates on the bits,
// because an OR of the results vectorises, unlike a floating-point test with an early exit.
FDDP_INLINE uint32_t nonfinite(float value) {
  constexpr uint32_t kExponent = 0x7f800000;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return (bits & kExponent) == kExponent;
}
FDDP_INLINE uint64_t nonfinite(double value) {
  constexpr uint64_t kExponent = 0x7ff0000000000000;
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return (bits & kExponent) == kExponent;
}

// Return the magnitude as an integer that orders the same way, with NaN last. The maximum of such
// integers vectorises, unlike a floating-point maximum that propagates NaN.
FDDP_INLINE int32_t abs_bits(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x7fffffff;
}
FDDP_INLINE int64_t abs_bits(double value) {
  int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x7fffffffffffffff;
}

template <class Value, class Bits>
FDDP_INLINE double from_abs_bits(Bits bits) {
  Value value;
  std::memcpy(&value, &bits, sizeof value);
  return std::isnan(value) ? std::numeric_limits<double>::infinity() : static_cast<double>(value);
}

struct Write {
  template <class Target, class Value>
  static FDDP_INLINE void store(Target& target, Value value) {
    target = static_cast<Target>(value);
  }
};

struct Add {
  template <class Target, class Value>
  static FDDP_INLINE void store(Target& target, Value value) {
    const auto rounded = static_cast<Target>(value);
    target = static_cast<Target>(static_cast<Value>(target) + static_cast<Value>(rounded));
  }
};

struct Discard {
  template <class Target, class Value>
  static FDDP_INLINE void store(Target&, Value) {}
};

template <class Source, class Target, class Store>
struct CopyLoop {
  static FDDP_INLINE Copied run(const void* from, void* to, int64_t count, double scale) {
    using Value = Arithmetic<Source, Target>;
    const auto* const source = static_cast<const Source*>(from);
    auto* const target = static_cast<Target*>(to);
    const auto factor = static_cast<Value>(scale);
    decltype(abs_bits(factor)) max_bits = 0;
    FDDP_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
      const auto value = static_cast<Value>(source[i]);
      max_bits = std::max(max_bits, abs_bits(value));
      Store::store(target[i], value * factor);
    }
    return {from_abs_bits<Value>(max_bits), 0};
  }
};

template <class T>
FDDP_INLINE bool all_finite(const T* values, int64_t count) {
  using Value = Arithmetic<T, T>;
  decltype(nonfinite(Value())) bad = 0;
  for (int64_t i = 0; i < count; ++i) bad |= nonfinite(static_cast<Value>(values[i]));
  return bad == 0;
}

// A non-finite sum of squares has one of two causes: a non-finite value, or overflow of the
// squares.
template <class T>
FDDP_INLINE Stats stats_of(double sq_norm, const T* values, int64_t count) {
  return {sq_norm, std::isfinite(sq_norm) || all_finite(values, count)};
}

// Sum of squares in sixteen lanes, which are added at the end. The order of additions is fixed and
// does not depend on the vector width of the machine.
template <class T>
class SquareSum {
 public:
  static constexpr int64_t kLanes = 16;
  static constexpr int64_t kBlock = 256;  // longest range of one call; a multiple of kLanes

  // All calls but the last pass a multiple of kLanes values.
  FDDP_INLINE void add(const T* values, int64_t count) {
    const int64_t whole = count / kLanes * kLanes;
    if constexpr (std::is_same_v<T, Value>) {
      add_lanes(values, whole);
    } else {
      Value wide[kBlock];
      for (int64_t i = 0; i < whole; ++i) wide[i] = static_cast<Value>(values[i]);
      add_lanes(wide, whole);
    }
    if (whole == count) return;
    Value rest[kLanes] = {};
    std::copy(values + whole, values + count, rest);
    add_lanes(rest, kLanes);
  }

  FDDP_INLINE double total() const {
    const Doubles lanes = (sums_[0] + sums_[1]) + (sums_[2] + sums_[3]);
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  }

 private:
  static constexpr int64_t kWidth = 4;
  using Value = Arithmetic<T, T>;
  using Values [[gnu::vector_size(kWidth * sizeof(Value))]] = Value;
  using Doubles [[gnu::vector_size(kWidth * sizeof(double))]] = double;

  FDDP_INLINE void add_lanes(const Value* values, int64_t count) {
    // In variables of their own, as a compiler may keep an array in memory.
    Doubles s0 = sums_[0], s1 = sums_[1], s2 = sums_[2], s3 = sums_[3];
    for (int64_t i = 0; i < count; i += kLanes) {
      add_squares(s0, values + i);
      add_squares(s1, values + i + kWidth);
      add_squares(s2, values + i + 2 * kWidth);
      add_squares(s3, values + i + 3 * kWidth);
    }
    sums_[0] = s0, sums_[1] = s1, sums_[2] = s2, sums_[3] = s3;
  }

  static FDDP_INLINE void add_squares(Doubles& sum, const Value* values) {
    Values part;
    std::memcpy(&part, values, sizeof part);
    const auto wide = __builtin_convertvector(part, Doubles);
    sum += wide * wide;
  }

  Doubles sums_[kLanes / kWidth] = {};
};

template <class Source, class Target>
struct StatsLoop {
  static FDDP_INLINE Stats run(const void* from, void* to, int64_t count, double scale) {
    constexpr int64_t kBlock = SquareSum<Target>::kBlock;
    const auto* const source = static_cast<const Source*>(from);
    auto* const target = static_cast<Target*>(to);
    SquareSum<Target> sum;
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      const int64_t size = std::min(kBlock, count - begin);
      CopyLoop<Source, Target, Write>::run(source + begin, target + begin, size, scale);
      sum.add(target + begin, size);
    }
    return stats_of(sum.total(), target, count);
  }
};

// Lanes in which the squares of a block are summed in float, as conversion to double takes as long as
// the copy itself. They do not depend on the vector width of the machine.
class FloatLanes {
 public:
  static constexpr int64_t kWidth = 8;
  static constexpr int64_t kLanes = 4 * kWidth;
  using Floats [[gnu::vector_size(kWidth * sizeof(float))]] = float;

  // Sum the squares of `count` values, a multiple of kLanes. `next(i, values)` gives those from i on.
  template <class Next>
  static FDDP_INLINE float sum_squares(int64_t count, const Next& next) {
    Floats s0 = {}, s1 = {}, s2 = {}, s3 = {};
    FDDP_ROLLED
    for (int64_t i = 0; i < count; i += kLanes) {
      Floats p0, p1, p2, p3;
      next(i, p0);
      next(i + kWidth, p1);
      next(i + 2 * kWidth, p2);
      next(i + 3 * kWidth, p3);
      s0 += p0 * p0, s1 += p1 * p1, s2 += p2 * p2, s3 += p3 * p3;
    }
    const Floats lanes = (s0 + s1) + (s2 + s3);
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
  }
};

// Return the sum of squares of a block of at most SquareSum<T>::kBlock values, of which that in
// FloatLanes is `sum`: the relative error is at most 2^-20, as a block whose squares leave the range
// of float is summed again.
template <class T>
FDDP_INLINE double checked_squares(float sum, const T* values, int64_t count) {
  // Squares below the least normal number lose bits, or are flushed to zero.
  constexpr float kLeast =
      SquareSum<T>::kBlock * std::numeric_limits<float>::min() / std::numeric_limits<float>::epsilon();
  if (sum >= kLeast && sum <= std::numeric_limits<float>::max()) return sum;
  SquareSum<T> exact;
  exact.add(values, count);
  return exact.total();
}

template <class T>
FDDP_INLINE double block_squares(const T* values, int64_t count) {
  if constexpr (std::is_same_v<T, double>) {
    SquareSum<T> sum;
    sum.add(values, count);
    return sum.total();
  } else {
    float wide[SquareSum<T>::kBlock];
    for (int64_t i = 0; i < count; ++i) wide[i] = static_cast<float>(values[i]);
    int64_t padded = count;
    while (padded % FloatLanes::kLanes != 0) wide[padded++] = 0;
    const float sum = FloatLanes::sum_squares(padded, [&wide](int64_t i, FloatLanes::Floats& next) {
      std::memcpy(&next, wide + i, sizeof next);
    });
    return checked_squares(sum, values, count);
  }
}

// Copy and sum the squares of a whole block of floats in one pass.
template <class Store>
FDDP_INLINE Copied copy_block(const float* source, float* target, float factor) {
  constexpr int64_t kBlock = SquareSum<float>::kBlock;
  using Bits [[gnu::vector_size(sizeof(FloatLanes::Floats))]] = int32_t;
  Bits max_bits = {};
  const float sum = FloatLanes::sum_squares(kBlock, [&](int64_t i, FloatLanes::Floats& next) {
    std::memcpy(&next, source + i, sizeof next);
    Bits bits;
    std::memcpy(&bits, &next, sizeof bits);
    bits &= 0x7fffffff;  // as in abs_bits
    max_bits = bits > max_bits ? bits : max_bits;
    next *= factor;
    if constexpr (std::is_same_v<Store, Add>) {
      FloatLanes::Floats earlier;
      std::memcpy(&earlier, target + i, sizeof earlier);
      next += earlier;
    }
    if constexpr (!std::is_same_v<Store, Discard>) std::memcpy(target + i, &next, sizeof next);
  });
  int32_t peak = 0;
  for (int64_t lane = 0; lane < FloatLanes::kWidth; ++lane) peak = std::max(peak, max_bits[lane]);
  return {from_abs_bits<float>(peak), checked_squares(sum, target, kBlock)};
}

// CopyLoop that also sums squares, of blocks that are in the cache.
template <class Source, class Target, class Store>
struct SquaresLoop {
  static FDDP_INLINE Copied run(const void* from, void* to, int64_t count, double scale) {
    constexpr int64_t kBlock = SquareSum<Target>::kBlock;
    const auto* const source = static_cast<const Source*>(from);
    auto* const target = static_cast<Target*>(to);
    Copied found;
    const auto note = [&found](const Copied& copied) {
      found.amax = std::max(found.amax, copied.amax);
      found.sq_norm += copied.sq_norm;
    };
    int64_t begin = 0;
    if constexpr (std::is_same_v<Source, float> && std::is_same_v<Target, float>) {
      const auto factor = static_cast<float>(scale);
      for (; begin + kBlock <= count; begin += kBlock) note(copy_block<Store>(source + begin, target + begin, factor));
    }
    for (; begin < count; begin += kBlock) {
      const int64_t size = std::min(kBlock, count - begin);
      Copied copied = CopyLoop<Source, Target, Store>::run(source + begin, target + begin, size, scale);
      copied.sq_norm = block_squares(target + begin, size);
      note(copied);
    }
    return found;
  }
};

template <class T>
struct StatsOnlyLoop {
  static FDDP_INLINE Stats run(const void* from, void*, int64_t count, double) {
    constexpr int64_t kBlock = SquareSum<T>::kBlock;
    const auto* const values = static_cast<const T*>(from);
    SquareSum<T> sum;
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      sum.add(values + begin, std::min(kBlock, count - begin));
    }
    return stats_of(sum.total(), values, count);
  }
};

template <class T>
struct ZeroLoop {
  static FDDP_INLINE Copied run(const void*, void* to, int64_t count, double) {
    std::memset(to, 0, static_cast<size_t>(count) * sizeof(T));
    return {};
  }
};

template <class Loop>
using Kernel = decltype(&Loop::run);

template <class Loop>
auto run_baseline(const void* from, void* to, int64_t count, double scale) {
  return Loop::run(from, to, count, scale);
}

#if defined(__x86_64__)
template <class Loop>
FDDP_AVX2 auto run_avx2(const void* from, void* to, int64_t count, double scale) {
  return Loop::run(from, to, count, scale);
}
#endif

template <class Loop>
Kernel<Loop> kernel() {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) return &run_avx2<Loop>;
#endif
  return &run_baseline<Loop>;
}

// Call f with a zero of the C++ type of `dtype`.
template <class F>
auto with_type(c10::ScalarType dtype, const F& f) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return f(c10::Half());
    case c10::ScalarType::BFloat16:
      return f(c10::BFloat16());
    case c10::ScalarType::Float:
      return f(0.0f);
    case c10::ScalarType::Double:
      return f(0.0);
    default:
      TORCH_INTERNAL_ASSERT(false, "no kernel for dtype ", dtype);
  }
}

// Return the kernel of Loop<Source, Target> for two dtypes.
template <template <class, class> class Loop>
auto kernel_between(c10::ScalarType source, c10::ScalarType target) {
  return with_type(source, [&](auto s) {
    return with_type(target, [](auto t) { return kernel<Loop<decltype(s), decltype(t)>>(); });
  });
}

template <class Source, class Target>
using WriteLoop = CopyLoop<Source, Target, Write>;
template <class Source, class Target>
using AddLoop = CopyLoop<Source, Target, Add>;
template <class Source, class Target>
using WriteSquaresLoop = SquaresLoop<Source, Target, Write>;
template <class Source, class Target>
using AddSquaresLoop = SquaresLoop<Source, Target, Add>;

}  // namespace

CopyKernel copy_kernel(c10::ScalarType source, c10::ScalarType target, bool sums_squares) {
  return sums_squares ? kernel_between<WriteSquaresLoop>(source, target) : kernel_between<WriteLoop>(source, target);
}

CopyKernel add_kernel(c10::ScalarType source, c10::ScalarType target, bool sums_squares) {
  return sums_squares ? kernel_between<AddSquaresLoop>(source, target) : kernel_between<AddLoop>(source, target);
}

CopyKernel magnitude_kernel(c10::ScalarType source, bool sums_squares) {
  return with_type(source, [&](auto s) {
    using T = decltype(s);
    return sums_squares ? kernel<SquaresLoop<T, T, Discard>>() : kernel<CopyLoop<T, T, Discard>>();
  });
}

CopyKernel zero_kernel(c10::ScalarType target) {
  return with_type(target, [](auto t) { return kernel<ZeroLoop<decltype(t)>>(); });
}

StatsKernel stats_kernel(c10::ScalarType source, c10::ScalarType target) {
  return kernel_between<StatsLoop>(source, target);
}

StatsKernel stats_only_kernel(c10::ScalarType dtype) {
  return with_type(dtype, [](auto t) { return kernel<StatsOnlyLoop<decltype(t)>>(); });
}

}  // namespace fddp
