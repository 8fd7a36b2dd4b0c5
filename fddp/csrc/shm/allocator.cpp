#include "allocator.h"

#include <iterator>
#include <limits>

namespace fddp::shm {

Blocks::Blocks(uint64_t span) {
  const uint64_t whole = span / kGrain * kGrain;
  if (whole != 0) add({0, whole});
}

std::optional<Range> Blocks::take(uint64_t bytes, uint64_t alignment) {
  if (bytes == 0) bytes = 1;
  if (bytes > std::numeric_limits<uint64_t>::max() - kGrain) return std::nullopt;
  const uint64_t rounded = (bytes + kGrain - 1) / kGrain * kGrain;
  for (auto it = by_bytes_.lower_bound({rounded, 0}); it != by_bytes_.end(); ++it) {
    const Range stretch = {it->second, it->first};
    const uint64_t skipped = -stretch.begin & (alignment - 1);
    if (skipped > stretch.bytes - rounded) continue;
    remove(stretch);
    const Range block = {stretch.begin + skipped, rounded};
    if (skipped != 0) add({stretch.begin, skipped});
    if (block.end() != stretch.end()) add({block.end(), stretch.end() - block.end()});
    taken_.emplace(block.begin, block.bytes);
    used_ += block.bytes;
    return block;
  }
  return std::nullopt;
}

bool Blocks::give(uint64_t begin) {
  const auto block = taken_.find(begin);
  if (block == taken_.end()) return false;
  Range stretch = {begin, block->second};
  used_ -= stretch.bytes;
  taken_.erase(block);
  const auto next = by_begin_.lower_bound(begin);
  if (next != by_begin_.begin()) {
    const auto before = std::prev(next);
    const Range neighbour = {before->first, before->second};
    if (neighbour.end() == begin) {
      stretch = {neighbour.begin, neighbour.bytes + stretch.bytes};
      remove(neighbour);
    }
  }
  const auto after = by_begin_.find(stretch.end());
  if (after != by_begin_.end()) {
    const Range neighbour = {after->first, after->second};
    stretch.bytes += neighbour.bytes;
    remove(neighbour);
  }
  add(stretch);
  return true;
}

std::vector<Range> Blocks::free() const {
  std::vector<Range> stretches;
  stretches.reserve(by_begin_.size());
  for (const auto& [begin, bytes] : by_begin_) stretches.push_back({begin, bytes});
  return stretches;
}

void Blocks::add(Range stretch) {
  by_begin_.emplace(stretch.begin, stretch.bytes);
  by_bytes_.emplace(stretch.bytes, stretch.begin);
}

void Blocks::remove(Range stretch) {
  by_begin_.erase(stretch.begin);
  by_bytes_.erase({stretch.bytes, stretch.begin});
}

}  // namespace fddp::shm
