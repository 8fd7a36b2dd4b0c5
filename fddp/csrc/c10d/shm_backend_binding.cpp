// Python binding of the "fddp" backend, which c10d::Backend makes usable in process groups.

#include "c10d/open_groups.h"
#include "c10d/shm_backend.h"

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <memory>
#include <vector>

namespace py = pybind11;

void bind_shm_backend(py::module_& m) {
  using fddp::ShmBackend;
  py::class_<ShmBackend, c10d::Backend, c10::intrusive_ptr<ShmBackend>>(
      m, "ShmBackend", "Backend of torch.distributed over a shared-memory group.")
      .def(
          py::init([](std::shared_ptr<fddp::shm::ShmGroup> group, int rank, int size,
                      double timeout_s) {
            const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(
                std::chrono::duration<double>(timeout_s));
            return c10::make_intrusive<ShmBackend>(std::move(group), rank, size, timeout);
          }),
          py::arg("group").none(true), py::arg("rank"), py::arg("size"), py::arg("timeout_s"))
      .def(
          "split",
          [](ShmBackend& backend, const c10::intrusive_ptr<c10d::Store>& store,
             const std::vector<int>& ranks, double timeout_s) {
            const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(
                std::chrono::duration<double>(timeout_s));
            return backend.split(
                store, ranks, c10::make_intrusive<c10d::Backend::Options>("fddp", timeout));
          },
          py::arg("store"), py::arg("ranks"), py::arg("timeout_s"),
          "Create a backend of some ranks of this one, which meet in the store.")
      .def_property_readonly(
          "staged_operations", &ShmBackend::staged_operations,
          "Number of operations whose data has passed through this rank's staging buffer.");
  m.def(
      "leave_open_groups", &fddp::leave_open_groups,
      "Leave all groups of backends, as `shutdown` does.",
      py::call_guard<py::gil_scoped_release>());
}
