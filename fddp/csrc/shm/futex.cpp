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

// Not FUTEX_PRIVATE_FLAG: sleepers are other processes.
long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* longest) {
  return syscall(SYS_futex, &word, operation, value, longest, nullptr, 0);
}

}  // namespace

void ring(Bell& bell) {
  if (bell.sleepers.load() == 0) return;
  bell.strokes.fetch_add(1);
  futex(bell.strokes, FUTEX_WAKE, INT_MAX, nullptr);
}

void sleep_on(
    Bell& bell, std::chrono::nanoseconds longest, bool (*ready)(const void*), const void* of) {
  const uint32_t strokes = bell.strokes.load();
  bell.sleepers.fetch_add(1);
  if (!ready(of) && longest.count() > 0) {
    const auto whole = std::chrono::duration_cast<std::chrono::seconds>(longest);
    const timespec time = {
        static_cast<time_t>(whole.count()), static_cast<long>((longest - whole).count())};
    futex(bell.strokes, FUTEX_WAIT, strokes, &time);
  }
  bell.sleepers.fetch_sub(1);
}

}  // namespace fddp::shm
