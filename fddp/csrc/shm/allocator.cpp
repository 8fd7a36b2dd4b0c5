#include "allocator.h"

#include <iterator>
#include <limits>

namespace fddp::shm {

BlockAllocator::BlockAllocator(uint64_t span) {
  const uint64_t whole = span / kAlignment * kAlignment;
  if (whole != 0) add({0, whole});
}

std::optional<ByteRange> BlockAllocator::allocate(uint64_t bytes, uint64_t alignment) {
  if (bytes == 0) bytes = 1;
  if (bytes > std::numeric_limits<uint64_t>::max() - kAlignment) return std::nullopt;
  const uint64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  for (auto it = by_bytes_.lower_bound({rounded, 0}); it != by_bytes_.end(); ++it) {
    const ByteRange range = {it->second, it->first};
    const uint64_t skipped = -range.begin & (alignment - 1);
    if (skipped > range.bytes - rounded) continue;
    remove(range);
    const ByteRange block = {range.begin + skipped, rounded};
    if (skipped != 0) add({range.begin, skipped});
    if (block.end() != range.end()) add({block.end(), range.end() - block.end()});
    allocated_.emplace(block.begin, block.bytes);
    used_ += block.bytes;
    return block;
  }
  return std::nullopt;
}

bool BlockAllocator::free(uint64_t begin) {
  const auto block = allocated_.find(begin);
  if (block == allocated_.end()) return false;
  ByteRange range = {begin, block->second};
  used_ -= range.bytes;
  allocated_.erase(block);
  const auto next = by_begin_.lower_bound(begin);
  if (next != by_begin_.begin()) {
    const auto before = std::prev(next);
    const ByteRange neighbour = {before->first, before->second};
    if (neighbour.end() == begin) {
      range = {neighbour.begin, neighbour.bytes + range.bytes};
      remove(neighbour);
    }
  }
  const auto after = by_begin_.find(range.end());
  if (after != by_begin_.end()) {
    const ByteRange neighbour = {after->first, after->second};
    range.bytes += neighbour.bytes;
    remove(neighbour);
  }
  add(range);
  return true;
}

std::vector<ByteRange> BlockAllocator::free_ranges() const {
  std::vector<ByteRange> ranges;
  ranges.reserve(by_begin_.size());
  for (const auto& [begin, bytes] : by_begin_) ranges.push_back({begin, bytes});
  return ranges;
}

void BlockAllocator::add(ByteRange range) {
  by_begin_.emplace(range.begin, range.bytes);
  by_bytes_.emplace(range.bytes, range.begin);
}

void BlockAllocator::remove(ByteRange range) {
  by_begin_.erase(range.begin);
  by_bytes_.erase({range.bytes, range.begin});
}

}  // namespace fddp::shm
