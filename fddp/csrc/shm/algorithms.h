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
// tensor. The next segment is copied in while peers work on the current one. Numbers that no other
// member reads or writes do not go through the buffer: in a reduction, the part that this member
// computes.

#pragma once

#include "byte_range.h"
#include "control_block.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace fddp::shm {

// Size of one half of a staging buffer in bytes.
inline constexpr uint64_t kSegmentBytes = uint64_t{512} << 10;

// Maximum size of what one member copies.
uint64_t max_copied_bytes(size_t members);

// Return true if members copy the data they send when they post the operation. No further
// synchronization is needed then. Used for small operations, where waiting costs more than the
// additional copy.
bool is_copied(const Signature& signature, size_t members);

// Range of the tensor that `member` sends in a copied operation.
ByteRange copied_part(const Signature& signature, size_t members, size_t member);

// Return true if others access the tensor of `member` in an operation that is not copied.
bool is_shared(const Signature& signature, size_t member);

// Data of one member for an operation.
struct MemberData {
  DataLocation location;
  char* memory;  // the tensor, the copy or the staging buffer
};

class Algorithm {
 public:
  Algorithm() = default;
  virtual ~Algorithm() = default;
  Algorithm(const Algorithm&) = delete;
  Algorithm& operator=(const Algorithm&) = delete;

  // Run an operation whose data all members have copied.
  virtual bool copied() const = 0;
  virtual void run_copied() const = 0;

  // Run any other operation segment by segment. There is one segment if no member's data is staged.
  virtual int64_t segments() const = 0;
  virtual bool staged() const = 0;
  virtual void copy_in(int64_t segment) const = 0;
  virtual void run(int64_t segment) const = 0;
  virtual void copy_out(int64_t segment) const = 0;

  // Memory of `member` that `run` accesses without staging.
  virtual char* memory(size_t member) const = 0;
  virtual ByteRange accessed_range(size_t member) const = 0;
};

// Algorithm of the operations on tensors of equal shapes: all kinds but kExchange.
class TensorAlgorithm : public Algorithm {
 public:
  // `own` is the tensor of this member; `member_data` has one entry for each member. A
  // reduce-scatter writes this member's chunk to `result`, or in place if it is null. `tree` is the
  // association of a reduce-scatter, whose chunks then have rows, or null.
  TensorAlgorithm(
      const Signature& signature, char* own, char* result, size_t index,
      std::vector<MemberData> member_data, std::shared_ptr<const SumTree> tree = nullptr);

  bool copied() const override {
    return is_copied(signature_, members());
  }
  void run_copied() const override;
  int64_t segments() const override {
    return segments_;
  }
  bool staged() const override {
    return staged_;
  }
  void copy_in(int64_t segment) const override;
  void run(int64_t segment) const override;
  void copy_out(int64_t segment) const override;
  char* memory(size_t member) const override {
    return member_data_[member].memory;
  }
  ByteRange accessed_range(size_t member) const override;

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
  // Part of a segment that this member computes in an all-reduce or a reduce.
  UnitRange own_part(UnitRange range) const;
  // Copy a segment of an all-reduce or a reduce to the staging buffer, or back: all that is not
  // direct.
  void copy_segment(int64_t segment, bool in) const;
  // Return the addresses of all summands of this member's chunk, in member order: from `begin` of
  // each row on, or from the staged copies of a segment.
  std::vector<char*> summands(int64_t segment, int64_t begin) const;
  char* at(size_t member, int64_t segment, int64_t unit, int64_t staged_unit) const;
  char* staged_at(size_t member, int64_t segment, int64_t staged_unit) const;
  bool swaps_with(size_t member) const;
  std::vector<char*> results(int64_t begin) const;
  void reduce_into(
      const std::vector<char*>& sources, char* const* targets, size_t n, UnitRange range) const;
  int64_t bytes(int64_t units) const {
    return units * signature_.unit_bytes;
  }
  int64_t chunk() const {
    return signature_.units / static_cast<int64_t>(members());
  }
  // Rows of a chunk, and units of a row. Each member has summands in the first rows.
  int64_t rows() const {
    return tree_ == nullptr ? 1 : tree_->rows();
  }
  int64_t row() const {
    return chunk() / rows();
  }

  Signature signature_;
  char* own_;
  char* result_;
  size_t index_;
  std::vector<MemberData> member_data_;
  std::shared_ptr<const SumTree> tree_;
  bool staged_;
  bool direct_;  // this member's part is not staged
  int64_t segment_units_;
  int64_t segments_;
};

}  // namespace fddp::shm
