// Notes when a work of torch.distributed has ended, without Python.
//
// A callback in Python would run, and be dropped, on the backend's thread, which asks for Python's
// lock for that. Where the interpreter has ended by then, Python ends that thread in the middle of a
// destructor: SIGABRT in place of the process's own exit code.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <optional>

namespace py = pybind11;

namespace {

constexpr double kOpen = std::numeric_limits<double>::infinity();

// The clock of `time.perf_counter`.
double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Stamp {
 public:
  explicit Stamp(c10d::Work& work) : ended_s_(std::make_shared<std::atomic<double>>(kOpen)) {
    work.getFuture()->addCallback([ended_s = ended_s_](c10::ivalue::Future&) { ended_s->store(now_s()); });
  }

  std::optional<double> ended_s() const {
    const double seen_s = ended_s_->load();
    return seen_s == kOpen ? std::nullopt : std::optional<double>(seen_s);
  }

 private:
  std::shared_ptr<std::atomic<double>> ended_s_;  // the callback may outlive this
};

}  // namespace

void bind_stamps(py::module_& m) {
  py::class_<Stamp>(m, "Stamp", "When a work of torch.distributed has ended, well or not.")
      .def(py::init(torch::wrap_pybind_function([](c10d::Work& work) { return std::make_unique<Stamp>(work); })),
           py::arg("work"))
      .def_property_readonly("ended_s", &Stamp::ended_s, "By `time.perf_counter`; None before.");
}
