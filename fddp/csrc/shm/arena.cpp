#include "arena.h"

#include "available_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

// Available since Linux 5.14. Older headers lack the constant; older kernels reject it, which is
// harmless.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace fddp::shm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr uint64_t kPageBytes = 4096;
// Blocks of at least this size are aligned to pages.
constexpr uint64_t kLargeBytes = uint64_t{64} << 10;
// Available memory that is never reserved.
constexpr uint64_t kSpareBytes = uint64_t{32} << 20;
constexpr uint64_t kMaxSpan = uint64_t{1} << 46;

[[noreturn]] void throw_errno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

uint64_t physical_memory_bytes() {
  const int64_t pages = sysconf(_SC_PHYS_PAGES);
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page_bytes <= 0) return uint64_t{1} << 34;
  return static_cast<uint64_t>(pages) * static_cast<uint64_t>(page_bytes);
}

// Exceeding a limit on file sizes raises SIGXFSZ, which ends the process.
void check_file_limit(uint64_t span) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      limit.rlim_cur < span) {
    errno = EFBIG;
    throw_errno("the arena exceeds the limit on file sizes (RLIMIT_FSIZE)");
  }
}

int make_file(uint64_t span) {
  check_file_limit(span);
  const int fd = memfd_create("fddp", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw_errno("memfd_create");
  // memfd_create grants access to all users. A user who can reach the descriptor could reopen it.
  if (fchmod(fd, 0600) != 0 || ftruncate(fd, static_cast<off_t>(span)) != 0 ||
      fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    throw_errno("the file of the arena cannot be resized or sealed");
  }
  return fd;
}

uint64_t rounded_span(uint64_t span_bytes) {
  // Address space is limited as well. It must hold the arenas of many ranks and transports.
  constexpr uint64_t kDefaultMax = uint64_t{1} << 38;
  const uint64_t wanted =
      span_bytes == 0 ? std::min(physical_memory_bytes(), kDefaultMax) : span_bytes;
  if (wanted > kMaxSpan) {
    throw std::invalid_argument(
        "span_bytes=" + std::to_string(wanted) + ": an arena has at most 2^46 bytes");
  }
  return (wanted + kGranuleBytes - 1) / kGranuleBytes * kGranuleBytes;
}

int allocate_pages(int fd, uint64_t begin, uint64_t bytes) {
  int result;
  do {
    result = fallocate(fd, 0, static_cast<off_t>(begin), static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  return result;
}

}  // namespace

Mapping::Mapping(int fd, uint64_t span)
    : span_(span), populated_(new std::atomic<bool>[span / kGranuleBytes + 1]()) {
  void* const memory = mmap(nullptr, span, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) throw_errno("the arena cannot be mapped");
  base_ = static_cast<char*>(memory);
  madvise(memory, span, MADV_DONTDUMP);
  madvise(memory, span, MADV_HUGEPAGE);  // where the administrator allows it
}

Mapping::~Mapping() {
  munmap(base_, span_);
}

std::optional<uint64_t> Mapping::offset_of(const void* data, uint64_t bytes) const {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const auto base = reinterpret_cast<uintptr_t>(base_);
  if (address < base || !contains(address - base, bytes)) return std::nullopt;
  return address - base;
}

void Mapping::prefault(uint64_t begin, uint64_t bytes) {
  if (bytes == 0 || !contains(begin, bytes)) return;
  for (uint64_t g = begin / kGranuleBytes; g <= (begin + bytes - 1) / kGranuleBytes; ++g) {
    if (populated_[g].load(std::memory_order_relaxed)) continue;
    populated_[g].store(true, std::memory_order_relaxed);
    const uint64_t end = std::min((g + 1) * kGranuleBytes, span_);
    madvise(base_ + g * kGranuleBytes, end - g * kGranuleBytes, MADV_POPULATE_WRITE);
  }
}

std::shared_ptr<Mapping> map_peer_arena(int fd, uint64_t span) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) throw std::invalid_argument("the descriptor does not refer to an anonymous file");
  if ((seals & kSeals) != kSeals) {
    throw std::invalid_argument(
        "the file's size is not sealed (seals " + std::to_string(seals) + ")");
  }
  struct stat status{};
  if (fstat(fd, &status) != 0) throw_errno("fstat");
  if (status.st_uid != geteuid()) {
    throw std::invalid_argument(
        "the file belongs to user " + std::to_string(status.st_uid) + ", this process to user " +
        std::to_string(geteuid()));
  }
  // Bookkeeping of a mapping grows with its span.
  if (span > kMaxSpan) {
    throw std::invalid_argument(
        "the span of " + std::to_string(span) + " bytes is invalid: an arena has at most 2^46");
  }
  if (status.st_size < 0 || static_cast<uint64_t>(status.st_size) != span || span == 0) {
    throw std::invalid_argument(
        "the file has " + std::to_string(status.st_size) + " bytes, expected " +
        std::to_string(span));
  }
  return std::make_shared<Mapping>(fd, span);
}

Arena::Arena(uint64_t span_bytes)
    : pid_(getpid()), allocator_(rounded_span(span_bytes)) {
  const uint64_t span = rounded_span(span_bytes);
  fd_ = make_file(span);
  try {
    mapping_ = std::make_shared<Mapping>(fd_, span);
    granules_.resize(span / kGranuleBytes);
  } catch (...) {
    close_fd();
    throw;
  }
}

Arena::~Arena() {
  close_fd();
}

void Arena::close_fd() {
  // Without the descriptor no further pages can be reserved. Reserved pages stay.
  const std::lock_guard lock(mutex_);
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

std::optional<ByteRange> Arena::allocate(uint64_t bytes) {
  if (is_forked()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  const uint64_t alignment = bytes < kLargeBytes ? BlockAllocator::kAlignment : kPageBytes;
  const auto block = allocator_.allocate(bytes, alignment);
  if (block && !reserve(*block)) {
    allocator_.free(block->begin);
    return std::nullopt;
  }
  return block;
}

void Arena::free(uint64_t begin) noexcept {
  if (is_forked() || retired_) return;
  const std::lock_guard lock(mutex_);
  allocator_.free(begin);
}

bool Arena::reserve(ByteRange block) {
  const uint64_t first = block.begin / kGranuleBytes;
  const uint64_t last = (block.end() - 1) / kGranuleBytes;
  uint64_t missing = 0;
  for (uint64_t g = first; g <= last; ++g) missing += granules_[g] ? 0 : kGranuleBytes;
  if (missing == 0) return true;
  // Without free pages the kernel kills a process instead of returning an error.
  const uint64_t available = available_bytes();
  if (fd_ < 0 || missing > available || available - missing < kSpareBytes) return false;
  for (uint64_t g = first; g <= last; ++g) {
    if (granules_[g]) continue;
    if (allocate_pages(fd_, g * kGranuleBytes, kGranuleBytes) != 0) return false;
    granules_[g] = true;
    reserved_ += kGranuleBytes;
    mapping_->mark_unpopulated(g);
  }
  mapping_->prefault(block.begin, block.bytes);
  return true;
}

// A forked process shares the memory with its parent, and the mutex may have been locked at the
// fork.
bool Arena::is_forked() const {
  return getpid() != pid_;
}

uint64_t Arena::trim() {
  if (is_forked()) return 0;
  const std::lock_guard lock(mutex_);
  uint64_t returned = 0;
  if (fd_ < 0 || retired_) return 0;
  for (const ByteRange& range : allocator_.free_ranges()) {
    const uint64_t first = (range.begin + kGranuleBytes - 1) / kGranuleBytes;
    const uint64_t end = range.end() / kGranuleBytes;
    for (uint64_t g = first; g < end; ++g) {
      if (!granules_[g]) continue;
      constexpr int kMode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
      const auto begin = static_cast<off_t>(g * kGranuleBytes);
      if (fallocate(fd_, kMode, begin, static_cast<off_t>(kGranuleBytes)) != 0) continue;
      granules_[g] = false;
      reserved_ -= kGranuleBytes;
      returned += kGranuleBytes;
    }
  }
  return returned;
}

uint64_t Arena::reserved() const {
  const std::lock_guard lock(mutex_);
  return reserved_;
}

uint64_t Arena::used() const {
  const std::lock_guard lock(mutex_);
  return allocator_.used();
}

}  // namespace fddp::shm
