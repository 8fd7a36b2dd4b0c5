// Completion of a torch.distributed Work, recorded without Python: its time, and the end of its range
// in a profile.
//
// A Python callback would run, and be destroyed, on a thread of the backend, which would need the
// GIL for it. Once the interpreter has shut down, Python ends this thread within a destructor:
// SIGABRT instead of the process's own exit code.

#include "clock.h"
#include "step/profile.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

namespace py = pybind11;

namespace {

constexpr double kPending = std::numeric_limits<double>::infinity();

class CompletionTimestamp {
 public:
  explicit CompletionTimestamp(c10d::Work& work)
      : completed_s_(std::make_shared<std::atomic<double>>(kPending)) {
    work.getFuture()->addCallback([completed_s = completed_s_](c10::ivalue::Future&) {
      completed_s->store(fddp::perf_counter_s());
    });
  }

  std::optional<double> completed_s() const {
    const double completed_s = completed_s_->load();
    return completed_s == kPending ? std::nullopt : std::optional<double>(completed_s);
  }

 private:
  std::shared_ptr<std::atomic<double>> completed_s_;  // the callback may outlive this object
};

// End a range in a profile at the completion of the last of the works.
void end_range_after(
    const std::vector<c10::intrusive_ptr<c10d::Work>>& works,
    std::shared_ptr<fddp::CollectiveRange> range) {
  const auto pending = std::make_shared<std::atomic<size_t>>(works.size());
  for (const auto& work : works) {
    work->getFuture()->addCallback([pending, range](c10::ivalue::Future&) {
      if (--*pending == 0) range->end();
    });
  }
}

}  // namespace

void bind_completion_timestamp(py::module_& m) {
  py::class_<CompletionTimestamp>(
      m, "CompletionTimestamp",
      "Completion time of a torch.distributed Work, whether it succeeded or failed.")
      .def(py::init(torch::wrap_pybind_function(
               [](c10d::Work& work) { return std::make_unique<CompletionTimestamp>(work); })),
           py::arg("work"))
      .def_property_readonly(
          "completed_s", &CompletionTimestamp::completed_s,
          "Seconds on the clock of `time.perf_counter`. None while the Work is pending.");
  m.def(
      "end_range_after", torch::wrap_pybind_function(&end_range_after), py::arg("works"),
      py::arg("range").none(false));
}
