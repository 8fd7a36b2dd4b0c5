// Bookkeeping of an arena: allocates byte ranges without touching memory.

#pragma once

#include "byte_range.h"

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fddp::shm {

// Best-fit allocator of blocks within [0, span). Adjacent free ranges are merged. Best fit leaves
// the large free range at the end untouched for as long as possible.
class BlockAllocator {
 public:
  static constexpr uint64_t kAlignment = 64;  // bytes; divides begin and size of every block

  explicit BlockAllocator(uint64_t span);

  // Allocate a block of at least `bytes` bytes whose begin is a multiple of `alignment`, a power of
  // two. Return nullopt if no free range can hold it.
  std::optional<ByteRange> allocate(uint64_t bytes, uint64_t alignment);

  // Free the block at `begin`. Return false if there is no such block.
  bool free(uint64_t begin);

  std::vector<ByteRange> free_ranges() const;  // in ascending order
  uint64_t used() const {
    return used_;
  }
  uint64_t allocated_blocks() const {
    return allocated_.size();
  }

 private:
  void add(ByteRange range);
  void remove(ByteRange range);

  std::map<uint64_t, uint64_t> by_begin_;             // free ranges: begin to bytes
  std::set<std::pair<uint64_t, uint64_t>> by_bytes_;  // free ranges: (bytes, begin)
  std::unordered_map<uint64_t, uint64_t> allocated_;  // begin to bytes
  uint64_t used_ = 0;
};

}  // namespace fddp::shm
