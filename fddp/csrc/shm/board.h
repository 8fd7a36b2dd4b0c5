// The board of a team: what its members tell each other, in the memory of the first one's arena.
//
// Everything on it may have been written by a process that went wrong. So what is read from it is
// copied first and checked then, and leads at worst to wrong numbers or an error, never to memory
// outside the arenas.

#pragma once

#include "futex.h"
#include "sums.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace fddp::shm {

inline constexpr size_t kMostMembers = 256;
// Operations that a member may have announced and others not finished.
inline constexpr uint64_t kRing = 64;

enum class Kind : uint32_t { kAllReduce, kReduceScatter, kAllGather, kBroadcast };
inline constexpr uint32_t kKinds = 4;

// How an operation stands, or ended.
enum class Status : uint32_t {
  kPending,
  kOk,
  kLost,      // members died, or left while they were needed
  kTimeout,   // members did not come in time
  kMismatch,  // members met in different operations: ends this one only
  kClosed,    // this member left
  kBroken,    // the board holds nonsense
  kTold,      // something failed elsewhere
};

// What of an operation must be equal on all members.
struct Terms {
  static constexpr size_t kDims = 6;

  Kind kind;
  Number number;
  uint32_t tag;          // the caller's name for the dtype
  uint32_t src;          // broadcast: who has it
  uint32_t average;      // 0 or 1
  uint32_t unit_bytes;   // bytes of what is never cut: one number, or an opaque element
  int64_t units;         // in the whole tensor
  uint32_t n_dims;       // of the shape; more than kDims are not told
  uint32_t zero;         // no byte is left undefined, because terms are compared as bytes
  int64_t dims[kDims];
  Order order;
  uint16_t zeros;

  uint64_t bytes() const {
    return static_cast<uint64_t>(units) * unit_bytes;
  }
};
static_assert(sizeof(Terms) == 8 * 4 + 8 + 8 * Terms::kDims + 16);  // no padding

inline bool operator==(const Terms& a, const Terms& b) {
  return std::memcmp(&a, &b, sizeof(Terms)) == 0;
}

// Where a member's data for an operation can be read.
enum class Where : uint32_t {
  kArena,   // the tensor itself, at `offset` of its arena
  kCopied,  // a copy of what is sent, at `offset`
  kStaged,  // two buffers for pieces in turn, at `offset`
};

struct Descriptor {
  uint64_t number;  // of the operation, counted from 0
  uint64_t offset;
  Where where;
  uint32_t zero;
  Terms terms;
};

enum class State : uint32_t { kHere, kLeft, kFailed };

// What one member writes and all read.
struct alignas(64) Seat {
  std::atomic<uint64_t> posted;  // operations announced: their descriptors may be read
  std::atomic<uint64_t> phase;   // steps of operations done, counted alike by all members
  alignas(64) std::atomic<State> state;
  std::atomic<Status> status;                          // how it failed
  std::atomic<uint64_t> about[kMostMembers / 64];      // and which members it blames, as bits
  std::atomic<uint64_t> finished;                      // operations that it finished before
  alignas(64) Descriptor ring[kRing];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<State>::is_always_lock_free && std::atomic<Status>::is_always_lock_free);

struct alignas(64) Board {
  static constexpr uint64_t kMagic = 0x6664'6470'2062'6431;

  uint64_t magic;
  uint64_t members;
  Bell bell;

  Seat& seat(size_t member) {
    return reinterpret_cast<Seat*>(this + 1)[member];
  }
  static size_t bytes(size_t members) {
    return sizeof(Board) + members * sizeof(Seat);
  }
};

}  // namespace fddp::shm
