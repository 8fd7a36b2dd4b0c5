#include "process_watch.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace fddp::shm {

ProcessWatch::ProcessWatch(const std::vector<int>& pidfds) {
  pidfds_.reserve(pidfds.size());
  for (const int pidfd : pidfds) {
    const int copy = pidfd < 0 ? -1 : fcntl(pidfd, F_DUPFD_CLOEXEC, 0);
    if (pidfd >= 0 && copy < 0) {
      const int error = errno;
      close_all();
      throw std::system_error(error, std::generic_category(), "a pidfd cannot be duplicated");
    }
    pidfds_.push_back(copy);
  }
}

ProcessWatch::~ProcessWatch() {
  close_all();
}

void ProcessWatch::close_all() {
  for (const int pidfd : pidfds_) {
    if (pidfd >= 0) close(pidfd);
  }
}

std::vector<bool> ProcessWatch::exited() const {
  std::vector<pollfd> polled;
  polled.reserve(pidfds_.size());
  for (const int pidfd : pidfds_) polled.push_back({pidfd, POLLIN, 0});
  std::vector<bool> exited(pidfds_.size(), false);
  if (poll(polled.data(), polled.size(), 0) <= 0) return exited;
  for (size_t m = 0; m < polled.size(); ++m) {
    exited[m] = polled[m].fd >= 0 && (polled[m].revents & POLLIN) != 0;
  }
  return exited;
}

}  // namespace fddp::shm
