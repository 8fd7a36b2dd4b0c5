// Objects of which a process has one.

#pragma once

#include <unistd.h>

#include <atomic>

namespace fddp::shm {

// Return the object of this process, which is never destroyed, because threads may outlive static
// objects. A forked process has none of the threads of the one that it inherits, whose locks may be
// held: it makes another.
template <class Object>
Object& of_process() {
  struct Owned {
    const pid_t pid = getpid();
    Object object;
  };
  static std::atomic<Owned*> current = nullptr;
  Owned* found = current.load();
  while (found == nullptr || found->pid != getpid()) {
    auto* const made = new Owned;
    if (current.compare_exchange_strong(found, made)) return made->object;
    delete made;
  }
  return found->object;
}

}  // namespace fddp::shm
