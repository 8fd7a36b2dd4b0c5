// Marks by which other processes see that this one has ended.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace fddp::shm {

class LifeKeeper;

// Marks a word of shared memory, initially 0. The kernel adds FUTEX_OWNER_DIED to the word when this
// process ends, or runs another program; forked processes do not affect it.
//
// [Note: marks of one thread] The kernel does this for a thread that ends, and for a list of words: the
// entry of each word lies at one distance from it, the same for all. Entries are kept in private memory,
// as peers may overwrite what is shared. So one thread keeps all marks of a process, in a range of
// addresses of two halves: each entry is in a page of the first, and the page of its word is mapped a
// second time into the same place of the second.
class LifeMark {
 public:
  // Throws std::system_error if no thread or no addresses are available.
  explicit LifeMark(std::atomic<uint32_t>& word);
  // Clear the word.
  ~LifeMark();
  LifeMark(const LifeMark&) = delete;
  LifeMark& operator=(const LifeMark&) = delete;

 private:
  std::atomic<uint32_t>& word_;
  LifeKeeper* keeper_;  // the thread
  size_t place_;        // of the entry and the word, among the pages of the keeper
};

}  // namespace fddp::shm
