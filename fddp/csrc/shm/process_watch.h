// Liveness of other processes, from the kernel.

#pragma once

#include <cstddef>
#include <vector>

namespace fddp::shm {

// Process descriptors (pidfds), one for each member of a group; -1 for a member that is not
// watched.
class ProcessWatch {
 public:
  // Duplicates the descriptors. Throws std::system_error.
  explicit ProcessWatch(const std::vector<int>& pidfds);
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  // Return true for each member whose process has exited. Zombies count as exited.
  std::vector<bool> exited() const;

  // Descriptors of the processes, valid as long as this object; -1 for those without one.
  const std::vector<int>& pidfds() const {
    return pidfds_;
  }

 private:
  void close_all();

  std::vector<int> pidfds_;
};

}  // namespace fddp::shm
