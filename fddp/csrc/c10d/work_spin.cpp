// Polls of a torch.distributed Work before its waiter sleeps.
//
// gloo sends a small message through four threads: one of its own, the receiver of the other rank, a
// thread there, and the one that waits. Where processors are idle, each wake-up costs more than the
// message. A rank that polls keeps its processor awake, and is ready at once. Between two polls it yields
// the processor to gloo's threads.

#include "clock.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <sched.h>

#include <algorithm>
#include <mutex>

namespace py = pybind11;

namespace {

class WorkSpin {
 public:
  // Return once the work is completed, whether it succeeded or failed, or a short time has passed.
  //
  // A poll fails if the time has passed, and if a yield takes long: then another program has work for
  // this processor, and a thread that yields gets it back later than one that was asleep. After each
  // failure twice as many waits make no poll.
  void poll(c10d::Work& work) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (skipped_ > 0) {
        --skipped_;
        return;
      }
    }
    const bool has_succeeded = completes_soon(work);
    const std::lock_guard<std::mutex> lock(mutex_);
    pause_ = has_succeeded ? 0 : std::min(2 * pause_ + 1, kLongestPause);
    skipped_ = pause_;
  }

 private:
  static constexpr double kLongest_s = 1e-3;  // longer than a small all-reduce within a step takes
  static constexpr double kLongestYield_s = 2e-4;
  static constexpr int kLongestPause = 255;

  static bool completes_soon(c10d::Work& work) {
    const double start_s = fddp::perf_counter_s();
    double before_s = start_s;
    while (!work.isCompleted()) {
      sched_yield();
      const double now_s = fddp::perf_counter_s();
      if (now_s - before_s > kLongestYield_s || now_s - start_s > kLongest_s) return false;
      before_s = now_s;
    }
    return true;
  }

  std::mutex mutex_;  // waits of several threads
  int pause_ = 0;     // waits without a poll after the last one that made a poll
  int skipped_ = 0;   // waits without a poll from now on
};

}  // namespace

void bind_work_spin(py::module_& m) {
  py::class_<WorkSpin>(m, "WorkSpin", "Polls Works of torch.distributed for a short time.")
      .def(py::init<>())
      .def("poll", torch::wrap_pybind_function_no_gil(&WorkSpin::poll), py::arg("work"),
           "Return once the work is completed, or a short time has passed.");
}
