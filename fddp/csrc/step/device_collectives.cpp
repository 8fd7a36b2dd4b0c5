// All-reduces of steps on an accelerator, by a backend of torch whose works are ordered by streams.

#include <ATen/ops/view_as_real.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "python_entry.h"
#include "shm_ownership.h"
#include "step/collectives.h"

namespace py = pybind11;

namespace fddp {
namespace {

using Backend = c10::intrusive_ptr<c10d::Backend>;
using Work = c10::intrusive_ptr<c10d::Work>;

// A backend of a transport for one type of devices, shared by the programs of the transport.
class StreamBackend {
 public:
  StreamBackend(c10d::Backend& backend, c10::Device device)
      : type_(device.type()), backend_(Backend::unsafe_reclaim_from_nonowning(&backend)) {}
  ~StreamBackend() { close(); }

  bool serves(c10::Device device) const { return device.type() == type_; }

  // Return the backend; null if it is not connected on a device, or the transport was closed.
  Backend connected(c10::Device device) const {
    const std::lock_guard lock(mutex_);
    return has(device) ? backend_ : Backend();
  }
  void note_connected(c10::Device device) {
    const std::lock_guard lock(mutex_);
    if (!has(device)) devices_.push_back(device);
  }

  std::shared_ptr<Work> add(Work work) {
    auto added = std::make_shared<Work>(std::move(work));
    const auto is_over = [](const auto& known) { return known.expired(); };
    const std::lock_guard lock(mutex_);
    works_.erase(std::remove_if(works_.begin(), works_.end(), is_over), works_.end());
    works_.push_back(added);
    ++issued_;
    return added;
  }
  int64_t issued() const { return issued_; }
  // Return true if a work that nobody has waited for has not finished.
  bool in_flight() const {
    std::vector<std::weak_ptr<Work>> works;
    {
      const std::lock_guard lock(mutex_);
      works = works_;
    }
    return std::any_of(works.begin(), works.end(), [](const auto& known) {
      const std::shared_ptr<Work> work = known.lock();
      return work && !(*work)->isCompleted();
    });
  }

  // Release the backend. From now on Python waits, and raises for what has not finished.
  void close() {
    Backend released;
    {
      const std::lock_guard lock(mutex_);
      released = std::move(backend_);
    }
    without_gil([&] { released.reset(); });
  }
  bool is_closed() const {
    const std::lock_guard lock(mutex_);
    return !backend_;
  }

 private:
  bool has(c10::Device device) const { return std::find(devices_.begin(), devices_.end(), device) != devices_.end(); }

  const c10::DeviceType type_;
  mutable std::mutex mutex_;
  Backend backend_;  // null once it was closed
  std::vector<c10::Device> devices_;  // connected by their first operation, in Python
  std::vector<std::weak_ptr<Work>> works_;
  std::atomic<int64_t> issued_ = 0;
};

class PendingOnDevice : public PendingCollective {
 public:
  PendingOnDevice(
      std::shared_ptr<Work> work, std::shared_ptr<const StreamBackend> backend,
      std::shared_ptr<const SharedObject> adopt)
      : work_(std::move(work)), backend_(std::move(backend)), adopt_(std::move(adopt)) {}

  bool done() override { return (*work_)->isCompleted(); }
  // Makes the current stream wait.
  bool wait(const std::function<std::string()>&) override {
    try {
      return (*work_)->wait() && !backend_->is_closed();
    } catch (const std::exception&) {
      return false;
    }
  }
  void end_range(std::shared_ptr<CollectiveRange>) override {}  // torch shows the kernels
  py::object to_python() override { return adopt_->get()(*work_); }

 private:
  const std::shared_ptr<Work> work_;
  const std::shared_ptr<const StreamBackend> backend_;
  const std::shared_ptr<const SharedObject> adopt_;
};

class DeviceCollectives : public Collectives {
 public:
  DeviceCollectives(
      std::shared_ptr<Collectives> elsewhere, std::shared_ptr<Collectives> in_python,
      std::shared_ptr<StreamBackend> backend, bool averages, py::object adopt, py::object fail)
      : elsewhere_(std::move(elsewhere)), in_python_(std::move(in_python)), backend_(std::move(backend)),
        averages_(averages), adopt_(std::make_shared<SharedObject>(std::move(adopt))), fail_(std::move(fail)) {}

  bool takes(c10::Device device) const override { return backend_->serves(device) || elsewhere_->takes(device); }

  std::shared_ptr<PendingCollective> all_reduce(const at::Tensor& tensor, bool average, bool wait_soon) override {
    if (!backend_->serves(tensor.device())) return elsewhere_->all_reduce(tensor, average, wait_soon);
    const Backend backend = backend_->connected(tensor.device());
    if (!backend || (average && !averages_)) {
      auto pending = in_python_->all_reduce(tensor, average, wait_soon);
      backend_->note_connected(tensor.device());
      return pending;
    }
    std::vector<at::Tensor> tensors = {tensor.is_complex() ? at::view_as_real(tensor) : tensor};
    c10d::AllreduceOptions options;
    if (average) options.reduceOp = c10d::ReduceOp::AVG;
    try {
      return std::make_shared<PendingOnDevice>(
          backend_->add(backend->allreduce(tensors, options)), backend_, adopt_);
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      const PythonEntry python;
      torch::translate_exception_to_python(error);
      const py::error_already_set raised;
      fail_.get()(tensor, average, raised.value());  // raises
      throw;
    }
  }

 private:
  const std::shared_ptr<Collectives> elsewhere_, in_python_;
  const std::shared_ptr<StreamBackend> backend_;
  const bool averages_;
  const std::shared_ptr<const SharedObject> adopt_;
  const SharedObject fail_;
};

}  // namespace
}  // namespace fddp

void bind_device_collectives(py::module_& m) {
  using namespace fddp;
  py::class_<StreamBackend, std::shared_ptr<StreamBackend>>(m, "StreamBackend")
      .def(py::init<c10d::Backend&, c10::Device>(), py::arg("backend"), py::arg("device"))
      .def_property_readonly("issued", &StreamBackend::issued)
      .def_property_readonly("in_flight", torch::wrap_pybind_function_no_gil(&StreamBackend::in_flight))
      .def("close", &StreamBackend::close);
  py::class_<DeviceCollectives, Collectives, std::shared_ptr<DeviceCollectives>>(m, "DeviceCollectives")
      .def(
          py::init<std::shared_ptr<Collectives>, std::shared_ptr<Collectives>, std::shared_ptr<StreamBackend>, bool,
                   py::object, py::object>(),
          py::arg("elsewhere").none(false), py::arg("in_python").none(false), py::arg("backend").none(false),
          py::arg("averages"), py::arg("adopt"), py::arg("fail"));
}
