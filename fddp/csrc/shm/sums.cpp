#include "sums.h"

#include "../tensor/loops.h"
#include "half.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

// Loops are compiled once per instruction set and chosen when the library is loaded, so that a
// binary made on one machine serves the others. Sanitizers start too late for such a choice.
#if !defined(__x86_64__) || !defined(__gnu_linux__) || defined(FDDP_NO_CLONES)
#define FDDP_CLONES
#elif defined(__clang__) || __GNUC__ < 12
#define FDDP_CLONES __attribute__((target_clones("avx2", "default")))
#else
// Of AVX-512, the instructions on 16-bit lanes make halves half as dear; the rest changes nothing.
#define FDDP_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#endif

namespace fddp::shm {
namespace {

// What is in cache while all summands are added to it.
constexpr int64_t kTile = 1024;

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

// The last step of a sum. Where n is a power of two, 1/n is exact and the product rounds as the
// quotient does.
template <class Wide>
struct Divide {
  Wide divisor;
  Wide factor;
  bool multiply;

  FDDP_INLINE Divide(const Recipe& recipe, size_t n)
      : divisor(static_cast<Wide>(recipe.average ? n : 1)),
        factor(static_cast<Wide>(1) / divisor),
        multiply(!recipe.average || std::has_single_bit(n)) {}
};

template <class T>
FDDP_INLINE bool aligned(const Columns& columns) {
  uintptr_t bits = 0;
  for (size_t i = 0; i < columns.n_sources; ++i) {
    bits |= reinterpret_cast<uintptr_t>(columns.sources[i]);
  }
  for (size_t i = 0; i < columns.n_targets; ++i) {
    bits |= reinterpret_cast<uintptr_t>(columns.targets[i]);
  }
  return bits % sizeof(T) == 0;
}

// Two summands, the usual case on small hosts: one pass, nothing in between.
template <class T, bool kBoth>
FDDP_INLINE void sum_pair(
    const T* a, const T* b, T* first, T* second, int64_t count,
    typename Traits<T>::Wide factor) {
  using Wide = typename Traits<T>::Wide;
  FDDP_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    const auto total = static_cast<Wide>(Traits<T>::read(a[i]) + Traits<T>::read(b[i]));
    T result;
    Traits<T>::write(static_cast<Wide>(total * factor), result);
    first[i] = result;
    if constexpr (kBoth) second[i] = result;
  }
}

template <class T>
FDDP_INLINE void sum_two(
    const Recipe& recipe, const Columns& columns, int64_t begin, int64_t count) {
  const auto factor = Divide<typename Traits<T>::Wide>(recipe, 2).factor;
  const auto* a = reinterpret_cast<const T*>(columns.sources[0]) + begin;
  const auto* b = reinterpret_cast<const T*>(columns.sources[1]) + begin;
  auto* first = reinterpret_cast<T*>(columns.targets[0]) + begin;
  auto* last = reinterpret_cast<T*>(columns.targets[columns.n_targets - 1]) + begin;
  if (columns.n_targets == 2) {
    sum_pair<T, true>(a, b, first, last, count, factor);
  } else {
    sum_pair<T, false>(a, b, first, last, count, factor);
  }
}

// `size` numbers of memory that may begin anywhere.
template <class T>
FDDP_INLINE const T* fetch(const char* source, int64_t begin, int64_t size, T* scratch) {
  const char* from = source + begin * static_cast<int64_t>(sizeof(T));
  if (reinterpret_cast<uintptr_t>(from) % alignof(T) == 0) return reinterpret_cast<const T*>(from);
  std::memcpy(scratch, from, static_cast<size_t>(size) * sizeof(T));
  return scratch;
}

template <class Wide>
FDDP_INLINE void add(Wide* into, const Wide* part, int64_t size) {
  FDDP_INDEPENDENT
  for (int64_t i = 0; i < size; ++i) into[i] = static_cast<Wide>(into[i] + part[i]);
}

// Arithmetic as IEEE 754 has it for as long as this lives: to the nearest, with subnormal numbers.
// Which thread adds up is chance, and threads may have been told otherwise
// (torch.set_flush_denormal); bits must not depend on that.
class StandardFloats {
 public:
  StandardFloats(const StandardFloats&) = delete;
  StandardFloats& operator=(const StandardFloats&) = delete;
#if defined(__x86_64__)
  StandardFloats() : mode_(__builtin_ia32_stmxcsr()) {
    constexpr unsigned kStandard = 0x1f80;
    __builtin_ia32_ldmxcsr(kStandard);
  }
  ~StandardFloats() {
    __builtin_ia32_ldmxcsr(mode_);
  }

 private:
  unsigned mode_;
#elif defined(__aarch64__)
  StandardFloats() {
    asm volatile("mrs %0, fpcr" : "=r"(mode_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}) : "memory");
  }
  ~StandardFloats() {
    asm volatile("msr fpcr, %0" ::"r"(mode_) : "memory");
  }

 private:
  uint64_t mode_;
#else
  StandardFloats() {}
#endif
};

// Sums one tile along a tree of partial sums, each in a tile of its own.
template <class T>
FDDP_INLINE void sum_tile(
    const Recipe& recipe, const Columns& columns, int64_t begin, int64_t size) {
  using Wide = typename Traits<T>::Wide;
  Wide partial[Order::kAxes][kTile];
  T scratch[kTile];
  const size_t levels = std::max<size_t>(recipe.order.axes, 1);
  size_t counts[Order::kAxes] = {};  // summands in the partial sum of each level
  for (size_t s = 0; s < columns.n_sources; ++s) {
    const T* source = fetch(columns.sources[s], begin, size, scratch);
    Wide* leaf = partial[levels - 1];
    if (counts[levels - 1]++ == 0) {
      for (int64_t i = 0; i < size; ++i) leaf[i] = Traits<T>::read(source[i]);
    } else {
      FDDP_INDEPENDENT
      for (int64_t i = 0; i < size; ++i) {
        leaf[i] = static_cast<Wide>(leaf[i] + Traits<T>::read(source[i]));
      }
    }
    for (size_t level = levels - 1; level > 0; --level) {
      if (counts[level] != recipe.order.sizes[level]) break;
      if (counts[level - 1]++ == 0) {
        std::memcpy(partial[level - 1], partial[level], static_cast<size_t>(size) * sizeof(Wide));
      } else {
        add(partial[level - 1], partial[level], size);
      }
      counts[level] = 0;
    }
  }
  const Divide<Wide> divide(recipe, columns.n_sources);
  Wide* total = partial[0];
  if (recipe.average && divide.multiply) {
    for (int64_t i = 0; i < size; ++i) total[i] = static_cast<Wide>(total[i] * divide.factor);
  } else if (recipe.average) {
    for (int64_t i = 0; i < size; ++i) total[i] = static_cast<Wide>(total[i] / divide.divisor);
  }
  for (int64_t i = 0; i < size; ++i) Traits<T>::write(total[i], scratch[i]);
  for (size_t t = 0; t < columns.n_targets; ++t) {
    char* to = columns.targets[t] + begin * static_cast<int64_t>(sizeof(T));
    std::memcpy(to, scratch, static_cast<size_t>(size) * sizeof(T));
  }
}

template <class T>
FDDP_INLINE void sum_all(
    const Recipe& recipe, const Columns& columns, int64_t begin, int64_t count) {
  // (1, 2) and (2, 1) associate as (2) does.
  if (columns.n_sources == 2 && columns.n_targets <= 2 && aligned<T>(columns)) {
    sum_two<T>(recipe, columns, begin, count);
    return;
  }
  for (int64_t done = 0; done < count; done += kTile) {
    sum_tile<T>(recipe, columns, begin + done, std::min(kTile, count - done));
  }
}

}  // namespace

// Not in the anonymous namespace: the clones of a function need a name that the linker sees.
#define FDDP_SUM(name, T)                                                      \
  FDDP_CLONES void name(const Recipe&, const Columns&, int64_t, int64_t);      \
  FDDP_CLONES void name(                                                       \
      const Recipe& recipe, const Columns& columns, int64_t begin, int64_t count) { \
    sum_all<T>(recipe, columns, begin, count);                                 \
  }
FDDP_SUM(sum_f64, double)
FDDP_SUM(sum_f32, float)
FDDP_SUM(sum_f16, Half)
FDDP_SUM(sum_bf16, BFloat16)
FDDP_SUM(sum_u8, uint8_t)
FDDP_SUM(sum_i8, int8_t)
FDDP_SUM(sum_i32, int32_t)
FDDP_SUM(sum_i64, int64_t)
#undef FDDP_SUM

void sum(const Recipe& recipe, const Columns& columns, int64_t begin, int64_t count) {
  if (count <= 0 || columns.n_targets == 0) return;
  const StandardFloats standard;
  switch (recipe.number) {
    case Number::kF64:
      return sum_f64(recipe, columns, begin, count);
    case Number::kF32:
      return sum_f32(recipe, columns, begin, count);
    case Number::kF16:
      return sum_f16(recipe, columns, begin, count);
    case Number::kBF16:
      return sum_bf16(recipe, columns, begin, count);
    case Number::kU8:
      return sum_u8(recipe, columns, begin, count);
    case Number::kI8:
      return sum_i8(recipe, columns, begin, count);
    case Number::kI32:
      return sum_i32(recipe, columns, begin, count);
    case Number::kI64:
      return sum_i64(recipe, columns, begin, count);
    case Number::kOpaque:
      return;
  }
}

size_t number_bytes(Number number) {
  switch (number) {
    case Number::kF64:
    case Number::kI64:
      return 8;
    case Number::kF32:
    case Number::kI32:
      return 4;
    case Number::kF16:
    case Number::kBF16:
      return 2;
    case Number::kU8:
    case Number::kI8:
    case Number::kOpaque:
      return 1;
  }
  return 1;
}

}  // namespace fddp::shm
