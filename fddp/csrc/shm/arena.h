// Memory of one rank that its peers map, too: an anonymous file, mapped whole, its pages reserved
// as they are needed.
//
// [Note: arenas]
// The file's size is fixed once and sealed, so that no peer can take pages away under another one's
// feet, and is large from the beginning, so that descriptors are passed only once and offsets stay.
// Only pages that were reserved are ever handed out: a machine that has none left says so here, and
// not by a signal in the middle of a step. The file has no name: the kernel frees it with the last
// process that has it open or mapped, however that ends.

#pragma once

#include "allocator.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

namespace fddp::shm {

// Pages are reserved, mapped and given back in stretches of this many bytes.
inline constexpr uint64_t kGranuleBytes = uint64_t{2} << 20;

// An arena's memory in this process, its own or a peer's.
class Mapping {
 public:
  // Throws std::system_error.
  Mapping(int fd, uint64_t span);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* base() const {
    return base_;
  }
  uint64_t span() const {
    return span_;
  }
  // Whether [begin, begin + bytes) lies within; no arithmetic that could overflow.
  bool holds(uint64_t begin, uint64_t bytes) const {
    return begin <= span_ && bytes <= span_ - begin;
  }
  // Where `data` lies, if all of it is in here.
  std::optional<uint64_t> offset_of(const void* data, uint64_t bytes) const;

  // Fills this process's page tables for a range that the arena's owner has reserved: later
  // accesses then take no page faults. Cheap where it was done before.
  void prefault(uint64_t begin, uint64_t bytes);
  // The pages of a granule are new ones.
  void forget(uint64_t granule) {
    faulted_[granule].store(false, std::memory_order_relaxed);
  }

 private:
  char* base_;
  uint64_t span_;
  std::unique_ptr<std::atomic<bool>[]> faulted_;  // by granule
};

// Maps the arena behind a descriptor that a peer sent. Throws std::invalid_argument, with what is
// wrong, for anything but a sealed anonymous file of `span` bytes that belongs to this user.
std::shared_ptr<Mapping> adopt(int fd, uint64_t span);

// An own arena. Threads may use it at once.
class Arena {
 public:
  // `span_bytes` is rounded up to granules; 0: as much as the machine has. Throws
  // std::system_error.
  explicit Arena(uint64_t span_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // A block whose pages are there; none if they can't be had.
  std::optional<Range> take(uint64_t bytes);
  // Frees a block of `take`. In a process that was forked off, nothing happens.
  void give(uint64_t begin) noexcept;

  // After a failure a peer may still write into blocks that were in use: no block that is freed
  // from now on is used again.
  void retire() {
    retired_ = true;
  }

  // Gives pages that no block needs back to the system; how many bytes.
  uint64_t trim();

  const std::shared_ptr<Mapping>& mapping() const {
    return mapping_;
  }
  int fd() const {
    return fd_;
  }
  // Peers that hold the descriptor are not concerned.
  void close_fd();

  uint64_t reserved() const;
  uint64_t used() const;

 private:
  bool is_forked() const;
  bool reserve(Range block);

  int fd_ = -1;
  std::shared_ptr<Mapping> mapping_;
  const int pid_;
  std::atomic<bool> retired_ = false;
  mutable std::mutex mutex_;
  Blocks blocks_;
  std::vector<bool> granules_;  // whether their pages are reserved
  uint64_t reserved_ = 0;
};

}  // namespace fddp::shm
