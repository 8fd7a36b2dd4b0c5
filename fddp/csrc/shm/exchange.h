// Exchange of ranges of bytes: each member sends one to each member. Gathers, scatters, all-to-all
// and all-gathers of unequal sizes are exchanges in which some ranges are empty or equal.
//
// [Note: tables of exchanges]
// The sizes differ between members, so they are not part of the signature. Each member posts a
// table of its ranges and of the sizes that it expects. All members read all tables, so they agree
// on whether the sizes match, on where the data lies and on the number of segments. In shared memory
// a table follows the offset of the member's data.

#pragma once

#include "algorithms.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

namespace fddp::shm {

// Size of a range to receive that only its sender knows.
inline constexpr uint64_t kAnySize = std::numeric_limits<uint64_t>::max();

// Memory that a member sends to and receives from the others, by member.
struct ExchangeBuffers {
  struct Source {
    const char* data;
    uint64_t bytes;
  };
  struct Target {
    char* data;
    uint64_t bytes;
  };

  std::vector<Source> sources;
  std::vector<Target> targets;
  // Return the targets for ranges of these sizes if the targets have kAnySize. What a target without
  // memory receives is dropped. Called with the executor lock.
  std::function<std::vector<Target>(const std::vector<uint64_t>&)> allocate = nullptr;
};

// Entry of a table, for one receiver.
struct ExchangeEntry {
  // Depends on the location of the data: an offset in the arena, an offset relative to the copy, or
  // the number of a slot of the staging buffer. Equal ranges have one copy or slot.
  uint64_t begin;
  uint64_t bytes;
  uint64_t expected;  // size of what the member receives from that one
};

// Table of a member, by receiver.
using ExchangeTable = std::vector<ExchangeEntry>;

// Size of a table in shared memory, rounded up to cache lines.
constexpr uint64_t table_bytes(size_t members) {
  const uint64_t bytes = sizeof(uint64_t) + members * sizeof(ExchangeEntry);
  return (bytes + kCacheLineBytes - 1) / kCacheLineBytes * kCacheLineBytes;
}
void write_table(char* to, uint64_t data_offset, const ExchangeTable& table);
// Return the offset of the data.
uint64_t read_table(const char* from, ExchangeTable& table);

// Fill the table of member `index`, whose data is copied or staged: equal ranges share an entry.
// `offsets`: `begin` is the offset of a copy, with copies aligned to cache lines; otherwise the
// number of a slot. Returns the size of all copies in bytes, or the number of slots.
uint64_t fill_table(
    const ExchangeBuffers& buffers, size_t index, bool offsets, ExchangeTable& table);

// Return true if each size sent equals the size expected, if any.
bool sizes_match(const std::vector<ExchangeTable>& tables);

class Exchange : public Algorithm {
 public:
  Exchange(
      const ExchangeBuffers& buffers, size_t index, std::vector<MemberData> member_data,
      std::vector<ExchangeTable> tables);

  bool copied() const override {
    return copied_;
  }
  void run_copied() const override {
    run(0);
  }
  int64_t segments() const override {
    return segments_;
  }
  bool staged() const override {
    return staged_;
  }
  void copy_in(int64_t segment) const override;
  void run(int64_t segment) const override;
  void copy_out(int64_t) const override {}
  char* memory(size_t member) const override {
    return member_data_[member].memory;
  }
  ByteRange accessed_range(size_t member) const override;

 private:
  bool is_staged(size_t member) const {
    return member_data_[member].location == DataLocation::kStaged;
  }
  void receive(size_t member, int64_t segment) const;
  ByteRange range_of(uint64_t slot_bytes, uint64_t bytes, int64_t segment) const;

  const ExchangeBuffers& buffers_;  // outlives this object
  std::vector<ExchangeBuffers::Target> allocated_;
  const std::vector<ExchangeBuffers::Target>& targets_;
  size_t index_;
  std::vector<MemberData> member_data_;
  std::vector<ExchangeTable> tables_;
  std::vector<uint64_t> slot_bytes_;  // by member, of its staging buffer
  bool copied_ = true;
  bool staged_ = false;
  int64_t segments_ = 1;
};

}  // namespace fddp::shm
