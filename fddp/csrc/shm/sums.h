// Sums of several ranks' numbers, element by element, in an order that is fixed.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace fddp::shm {

// What numbers are added up as. Complex numbers are pairs of their parts.
enum class Number : uint32_t { kF64, kF32, kF16, kBF16, kU8, kI8, kI32, kI64, kOpaque };

// Bytes of one number; 1 where they are opaque.
size_t number_bytes(Number number);

// Sizes of the axes on which the summands are laid out, outermost first; their product is the
// number of summands. Partial sums run within the innermost axis first: (2, 2) is (a+b) + (c+d).
struct Order {
  static constexpr size_t kAxes = 6;

  std::array<uint16_t, kAxes> sizes = {};
  uint16_t axes = 0;  // 0: one axis, in turn
};

// How sums are made, the same on all ranks.
struct Recipe {
  Number number;
  bool average;  // divides by the number of summands; floating numbers
  Order order;
};

// Memory of each summand, and where the sum goes. A target is one of the sources or disjoint from
// all; any alignment.
struct Columns {
  const char* const* sources;
  size_t n_sources;
  char* const* targets;
  size_t n_targets;
};

// Adds up `count` numbers of all sources, from their `begin`-th on, and writes the sums to all
// targets from there on. float16 and bfloat16 are added in float and rounded once, at the end;
// integers wrap around.
void sum(const Recipe& recipe, const Columns& columns, int64_t begin, int64_t count);

}  // namespace fddp::shm
