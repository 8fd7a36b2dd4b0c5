// Release of a torch.distributed backend on a thread without Python state.
//
// The destructor of gloo waits for pending operations. If a Python thread waits there while the
// interpreter shuts down, it is unwound through the destructor when it reacquires the GIL. This
// aborts the process with SIGABRT instead of its own exit code.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>

namespace py = pybind11;

namespace {

using Backend = c10::intrusive_ptr<c10d::Backend>;

// Owner of a backend in addition to Python, so that Python never drops the last reference.
class BackendRelease {
 public:
  explicit BackendRelease(c10d::Backend& backend)
      : backend_(Backend::unsafe_reclaim_from_nonowning(&backend)),
        done_(std::make_shared<std::atomic<bool>>(false)) {}

  // Drop the reference on another thread, which may wait. Python must have dropped its references.
  void start() {
    if (!backend_) throw std::logic_error("the release of the backend has already started");
    std::thread([backend = std::move(backend_), done = done_]() mutable {
      backend.reset();
      done->store(true);
    }).detach();
  }

  // Never drop the reference. Used in forked processes, which lack the threads that the destructor
  // waits for.
  void leak() {
    backend_.release();
    done_->store(true);
  }

  bool done() const { return done_->load(); }

 private:
  Backend backend_;
  std::shared_ptr<std::atomic<bool>> done_;
};

}  // namespace

void bind_backend_release(py::module_& m) {
  py::class_<BackendRelease>(
      m, "BackendRelease",
      "Reference to a torch.distributed backend, released on a thread without Python state.")
      .def(py::init<c10d::Backend&>(), py::arg("backend"))
      .def("start", torch::wrap_pybind_function(&BackendRelease::start))
      .def("leak", &BackendRelease::leak)
      .def_property_readonly("done", &BackendRelease::done);
}
