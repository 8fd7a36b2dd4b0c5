// Waits for a torch.distributed Work that end without a sleep.
//
// gloo sends a small message through four threads: a thread of its own, the receiving thread of the
// other rank, a thread there, and the one that waits. Where processors are idle, each wake-up costs more
// than the message. A rank that polls keeps its processor awake and is ready at once. Between two
// polls it yields the processor to gloo's threads.

#include "shm/futex.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <sched.h>

#include <chrono>
#include <memory>

namespace py = pybind11;

namespace {

class WorkSpin {
 public:
  // Return once the work is completed, whether it succeeded or failed, or a short time has passed.
  void poll(c10d::Work& work) {
    spin_.spin([&work] { return work.isCompleted(); }, [] { sched_yield(); });
  }

 private:
  // Longer than a small all-reduce of two ranks takes within a step.
  fddp::shm::AdaptiveSpin spin_{std::chrono::milliseconds(1)};
};

}  // namespace

void bind_work_spin(py::module_& m) {
  py::class_<WorkSpin>(m, "WorkSpin", "Polls Works of torch.distributed for a short time.")
      .def(py::init<>())
      .def("poll", torch::wrap_pybind_function_no_gil(&WorkSpin::poll), py::arg("work"),
           "Return once the work is completed, or a short time has passed.");
}
