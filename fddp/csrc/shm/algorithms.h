// Memory operations of one member in a collective, once the data of all members can be located.
//
// [Note: write ownership]
// In a sum each member computes one part of the result. It reads this part from the tensors of all
// members and writes the result into all of them, in place. Between the time at which the last
// member has posted and the time at which all members have written, only the owner of a part
// accesses it. One barrier at the end is therefore sufficient, and each summand is read once,
// directly from the memory it was packed into. In a gather each member reads the chunks of the
// others, which no member writes, and writes only its own memory. In an all-to-all each pair of
// members swaps two chunks, and one of the two does it.
//
// [Note: segmented staging]
// A tensor outside of the arenas goes through a staging buffer in its owner's arena, in segments.
// The buffer has two halves, used alternately. For each segment, `copy_in` fills a half, `run`
// performs the collective on the memory of all members, and `copy_out` copies the result to the
// tensor. The next segment is copied in while peers work on the current one.

#pragma once

#include "byte_range.h"
#include "control_block.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fddp::shm {

// Size of one half of a staging buffer in bytes.
inline constexpr uint64_t kSegmentBytes = uint64_t{512} << 10;

// Return true if members copy the data they send when they post the operation. No further
// synchronization is needed then. Used for small operations, where waiting costs more than the
// additional copy.
bool is_copied(const Signature& signature, size_t members);

// Range of the tensor that `member` sends in a copied operation.
ByteRange copied_part(const Signature& signature, size_t members, size_t member);

// Return true if others access the tensor of `member` in an operation that is not copied.
bool is_shared(const Signature& signature, size_t member);

class Algorithm {
 public:
  // Data of one member for an operation.
  struct MemberData {
    DataLocation location;
    char* memory;  // the tensor, the copy or the staging buffer
  };

  // `own` is the tensor of this member; `member_data` has one entry for each member.
  Algorithm(
      const Signature& signature, char* own, size_t index, std::vector<MemberData> member_data);

  // Run a copied operation.
  void run_copied() const;

  // Run any other operation segment by segment. There is one segment if no member's data is staged.
  int64_t segments() const {
    return segments_;
  }
  bool staged() const {
    return staged_;
  }
  void copy_in(int64_t segment) const;
  void run(int64_t segment) const;
  void copy_out(int64_t segment) const;

  char* memory(size_t member) const {
    return member_data_[member].memory;
  }
  // Range of the tensor of `member` that `run` accesses.
  ByteRange accessed_range(size_t member) const;

 private:
  struct UnitRange {
    int64_t begin;
    int64_t count;
  };

  size_t members() const {
    return member_data_.size();
  }
  bool is_staged(size_t member) const;
  UnitRange range_of(int64_t segment) const;
  char* at(size_t member, int64_t segment, int64_t unit, int64_t staged_unit) const;
  bool swaps_with(size_t member) const;
  void sum_into(
      const std::vector<char*>& sources, char* const* targets, size_t n, UnitRange range) const;
  int64_t bytes(int64_t units) const {
    return units * signature_.unit_bytes;
  }
  int64_t chunk() const {
    return signature_.units / static_cast<int64_t>(members());
  }

  Signature signature_;
  char* own_;
  size_t index_;
  std::vector<MemberData> member_data_;
  bool staged_;
  int64_t segment_units_;
  int64_t segments_;
};

}  // namespace fddp::shm
