// Threads that the extension starts for itself.

#pragma once

#include <pthread.h>
#include <signal.h>

namespace fddp::shm {

// Name the calling thread. Signals of the process are handled on the caller's threads.
inline void become_own_thread(const char* name) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  pthread_setname_np(pthread_self(), name);
}

}  // namespace fddp::shm
