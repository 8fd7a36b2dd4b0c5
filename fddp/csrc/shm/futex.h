// Event count in shared memory, on a futex: waits for other processes and wakes them.
//
// [Note: event counts]
// A waiter checks its condition, registers as a waiter, checks again, and only then sleeps. A
// notifier writes the new state first and then checks for waiters. All of these accesses are
// sequentially consistent, so at least one side sees the other. A notification without waiters
// costs no system call.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace fddp::shm {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// Lives in shared memory. A waiter that was killed stays counted. Until its peers detect the loss,
// each notification costs them a system call.
struct alignas(64) EventCount {
  std::atomic<uint32_t> sequence;
  std::atomic<uint32_t> waiters;
};

// Wake all waiters. The caller has written the new state before, sequentially consistent.
void wake_all(EventCount& event);

// Sleep until the event is notified or `timeout` has passed. Return immediately if
// `ready` returns true. May return spuriously.
void wait_for(
    EventCount& event, std::chrono::nanoseconds timeout, bool (*ready)(const void*),
    const void* context);

template <class Ready>
void wait_for(EventCount& event, std::chrono::nanoseconds timeout, const Ready& ready) {
  wait_for(
      event, timeout,
      [](const void* context) { return (*static_cast<const Ready*>(context))(); }, &ready);
}

// Hint to the processor that this thread spins.
inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Poll `ready` for at most `timeout`. Return true if it became true.
template <class Ready>
bool spin_for(std::chrono::nanoseconds timeout, const Ready& ready) {
  constexpr int kChecksPerClockRead = 16;
  const auto until = Clock::now() + timeout;
  do {
    for (int check = 0; check < kChecksPerClockRead; ++check) {
      if (ready()) return true;
      cpu_relax();
    }
  } while (Clock::now() < until);
  return false;
}

// Adaptive duration of spinning before a sleep. Spinning is wasteful if processors are
// oversubscribed or peers are far behind. The duration therefore shrinks after each unsuccessful
// spin. The maximum is tried again periodically, so that the duration can recover.
class AdaptiveSpin {
 public:
  template <class Ready>
  bool spin(const Ready& ready) {
    const bool trial = waits_.fetch_add(1, std::memory_order_relaxed) % kTrialInterval == 0;
    const int64_t duration_ns = trial ? kMaxNs : duration_ns_.load(std::memory_order_relaxed);
    const bool succeeded = shm::spin_for(std::chrono::nanoseconds(duration_ns), ready);
    const int64_t next_ns = succeeded ? (trial ? kMaxNs : 2 * duration_ns) : duration_ns_ / 2;
    duration_ns_.store(std::clamp(next_ns, kMinNs, kMaxNs), std::memory_order_relaxed);
    return succeeded;
  }

 private:
  // Several times the cost of a sleep and a wake-up: about 25 us, at times hundreds. A rank that was
  // woken is late in its next step. With a shorter spin the other rank would sleep then, and so on in
  // turns.
  static constexpr int64_t kMaxNs = 200'000;
  static constexpr int64_t kMinNs = 2'000;
  static constexpr uint32_t kTrialInterval = 16;

  std::atomic<int64_t> duration_ns_ = kMaxNs;
  std::atomic<uint32_t> waits_ = 1;
};

}  // namespace fddp::shm
