// Whether other processes live, asked of the kernel.

#pragma once

#include <cstddef>
#include <vector>

namespace fddp::shm {

// Descriptors of processes (pidfds), one for each member of a team; -1: not watched.
class Watch {
 public:
  // Duplicates them. Throws std::system_error.
  explicit Watch(const std::vector<int>& pidfds);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Which members have ended; a process that ended and was not waited for yet counts.
  std::vector<bool> dead() const;

 private:
  void close_all();

  std::vector<int> pidfds_;
};

}  // namespace fddp::shm
