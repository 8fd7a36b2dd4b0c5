#include "sums.h"

#include "../tensor/loops.h"
#include "numbers.h"

#include <algorithm>
#include <bit>
#include <cstring>

// Loops are compiled once per instruction set and selected at load time, so that a binary runs on
// any machine. Sanitizers are initialized too late for this selection.
#if !defined(__x86_64__) || !defined(__gnu_linux__) || defined(FDDP_NO_CLONES)
#define FDDP_CLONES
#elif defined(__clang__) || __GNUC__ < 12
#define FDDP_CLONES __attribute__((target_clones("avx2", "default")))
#else
// AVX-512 instructions on 16-bit lanes halve the cost of float16 and bfloat16. Other types do not
// gain.
#define FDDP_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#endif

namespace fddp::shm {
namespace {

// Numbers per tile. A tile stays in cache while all summands are added to it.
constexpr int64_t kTile = 1024;

// Last step of an average. If n is a power of two, 1/n is exact and multiplication rounds like
// division.
template <class Wide>
struct Divisor {
  Wide divisor;
  Wide factor;
  bool multiply;

  FDDP_INLINE Divisor(const SumOptions& options, size_t n)
      : divisor(static_cast<Wide>(options.average ? n : 1)),
        factor(static_cast<Wide>(1) / divisor),
        multiply(!options.average || std::has_single_bit(n)) {}
};

template <class T>
FDDP_INLINE bool aligned(const SumBuffers& buffers) {
  uintptr_t bits = 0;
  for (size_t i = 0; i < buffers.n_sources; ++i) {
    bits |= reinterpret_cast<uintptr_t>(buffers.sources[i]);
  }
  for (size_t i = 0; i < buffers.n_targets; ++i) {
    bits |= reinterpret_cast<uintptr_t>(buffers.targets[i]);
  }
  return bits % sizeof(T) == 0;
}

// Fast path for two summands, the usual case on small hosts: one pass without a tile.
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
    const SumOptions& options, const SumBuffers& buffers, int64_t begin, int64_t count) {
  const auto factor = Divisor<typename Traits<T>::Wide>(options, 2).factor;
  const auto* a = reinterpret_cast<const T*>(buffers.sources[0]) + begin;
  const auto* b = reinterpret_cast<const T*>(buffers.sources[1]) + begin;
  auto* first = reinterpret_cast<T*>(buffers.targets[0]) + begin;
  auto* last = reinterpret_cast<T*>(buffers.targets[buffers.n_targets - 1]) + begin;
  if (buffers.n_targets == 2) {
    sum_pair<T, true>(a, b, first, last, count, factor);
  } else {
    sum_pair<T, false>(a, b, first, last, count, factor);
  }
}

template <class T>
FDDP_INLINE void add(typename Traits<T>::Wide* into, const T* part, int64_t size) {
  FDDP_INDEPENDENT
  for (int64_t i = 0; i < size; ++i) {
    into[i] = static_cast<typename Traits<T>::Wide>(into[i] + Traits<T>::read(part[i]));
  }
}

// Guard for the default floating-point mode of IEEE 754: round to nearest, with subnormal numbers.
// Any thread may compute a sum, and threads may run in another mode (torch.set_flush_denormal).
// Results must not depend on it.
class DefaultFloatMode {
 public:
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;
#if defined(__x86_64__)
  DefaultFloatMode() : mode_(__builtin_ia32_stmxcsr()) {
    constexpr unsigned kStandard = 0x1f80;
    __builtin_ia32_ldmxcsr(kStandard);
  }
  ~DefaultFloatMode() {
    __builtin_ia32_ldmxcsr(mode_);
  }

 private:
  unsigned mode_;
#elif defined(__aarch64__)
  DefaultFloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(mode_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}) : "memory");
  }
  ~DefaultFloatMode() {
    asm volatile("msr fpcr, %0" ::"r"(mode_) : "memory");
  }

 private:
  uint64_t mode_;
#else
  DefaultFloatMode() {}
#endif
};

// Sum one tile in rank order.
template <class T>
FDDP_INLINE void sum_tile(
    const SumOptions& options, const SumBuffers& buffers, int64_t begin, int64_t size) {
  using Wide = typename Traits<T>::Wide;
  Wide total[kTile];
  T scratch[kTile];
  for (size_t s = 0; s < buffers.n_sources; ++s) {
    const T* source = load_numbers(buffers.sources[s], begin, size, scratch);
    if (s == 0) {
      for (int64_t i = 0; i < size; ++i) total[i] = Traits<T>::read(source[i]);
    } else {
      add<T>(total, source, size);
    }
  }
  const Divisor<Wide> divisor_of(options, buffers.n_sources);
  if (options.average && divisor_of.multiply) {
    for (int64_t i = 0; i < size; ++i) total[i] = static_cast<Wide>(total[i] * divisor_of.factor);
  } else if (options.average) {
    for (int64_t i = 0; i < size; ++i) total[i] = static_cast<Wide>(total[i] / divisor_of.divisor);
  }
  for (int64_t i = 0; i < size; ++i) Traits<T>::write(total[i], scratch[i]);
  for (size_t t = 0; t < buffers.n_targets; ++t) {
    char* to = buffers.targets[t] + begin * static_cast<int64_t>(sizeof(T));
    std::memcpy(to, scratch, static_cast<size_t>(size) * sizeof(T));
  }
}

// Sum one tile along a tree of summands. Each sum that is left has a target of its own.
template <class T>
FDDP_INLINE void sum_tile_along_tree(
    const SumTree& tree, const SumBuffers& buffers, int64_t begin, int64_t size) {
  using Wide = typename Traits<T>::Wide;
  Wide stack[SumTree::kDepth][kTile];
  T scratch[kTile];
  size_t height = 0;
  for (size_t s = 0; s < buffers.n_sources; ++s) {
    const T* source = load_numbers(buffers.sources[s], begin, size, scratch);
    uint32_t additions = tree.additions[s];
    if (additions > 0) {
      add<T>(stack[height - 1], source, size);
      --additions;
    } else {
      Wide* top = stack[height++];
      for (int64_t i = 0; i < size; ++i) top[i] = Traits<T>::read(source[i]);
    }
    for (; additions > 0; --additions) {
      --height;
      add<Wide>(stack[height - 1], stack[height], size);
    }
  }
  // A target may be a source of this tile, all of which have been read.
  for (size_t t = 0; t < buffers.n_targets; ++t) {
    for (int64_t i = 0; i < size; ++i) Traits<T>::write(stack[t][i], scratch[i]);
    char* to = buffers.targets[t] + begin * static_cast<int64_t>(sizeof(T));
    std::memcpy(to, scratch, static_cast<size_t>(size) * sizeof(T));
  }
}

template <class T>
FDDP_INLINE void sum_all(
    const SumOptions& options, const SumBuffers& buffers, int64_t begin, int64_t count) {
  const SumTree* const tree = options.tree;
  const bool is_pair = buffers.n_sources == 2 && buffers.n_targets <= 2;
  if (is_pair && (tree == nullptr || tree->sums() == 1) && aligned<T>(buffers)) {
    sum_two<T>(options, buffers, begin, count);
    return;
  }
  for (int64_t done = 0; done < count; done += kTile) {
    const int64_t size = std::min(kTile, count - done);
    if (tree == nullptr) {
      sum_tile<T>(options, buffers, begin + done, size);
    } else {
      sum_tile_along_tree<T>(*tree, buffers, begin + done, size);
    }
  }
}

}  // namespace

// Not in the anonymous namespace: target_clones needs external linkage.
#define FDDP_SUM(name, T)                                                      \
  FDDP_CLONES void name(const SumOptions&, const SumBuffers&, int64_t, int64_t);      \
  FDDP_CLONES void name(                                                       \
      const SumOptions& options, const SumBuffers& buffers, int64_t begin, int64_t count) { \
    sum_all<T>(options, buffers, begin, count);                                 \
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

void sum(const SumOptions& options, const SumBuffers& buffers, int64_t begin, int64_t count) {
  if (count <= 0 || buffers.n_targets == 0) return;
  const DefaultFloatMode standard;
  switch (options.number_type) {
    case NumberType::kF64:
      return sum_f64(options, buffers, begin, count);
    case NumberType::kF32:
      return sum_f32(options, buffers, begin, count);
    case NumberType::kF16:
      return sum_f16(options, buffers, begin, count);
    case NumberType::kBF16:
      return sum_bf16(options, buffers, begin, count);
    case NumberType::kU8:
      return sum_u8(options, buffers, begin, count);
    case NumberType::kI8:
      return sum_i8(options, buffers, begin, count);
    case NumberType::kI32:
      return sum_i32(options, buffers, begin, count);
    case NumberType::kI64:
      return sum_i64(options, buffers, begin, count);
    case NumberType::kOpaque:
      return;
  }
}

bool SumTree::is_valid(size_t members) const {
  size_t total = 0;
  for (const uint32_t own : summands) total += own;
  if (summands.size() != members || additions.empty() || additions.size() != total) return false;
  size_t height = 0;
  for (const uint32_t times : additions) {
    if (times > height || ++height > kDepth) return false;
    height -= times;
  }
  return true;
}

uint32_t SumTree::sums() const {
  auto height = static_cast<uint32_t>(additions.size());
  for (const uint32_t times : additions) height -= times;
  return height;
}

uint32_t SumTree::rows() const {
  return std::max(sums(), *std::max_element(summands.begin(), summands.end()));
}

// FNV-1a over both lists.
uint64_t SumTree::digest() const {
  uint64_t hash = 14695981039346656037u;
  for (const auto* list : {&summands, &additions}) {
    for (const uint32_t number : *list) hash = (hash ^ number) * 1099511628211u;
  }
  return hash;
}

size_t number_bytes(NumberType number) {
  switch (number) {
    case NumberType::kF64:
    case NumberType::kI64:
      return 8;
    case NumberType::kF32:
    case NumberType::kI32:
      return 4;
    case NumberType::kF16:
    case NumberType::kBF16:
      return 2;
    case NumberType::kU8:
    case NumberType::kI8:
    case NumberType::kOpaque:
      return 1;
  }
  return 1;
}

}  // namespace fddp::shm
