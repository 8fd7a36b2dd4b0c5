#include "process_watch.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace fddp::shm {

Watch::Watch(const std::vector<int>& pidfds) {
  pidfds_.reserve(pidfds.size());
  for (const int pidfd : pidfds) {
    const int copy = pidfd < 0 ? -1 : fcntl(pidfd, F_DUPFD_CLOEXEC, 0);
    if (pidfd >= 0 && copy < 0) {
      const int error = errno;
      close_all();
      throw std::system_error(error, std::generic_category(), "a pidfd can't be duplicated");
    }
    pidfds_.push_back(copy);
  }
}

Watch::~Watch() {
  close_all();
}

void Watch::close_all() {
  for (const int pidfd : pidfds_) {
    if (pidfd >= 0) close(pidfd);
  }
}

std::vector<bool> Watch::dead() const {
  std::vector<pollfd> polled;
  polled.reserve(pidfds_.size());
  for (const int pidfd : pidfds_) polled.push_back({pidfd, POLLIN, 0});
  std::vector<bool> dead(pidfds_.size(), false);
  if (poll(polled.data(), polled.size(), 0) <= 0) return dead;
  for (size_t m = 0; m < polled.size(); ++m) {
    dead[m] = polled[m].fd >= 0 && (polled[m].revents & POLLIN) != 0;
  }
  return dead;
}

}  // namespace fddp::shm
