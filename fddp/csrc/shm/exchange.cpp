#include "exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fddp::shm {
namespace {

uint64_t round_up(uint64_t bytes) {
  return (bytes + kCacheLineBytes - 1) / kCacheLineBytes * kCacheLineBytes;
}

// Memory to receive into, where the sizes are known only now.
std::vector<ExchangeBuffers::Target> allocated(
    const ExchangeBuffers& buffers, size_t index, const std::vector<ExchangeTable>& tables) {
  if (!buffers.allocate) return {};
  std::vector<uint64_t> sizes;
  for (const ExchangeTable& table : tables) sizes.push_back(table[index].bytes);
  sizes[index] = buffers.sources[index].bytes;  // the table may have been overwritten
  return buffers.allocate(sizes);
}

char* half_of(char* staging, int64_t segment) {
  return staging + (segment % 2 == 0 ? 0 : kSegmentBytes);
}

}  // namespace

uint64_t fill_table(
    const ExchangeBuffers& buffers, size_t index, bool offsets, ExchangeTable& table) {
  const size_t n = buffers.sources.size();
  table.assign(n, {});
  uint64_t used = 0;
  const ExchangeBuffers::Source* latest = nullptr;
  uint64_t latest_begin = 0;
  for (size_t m = 0; m < n; ++m) {
    const auto& source = buffers.sources[m];
    table[m] = {0, source.bytes, buffers.targets[m].bytes};
    if (m == index || source.bytes == 0) continue;
    // Members that receive the same range follow each other in all callers.
    const bool repeated =
        latest != nullptr && latest->data == source.data && latest->bytes == source.bytes;
    if (!repeated) {
      latest = &source;
      latest_begin = used;
      used += offsets ? round_up(source.bytes) : 1;
    }
    table[m].begin = latest_begin;
  }
  return used;
}

void write_table(char* to, uint64_t data_offset, const ExchangeTable& table) {
  std::memcpy(to, &data_offset, sizeof data_offset);
  std::memcpy(to + sizeof data_offset, table.data(), table.size() * sizeof(ExchangeEntry));
}

uint64_t read_table(const char* from, ExchangeTable& table) {
  uint64_t data_offset;
  std::memcpy(&data_offset, from, sizeof data_offset);
  std::memcpy(table.data(), from + sizeof data_offset, table.size() * sizeof(ExchangeEntry));
  return data_offset;
}

bool sizes_match(const std::vector<ExchangeTable>& tables) {
  for (size_t from = 0; from < tables.size(); ++from) {
    for (size_t to = 0; to < tables.size(); ++to) {
      const uint64_t expected = tables[to][from].expected;
      if (expected != kAnySize && expected != tables[from][to].bytes) return false;
    }
  }
  return true;
}

Exchange::Exchange(
    const ExchangeBuffers& buffers, size_t index, std::vector<MemberData> member_data,
    std::vector<ExchangeTable> tables)
    : buffers_(buffers),
      allocated_(allocated(buffers, index, tables)),
      targets_(buffers.allocate ? allocated_ : buffers.targets),
      index_(index),
      member_data_(std::move(member_data)),
      tables_(std::move(tables)),
      slot_bytes_(tables_.size(), kSegmentBytes) {
  for (size_t m = 0; m < tables_.size(); ++m) {
    copied_ = copied_ && member_data_[m].location == DataLocation::kCopied;
    if (!is_staged(m)) continue;
    staged_ = true;
    uint64_t slots = 1;
    uint64_t most = 0;
    for (size_t to = 0; to < tables_.size(); ++to) {
      if (to == m) continue;
      slots = std::max(slots, tables_[m][to].begin + 1);
      most = std::max(most, tables_[m][to].bytes);
    }
    slot_bytes_[m] = kSegmentBytes / slots / kCacheLineBytes * kCacheLineBytes;
    const auto needed = static_cast<int64_t>((most + slot_bytes_[m] - 1) / slot_bytes_[m]);
    segments_ = std::max(segments_, needed);
  }
}

ByteRange Exchange::range_of(uint64_t slot_bytes, uint64_t bytes, int64_t segment) const {
  const uint64_t begin = std::min(static_cast<uint64_t>(segment) * slot_bytes, bytes);
  return {begin, std::min(slot_bytes, bytes - begin)};
}

void Exchange::copy_in(int64_t segment) const {
  if (!is_staged(index_)) return;
  const uint64_t slot_bytes = slot_bytes_[index_];
  char* const half = half_of(member_data_[index_].memory, segment);
  int64_t filled = -1;  // slots are in ascending order
  for (size_t m = 0; m < tables_.size(); ++m) {
    const ExchangeEntry& entry = tables_[index_][m];
    const auto slot = static_cast<int64_t>(entry.begin);
    if (m == index_ || entry.bytes == 0 || slot <= filled) continue;
    filled = slot;
    const ByteRange range = range_of(slot_bytes, entry.bytes, segment);
    if (range.bytes == 0) continue;
    const char* const from = buffers_.sources[m].data + range.begin;
    std::memcpy(half + entry.begin * slot_bytes, from, range.bytes);
  }
}

void Exchange::run(int64_t segment) const {
  // Each member begins with its neighbour, so that reads are spread over all members.
  for (size_t step = 1; step < tables_.size(); ++step) {
    receive((index_ + step) % tables_.size(), segment);
  }
  if (segment != 0) return;
  const auto& own = buffers_.sources[index_];
  char* const target = targets_[index_].data;
  if (target == nullptr || own.bytes == 0 || own.data == target) return;
  std::memmove(target, own.data, own.bytes);
}

void Exchange::receive(size_t member, int64_t segment) const {
  const ExchangeEntry& entry = tables_[member][index_];
  char* const target = targets_[member].data;
  if (target == nullptr) return;
  char* const memory = member_data_[member].memory;
  if (is_staged(member)) {
    const uint64_t slot_bytes = slot_bytes_[member];
    const ByteRange range = range_of(slot_bytes, entry.bytes, segment);
    if (range.bytes == 0) return;
    const char* const from = half_of(memory, segment) + entry.begin * slot_bytes;
    std::memcpy(target + range.begin, from, range.bytes);
  } else if (segment == 0 && entry.bytes != 0) {
    std::memcpy(target, memory + entry.begin, entry.bytes);
  }
}

ByteRange Exchange::accessed_range(size_t member) const {
  const ExchangeEntry& entry = tables_[member][index_];
  if (member == index_ || is_staged(member)) return {0, 0};
  return {entry.begin, entry.bytes};
}

}  // namespace fddp::shm
