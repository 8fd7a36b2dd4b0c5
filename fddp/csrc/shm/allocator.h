// Which stretches of a range of memory are in use: the bookkeeping of an arena, without its memory.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fddp::shm {

struct Range {
  uint64_t begin;
  uint64_t bytes;

  uint64_t end() const {
    return begin + bytes;
  }
};

// Blocks of the range [0, span). A block is cut from the smallest free stretch that it fits in, so
// that the large rest at the end is touched last; neighbours that are free are one stretch.
class Blocks {
 public:
  static constexpr uint64_t kGrain = 64;  // bytes; begin and size of blocks are multiples of it

  explicit Blocks(uint64_t span);

  // A block of at least `bytes`, its begin a multiple of `alignment`, which is a power of two.
  // None if no free stretch holds it.
  std::optional<Range> take(uint64_t bytes, uint64_t alignment);

  // Frees the block that begins here; false if there is none.
  bool give(uint64_t begin);

  std::vector<Range> free() const;  // by begin
  uint64_t used() const {
    return used_;
  }
  uint64_t taken() const {
    return taken_.size();
  }

 private:
  void add(Range stretch);
  void remove(Range stretch);

  std::map<uint64_t, uint64_t> by_begin_;               // free: begin to bytes
  std::set<std::pair<uint64_t, uint64_t>> by_bytes_;    // free: bytes, begin
  std::unordered_map<uint64_t, uint64_t> taken_;        // begin to bytes
  uint64_t used_ = 0;
};

}  // namespace fddp::shm
