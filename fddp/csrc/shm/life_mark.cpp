#include "life_mark.h"

#include "own_thread.h"
#include "per_process.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace fddp::shm {
namespace {

// Marks of one thread. The kernel follows 2048 entries.
constexpr size_t kMarks = 1024;

}  // namespace

// Addresses of two equal halves, for the entries and for the words.
class MarkedPages {
 public:
  MarkedPages() : page_bytes_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* const memory = mmap(nullptr, 2 * half_bytes(), PROT_NONE, kFlags, -1, 0);
    if (memory == MAP_FAILED) throw_errno();
    base_ = static_cast<char*>(memory);
    if (mprotect(base_, half_bytes(), PROT_READ | PROT_WRITE) != 0) {
      const std::system_error error(errno, std::generic_category(), kProblem);
      munmap(base_, 2 * half_bytes());
      throw error;
    }
  }
  ~MarkedPages() {
    munmap(base_, 2 * half_bytes());
  }
  MarkedPages(const MarkedPages&) = delete;
  MarkedPages& operator=(const MarkedPages&) = delete;

  // Distance of each word from its entry.
  long distance() const {
    return static_cast<long>(half_bytes());
  }
  // Map the page of a word again, and return its entry.
  robust_list* map(size_t place, std::atomic<uint32_t>& word) {
    const size_t offset = reinterpret_cast<uintptr_t>(&word) % page_bytes_;
    char* const page = reinterpret_cast<char*>(&word) - offset;
    char* const entries = base_ + place * page_bytes_;
    // A size of 0 maps shared pages once more, and keeps the mapping that there is.
    constexpr int kFlags = MREMAP_MAYMOVE | MREMAP_FIXED;
    if (mremap(page, 0, page_bytes_, kFlags, entries + half_bytes()) == MAP_FAILED) throw_errno();
    return new (entries + offset) robust_list{};
  }
  void unmap(size_t place) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    mmap(base_ + half_bytes() + place * page_bytes_, page_bytes_, PROT_NONE, kFlags, -1, 0);
  }

 private:
  static constexpr const char* kProblem = "no addresses are available for the marks of a process";

  [[noreturn]] static void throw_errno() {
    throw std::system_error(errno, std::generic_category(), kProblem);
  }
  size_t half_bytes() const {
    return kMarks * page_bytes_;
  }

  const size_t page_bytes_;
  char* base_ = nullptr;
};

namespace {

void store(robust_list*& link, robust_list* entry) {
  // The process may end at any time.
  std::atomic_ref<robust_list*>(link).store(entry);
}

}  // namespace

// A thread that keeps marks until it is destroyed. All but the constructor with the lock of keepers.
class LifeKeeper {
 public:
  LifeKeeper() : head_{{&head_.list}, pages_.distance(), nullptr}, entries_(kMarks) {
    thread_ = std::thread(&LifeKeeper::run, this);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return thread_id_ != 0; });
  }
  ~LifeKeeper() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  bool is_empty() const {
    return count_ == 0;
  }
  bool is_full() const {
    return count_ == kMarks;
  }
  size_t add(std::atomic<uint32_t>& word) {
    size_t place = 0;
    while (entries_[place] != nullptr) ++place;
    robust_list* const entry = pages_.map(place, word);
    entries_[place] = entry;
    ++count_;
    word.store(thread_id_);
    store(entry->next, head_.list.next);
    store(head_.list.next, entry);
    return place;
  }
  void remove(std::atomic<uint32_t>& word, size_t place) {
    word.store(0);
    robust_list* before = &head_.list;
    while (before->next != entries_[place]) before = before->next;
    store(before->next, before->next->next);
    entries_[place] = nullptr;
    --count_;
    pages_.unmap(place);
  }

 private:
  void run() {
    become_own_thread("fddp-life");
    // This replaces the thread's list of the C library, for robust mutexes, which it does not use.
    syscall(SYS_set_robust_list, &head_, sizeof head_);
    std::unique_lock lock(mutex_);
    thread_id_ = static_cast<uint32_t>(syscall(SYS_gettid));
    changed_.notify_all();
    changed_.wait(lock, [&] { return ends_; });
    syscall(SYS_set_robust_list, nullptr, sizeof head_);
  }

  MarkedPages pages_;
  robust_list_head head_;
  std::vector<robust_list*> entries_;  // by place; null if it is free
  size_t count_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  uint32_t thread_id_ = 0;
  bool ends_ = false;
  std::thread thread_;
};

namespace {

struct LifeKeepers {
  std::mutex mutex;
  std::list<LifeKeeper> keepers;
};

}  // namespace

LifeMark::LifeMark(std::atomic<uint32_t>& word) : word_(word) {
  auto& [mutex, keepers] = of_process<LifeKeepers>();
  const std::lock_guard lock(mutex);
  if (keepers.empty() || keepers.back().is_full()) keepers.emplace_back();
  keeper_ = &keepers.back();
  try {
    place_ = keeper_->add(word);
  } catch (...) {
    keepers.remove_if([](const LifeKeeper& keeper) { return keeper.is_empty(); });
    throw;
  }
}

LifeMark::~LifeMark() {
  auto& [mutex, keepers] = of_process<LifeKeepers>();
  const std::lock_guard lock(mutex);
  keeper_->remove(word_, place_);
  keepers.remove_if([](const LifeKeeper& keeper) { return keeper.is_empty(); });
}

}  // namespace fddp::shm
