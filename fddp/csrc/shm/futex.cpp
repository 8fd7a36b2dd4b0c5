#include "futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace fddp::shm {
namespace {

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

// Without FUTEX_PRIVATE_FLAG, because waiters may be in other processes.
long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

}  // namespace

void wake_all(EventCount& event) {
  if (event.waiters.load() == 0) return;
  event.sequence.fetch_add(1);
  futex(event.sequence, FUTEX_WAKE, INT_MAX, nullptr);
}

void wait_for(
    EventCount& event, std::chrono::nanoseconds timeout, bool (*ready)(const void*),
    const void* context) {
  const uint32_t sequence = event.sequence.load();
  event.waiters.fetch_add(1);
  if (!ready(context) && timeout.count() > 0) {
    const auto whole = std::chrono::duration_cast<std::chrono::seconds>(timeout);
    const timespec time = {
        static_cast<time_t>(whole.count()), static_cast<long>((timeout - whole).count())};
    futex(event.sequence, FUTEX_WAIT, sequence, &time);
  }
  event.waiters.fetch_sub(1);
}

}  // namespace fddp::shm
