// The control block of a group: shared state of all members, in the arena of the first member.
//
// A faulty process may have overwritten any byte of the control block. Readers therefore copy a
// value first and validate the copy. Corrupt values lead to wrong numbers or an error, never to an
// access outside the arenas.

#pragma once

#include "futex.h"
#include "reductions.h"
#include "sums.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace fddp::shm {

inline constexpr uint64_t kCacheLineBytes = 64;
inline constexpr size_t kMaxMembers = 256;
// Maximum number of operations that a member has posted and others have not completed.
inline constexpr uint64_t kRingSlots = 64;

enum class Kind : uint32_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kAllToAll,  // of equal chunks, in place
  kReduce,
  kExchange,  // each member sends a range of bytes to each member; see exchange.h
};
inline constexpr uint32_t kKindCount = 7;

// Return true if the numbers of all members are combined.
constexpr bool is_reduction(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduceScatter || kind == Kind::kReduce;
}
// Return true if the tensor is divided into one chunk per member.
constexpr bool has_chunks(Kind kind) {
  return kind == Kind::kReduceScatter || kind == Kind::kAllGather || kind == Kind::kAllToAll;
}

// Status of an operation, or of a group.
enum class Status : uint32_t {
  kPending,
  kOk,
  kLost,      // members exited, or left while others needed them
  kTimeout,   // members did not post the operation in time
  kMismatch,  // members posted different operations; only this operation fails
  kClosed,    // this member left the group
  kCorrupt,   // the control block contains invalid data
  kPeerFailed,  // a member reported a failure outside of the group
  kNoMemory,    // no pages can be reserved for messages; only this message fails
};

// Return true for the causes that a member can report to its peers.
constexpr bool is_failure(Status status) {
  return status == Status::kLost || status == Status::kTimeout || status == Status::kCorrupt ||
         status == Status::kPeerFailed;
}

// Properties of an operation that must be equal on all members.
struct Signature {
  static constexpr size_t kDims = 6;

  Kind kind;
  NumberType number_type;
  uint32_t tag;         // dtype, as numbered by the caller
  uint32_t src;         // root of a broadcast or of a reduction to one member
  Reduction reduction;
  uint32_t unit_bytes;  // size of one unit: a number, or an opaque element
  int64_t units;        // units in the whole tensor
  uint32_t n_dims;      // dimensions of the shape; only the first kDims are stored
  uint32_t zero;        // explicit padding, because signatures are compared bytewise
  int64_t dims[kDims];
  uint64_t tree;  // digest of the association of a sum; 0 for rank order

  uint64_t bytes() const {
    return static_cast<uint64_t>(units) * unit_bytes;
  }
};
static_assert(sizeof(Signature) == 8 * 4 + 8 + 8 * Signature::kDims + 8);  // no implicit padding

inline bool operator==(const Signature& a, const Signature& b) {
  return std::memcmp(&a, &b, sizeof(Signature)) == 0;
}

// Location of a member's data for an operation; `offset` is relative to the member's arena. That of
// an exchange is the offset of its table; see exchange.h.
enum class DataLocation : uint32_t {
  kArena,   // the tensor itself at `offset`
  kCopied,  // a copy of the sent data at `offset`
  kStaged,  // the double-buffered staging buffer at `offset`
};

struct alignas(64) Descriptor {  // shares no cache line with another
  uint64_t number;  // sequence number of the operation, from 0
  uint64_t offset;
  DataLocation location;
  uint32_t zero;
  Signature signature;
};

enum class MemberState : uint32_t { kActive, kLeft, kFailed };

// State of one member. Written by this member, read by all.
struct alignas(64) MemberSlot {
  std::atomic<uint64_t> posted;  // number of posted operations, whose descriptors may be read
  std::atomic<uint64_t> phase;   // see [Note: phases]
  alignas(64) std::atomic<MemberState> state;
  std::atomic<Status> status;                      // valid if `state` is kFailed
  std::atomic<uint64_t> blamed[kMaxMembers / 64];  // bitset of the members that caused the failure
  std::atomic<uint64_t> completed;                 // operations completed before the failure
  alignas(8) std::atomic<uint32_t> life;           // see LifeMark
  alignas(64) Descriptor ring[kRingSlots];
  EventCount messages;  // a message has arrived, or a peer has made room for one; see messages.h
  std::atomic<uint64_t> outboxes[kMaxMembers];  // by receiver: 1 + offset of the outbox, or 0
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(
    std::atomic<MemberState>::is_always_lock_free && std::atomic<Status>::is_always_lock_free);

struct alignas(64) ControlBlock {
  static constexpr uint64_t kMagic = 0x6664'6470'2062'6431;

  uint64_t magic;
  uint64_t members;
  EventCount event;

  MemberSlot& slot(size_t member) {
    return reinterpret_cast<MemberSlot*>(this + 1)[member];
  }
  static size_t bytes(size_t members) {
    return sizeof(ControlBlock) + members * sizeof(MemberSlot);
  }
};

}  // namespace fddp::shm
