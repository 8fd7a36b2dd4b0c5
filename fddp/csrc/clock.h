// Clock of Python's time.perf_counter.

#pragma once

#include <chrono>

namespace fddp {

inline double perf_counter_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace fddp
