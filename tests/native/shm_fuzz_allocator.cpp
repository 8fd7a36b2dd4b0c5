// Fuzzing of the allocator of an arena.

#include "shm_fuzz.h"

#include "../../fddp/csrc/shm/allocator.h"

#include <cstdint>
#include <iterator>
#include <map>

namespace shm_fuzz {

using namespace fddp::shm;

void fuzz_allocator(Bytes in) {
  const uint64_t span = in.byte() % 2 == 0 ? in.size() * BlockAllocator::kAlignment : in.extreme();
  BlockAllocator allocator(span);
  std::map<uint64_t, uint64_t> allocated;
  uint64_t used = 0;
  while (!in.empty()) {
    if (in.byte() % 3 != 0) {
      const uint64_t bytes = in.byte() % 4 == 0 ? in.extreme() : in.size();
      const uint64_t alignment = uint64_t{1} << (in.byte() % 16);
      const auto block = allocator.allocate(bytes, alignment);
      if (!block) continue;
      require(block->begin % alignment == 0, "a block is not aligned");
      require(block->bytes >= bytes && block->bytes != 0, "a block is too small");
      require(block->end() >= block->begin && block->end() <= span, "a block lies outside");
      const auto next = allocated.lower_bound(block->begin);
      require(next == allocated.end() || block->end() <= next->first, "allocator overlap");
      require(
          next == allocated.begin() ||
              std::prev(next)->first + std::prev(next)->second <= block->begin,
          "allocator overlap");
      allocated[block->begin] = block->bytes;
      used += block->bytes;
    } else {
      const uint64_t any = in.extreme();
      const uint64_t begin =
          allocated.empty() || any % 4 == 0
              ? any
              : std::next(allocated.begin(), any % allocated.size())->first;
      const auto known = allocated.find(begin);
      require(
          allocator.free(begin) == (known != allocated.end()),
          "free() is wrong about the existence of a block");
      if (known == allocated.end()) continue;
      used -= known->second;
      allocated.erase(known);
    }
    require(
        allocator.used() == used && allocator.allocated_blocks() == allocated.size(),
        "used() or allocated_blocks() is wrong");
  }
  uint64_t free = 0;
  for (const ByteRange& range : allocator.free_ranges()) free += range.bytes;
  constexpr uint64_t kAlignment = BlockAllocator::kAlignment;
  require(free + used == span / kAlignment * kAlignment, "bytes were leaked");
}

}  // namespace shm_fuzz
