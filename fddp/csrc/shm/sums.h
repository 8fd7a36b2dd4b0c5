// Element-wise sums over ranks, in a fixed order of additions.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace fddp::shm {

// Type of the numbers in a sum. Complex numbers are pairs of real numbers.
enum class NumberType : uint32_t { kF64, kF32, kF16, kBF16, kU8, kI8, kI32, kI64, kOpaque };

// Return the size of a number in bytes; 1 for kOpaque.
size_t number_bytes(NumberType type);

// Association of a sum in which members have one or more summands, as on a stack: a summand is pushed,
// and each addition replaces the two newest sums by theirs. (0, 1, 0, 2) is (a+b) + (c+d).
struct SumTree {
  static constexpr size_t kDepth = 32;  // most sums on the stack

  std::vector<uint32_t> summands;   // number of summands of each member
  std::vector<uint32_t> additions;  // number of additions after each summand, in member order

  // Return true if the tree has summands of `members` members, and never more than kDepth sums on
  // the stack.
  bool is_valid(size_t members) const;
  // Return the number of sums on the stack after all additions. The tree must be valid.
  uint32_t sums() const;
  // Return the largest number of summands of a member, or of sums if that is larger.
  uint32_t rows() const;
  // Return FNV-1a of both lists, as `SumTree.digest` in Python.
  uint64_t digest() const;
};

// Options of a sum, equal on all ranks.
struct SumOptions {
  NumberType number_type;
  bool average;  // divide by the number of summands; floating-point numbers only
  const SumTree* tree = nullptr;  // null: sum in rank order
};

// Buffers of the summands and of the result. Each target is one of the sources, or disjoint from
// all of them. A sum along a tree has a target for each sum that is left; other sums have the same
// result in all targets. Buffers may have any alignment.
struct SumBuffers {
  const char* const* sources;
  size_t n_sources;
  char* const* targets;
  size_t n_targets;
};

// Sum the numbers [begin, begin + count) of all sources and write the result to the same positions
// of all targets. float16 and bfloat16 are accumulated in float and rounded once, at the end;
// integers wrap around.
void sum(const SumOptions& options, const SumBuffers& buffers, int64_t begin, int64_t count);

}  // namespace fddp::shm
