// Python binding of the "fddp" backend over several hosts.

#include "c10d/hosts_backend.h"
#include "c10d/hosts_runtime.h"
#include "shm_ownership.h"

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <memory>

namespace py = pybind11;

void bind_hosts_backend(py::module_& m) {
  using fddp::HostsBackend;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  py::class_<HostsBackend, c10d::Backend, c10::intrusive_ptr<HostsBackend>>(
      m, "HostsBackend",
      "Backend of torch.distributed over shared memory within hosts and gloo between them.")
      .def(
          py::init([](const std::shared_ptr<fddp::shm::ShmGroup>& group,
                      const c10::intrusive_ptr<fddp::ShmBackend>& within,
                      const BackendPtr& across, const BackendPtr& whole,
                      const c10::intrusive_ptr<c10d::Store>& store, double timeout_s) {
            const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(
                std::chrono::duration<double>(timeout_s));
            return c10::make_intrusive<HostsBackend>(
                fddp::HostLevels{within, group, across, whole}, store, timeout);
          }),
          py::arg("group"), py::arg("within"), py::arg("across"), py::arg("whole"),
          py::arg("store"), py::arg("timeout_s"))
      .def_static(
          "close_all", [] { fddp::without_gil([] { fddp::HostsRuntime::close_all(); }); },
          "Close all groups of this process.");
}
