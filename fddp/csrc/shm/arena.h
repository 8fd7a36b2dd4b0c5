// Memory of one rank that its peers map as well: an anonymous file, mapped as a whole, whose pages
// are reserved on demand.
//
// [Note: arenas]
// The size of the file is fixed at creation and sealed, so that no process can truncate it while
// others access it. The file is created large, so that its descriptor is passed only once and
// offsets stay valid. Only reserved pages are allocated to callers: a machine without free pages
// fails here with an error, not later with SIGBUS. The file has no name: the kernel frees it when
// the last process that has it open or mapped ends, however it ends.

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

// Unit in which pages are reserved, prefaulted and returned to the system.
inline constexpr uint64_t kGranuleBytes = uint64_t{2} << 20;

// Mapping of an arena into this process: its own arena or a peer's.
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
  // Return true if [begin, begin + bytes) lies within the arena. Safe against overflow.
  bool contains(uint64_t begin, uint64_t bytes) const {
    return begin <= span_ && bytes <= span_ - begin;
  }
  // Return the offset of `data`, or nullopt unless all of its bytes lie within the arena.
  std::optional<uint64_t> offset_of(const void* data, uint64_t bytes) const;

  // Fill this process's page tables for a range whose pages the owner has reserved, so that later
  // accesses take no page faults. Granules that are already populated are skipped.
  void prefault(uint64_t begin, uint64_t bytes);
  // Mark a granule as not populated, because its pages were replaced.
  void mark_unpopulated(uint64_t granule) {
    populated_[granule].store(false, std::memory_order_relaxed);
  }

 private:
  char* base_;
  uint64_t span_;
  std::unique_ptr<std::atomic<bool>[]> populated_;  // by granule
};

// Map a peer's arena. `fd` must be a sealed anonymous file of `span` bytes that belongs to the
// current user. Throws std::invalid_argument with the reason otherwise.
std::shared_ptr<Mapping> map_peer_arena(int fd, uint64_t span);

// Arena owned by this process. Thread-safe.
class Arena {
 public:
  // `span_bytes` is rounded up to granules; 0 selects the size of physical memory. Throws
  // std::system_error.
  explicit Arena(uint64_t span_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Allocate a block and reserve its pages. Return nullopt if either fails.
  std::optional<ByteRange> allocate(uint64_t bytes);
  // Free a block of `allocate`. No-op in a forked process.
  void free(uint64_t begin) noexcept;

  // Stop reusing freed blocks. Called after a failure, because a peer may still write into blocks
  // that were in use.
  void retire() {
    retired_ = true;
  }

  // Return unused pages to the system. Return the number of bytes.
  uint64_t trim();

  const std::shared_ptr<Mapping>& mapping() const {
    return mapping_;
  }
  int fd() const {
    return fd_;
  }
  // Close this process's descriptor. Descriptors held by peers stay open.
  void close_fd();

  uint64_t reserved() const;
  uint64_t used() const;

 private:
  bool is_forked() const;
  bool reserve(ByteRange block);

  int fd_ = -1;
  std::shared_ptr<Mapping> mapping_;
  const int pid_;
  std::atomic<bool> retired_ = false;
  mutable std::mutex mutex_;
  BlockAllocator allocator_;
  std::vector<bool> granules_;  // true if the pages of a granule are reserved
  uint64_t reserved_ = 0;
};

}  // namespace fddp::shm
