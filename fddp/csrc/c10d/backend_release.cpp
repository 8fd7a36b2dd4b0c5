// Frees a backend of torch.distributed on a thread of which Python knows nothing.
//
// gloo's destructor waits for pending operations. A Python thread that sits in it while the
// interpreter ends is unwound through it when it asks for Python's lock again, which ends the
// process with SIGABRT in place of its own exit code.

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

// Owns a backend beside Python, so that what Python lets go of is never the last reference.
class Freeing {
 public:
  explicit Freeing(c10d::Backend& backend)
      : backend_(Backend::unsafe_reclaim_from_nonowning(&backend)),
        done_(std::make_shared<std::atomic<bool>>(false)) {}

  // Lets go of it, on another thread, which may wait; Python's references must be gone.
  void begin() {
    if (!backend_) throw std::logic_error("the backend is being freed already");
    std::thread([backend = std::move(backend_), done = done_]() mutable {
      backend.reset();
      done->store(true);
    }).detach();
  }

  // Never lets go of it: a process that was forked off has none of the threads that its destructor
  // waits for.
  void keep() {
    backend_.release();
    done_->store(true);
  }

  bool done() const { return done_->load(); }

 private:
  Backend backend_;
  std::shared_ptr<std::atomic<bool>> done_;
};

}  // namespace

void bind_freeing(py::module_& m) {
  py::class_<Freeing>(m, "Freeing", "A torch.distributed backend that is about to be freed.")
      .def(py::init<c10d::Backend&>(), py::arg("backend"))
      .def("begin", torch::wrap_pybind_function(&Freeing::begin))
      .def("keep", &Freeing::keep)
      .def_property_readonly("done", &Freeing::done);
}
