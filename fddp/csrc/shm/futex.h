// Waiting for other processes, and waking them: a futex in shared memory.
//
// [Note: bells]
// Whoever waits looks at what it waits for, says that it sleeps, looks again, and only then sleeps.
// Whoever changes something writes it first and then looks for sleepers. All of it is sequentially
// consistent, so that one of the two sees the other; a change that nobody sleeps for costs no
// system call.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace fddp::shm {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// Lies in shared memory. A sleeper that was killed is counted for ever; that costs its peers a
// system call per change for as long as they take to notice.
struct alignas(64) Bell {
  std::atomic<uint32_t> strokes;
  std::atomic<uint32_t> sleepers;
};

// Wakes all that sleep. What they wait for was written before, sequentially consistent.
void ring(Bell& bell);

// Sleeps until the bell rings or `longest` has passed, unless `ready` holds already. May return
// early.
void sleep_on(
    Bell& bell, std::chrono::nanoseconds longest, bool (*ready)(const void*), const void* of);

template <class Ready>
void sleep_on(Bell& bell, std::chrono::nanoseconds longest, const Ready& ready) {
  sleep_on(
      bell, longest, [](const void* of) { return (*static_cast<const Ready*>(of))(); }, &ready);
}

// Tells the processor that this thread spins.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Looks for `ready` over and over, for at most `longest`; whether it held.
template <class Ready>
bool spin(std::chrono::nanoseconds longest, const Ready& ready) {
  constexpr int kLooksPerClock = 16;
  const auto until = Clock::now() + longest;
  do {
    for (int look = 0; look < kLooksPerClock; ++look) {
      if (ready()) return true;
      relax();
    }
  } while (Clock::now() < until);
  return false;
}

// How long a wait spins before it sleeps. Where others compete for the processors, or peers are far
// behind, spinning only takes their time: the span shrinks as it is spent in vain, and is tried in
// full now and then, so that it comes back.
class Patience {
 public:
  template <class Ready>
  bool spin(const Ready& ready) {
    const bool trial = waits_.fetch_add(1, std::memory_order_relaxed) % kTrialEvery == 0;
    const int64_t span_ns = trial ? kMostNs : span_ns_.load(std::memory_order_relaxed);
    const bool held = shm::spin(std::chrono::nanoseconds(span_ns), ready);
    const int64_t next_ns = held ? (trial ? kMostNs : 2 * span_ns) : span_ns_ / 2;
    span_ns_.store(std::clamp(next_ns, kLeastNs, kMostNs), std::memory_order_relaxed);
    return held;
  }

 private:
  static constexpr int64_t kMostNs = 50'000;  // about twice what a sleep and a waking cost
  static constexpr int64_t kLeastNs = 2'000;
  static constexpr uint32_t kTrialEvery = 16;

  std::atomic<int64_t> span_ns_ = kMostNs;
  std::atomic<uint32_t> waits_ = 1;
};

}  // namespace fddp::shm
