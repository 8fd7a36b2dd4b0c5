// Python bindings of the "fddp" backend, which c10d::Backend makes usable in process groups.

#include "c10d/open_groups.h"
#include "c10d/reconfigurable_backend.h"
#include "c10d/shm_backend.h"
#include "c10d/shm_in_place.h"
#include "shm_ownership.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace fddp {
namespace {

using BackendPtr = c10::intrusive_ptr<ShmBackend>;

shm::Nanoseconds nanoseconds(double seconds) {
  constexpr double kMaxSeconds = 1e9;
  TORCH_CHECK_VALUE(!std::isnan(seconds), "the timeout is NaN");
  return std::chrono::duration_cast<shm::Nanoseconds>(
      shm::Seconds(std::clamp(seconds, 0.0, kMaxSeconds)));
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(nanoseconds(seconds));
}

BackendPtr make_backend(
    const std::shared_ptr<shm::Arena>& arena,
    const std::vector<std::shared_ptr<shm::Mapping>>& views, size_t index,
    uint64_t control_block_offset, double timeout_s, size_t waiters_on_host) {
  TORCH_CHECK_TYPE(arena != nullptr, "the arena is None");
  TORCH_CHECK_VALUE(
      index < views.size(), "index=", index, " with ", views.size(), " views");
  shm::ShmGroupOptions options = {
      arena, views, index, control_block_offset, nanoseconds(timeout_s), waiters_on_host};
  options.mappings[index] = arena->mapping();
  for (const auto& mapping : options.mappings) {
    TORCH_CHECK_VALUE(mapping != nullptr, "views is None for a peer of member ", index);
  }
  const int size = static_cast<int>(views.size());
  auto group = translate_errors([&] { return owned(new shm::ShmGroup(std::move(options))); });
  return c10::make_intrusive<ShmBackend>(
      std::move(group), static_cast<int>(index), size, milliseconds(timeout_s));
}

InPlaceOperation start(
    const ShmBackend& backend, std::string_view kind, const at::Tensor& tensor, int64_t src,
    bool average, bool wait_soon, bool prompt, std::optional<InPlaceOptions::Tree> tree) {
  return start_in_place(
      backend.group(), kind, tensor, {src, average, wait_soon, prompt, std::move(tree)});
}

py::tuple failure_of(const ShmBackend& backend) {
  const shm::Failure failure = backend.group()->failure();
  py::list blamed;
  for (size_t m = 0; m < backend.group()->members(); ++m) {
    if (failure.blamed[m]) blamed.append(m);
  }
  return py::make_tuple(static_cast<int>(failure.status), py::tuple(blamed), failure.reporter);
}

std::vector<std::string> states_of(const ShmBackend& backend) {
  constexpr const char* kNames[] = {"active", "left", "failed"};
  const shm::Members gone = backend.group()->gone();
  std::vector<std::string> states;
  for (size_t m = 0; m < backend.group()->members(); ++m) {
    const auto state = static_cast<size_t>(backend.group()->state(m));
    states.emplace_back(state == 0 && gone[m] ? "ended" : kNames[std::min<size_t>(state, 2)]);
  }
  return states;
}

void fail(const ShmBackend& backend, int status, const std::vector<size_t>& members) {
  const auto cause = static_cast<shm::Status>(status);
  TORCH_CHECK_VALUE(shm::is_failure(cause), "status ", status, " is not a failure of a group");
  shm::Members blamed;
  for (const size_t member : members) {
    TORCH_CHECK_VALUE(
        member < backend.group()->members(), "member ", member, " is not in the group of ",
        backend.group()->members());
    blamed.set(member);
  }
  const py::gil_scoped_release released;
  backend.group()->fail(cause, blamed);
}

void bind_operation(py::module_& m) {
  py::class_<InPlaceOperation>(m, "ShmOperation", "An operation of ShmBackend.start.")
      .def(
          "status_within",
          torch::wrap_pybind_function_no_gil([](const InPlaceOperation& operation, double seconds) {
            return static_cast<int>(operation.status_within(nanoseconds(seconds)));
          }),
          py::arg("seconds"), "Return the status, waiting for at most some seconds.")
      .def_property_readonly("done", &InPlaceOperation::done)
      .def_property_readonly("done_s", &InPlaceOperation::done_s)
      .def("descriptors", &InPlaceOperation::descriptors)
      .def(
          "end_range",
          torch::wrap_pybind_function_no_gil(
              [](const InPlaceOperation& operation, std::shared_ptr<CollectiveRange> range) {
                operation.when_completed([range = std::move(range)] { range->end(); });
              }),
          py::arg("range").none(false));
}

void bind_backend(py::module_& m) {
  py::class_<ShmBackend, c10d::Backend, BackendPtr>(
      m, "ShmBackend", "Backend of torch.distributed over a shared-memory group.")
      .def(
          py::init(torch::wrap_pybind_function(&make_backend)), py::arg("arena"), py::arg("views"),
          py::arg("index"), py::arg("control_block_offset"),
          py::arg("timeout_s"), py::arg("waiters_on_host") = 0)
      .def_static(
          "alone",
          [](double timeout_s) {
            return c10::make_intrusive<ShmBackend>(nullptr, 0, 1, milliseconds(timeout_s));
          },
          py::arg("timeout_s"), "Create the backend of a group of one rank.")
      .def(
          "split",
          [](ShmBackend& backend, const c10::intrusive_ptr<c10d::Store>& store,
             const std::vector<int>& ranks, double timeout_s) {
            return backend.split_in_new_store(*store, ranks, milliseconds(timeout_s));
          },
          py::arg("store"), py::arg("ranks"), py::arg("timeout_s"),
          "Create a backend of some ranks of this one, which meet in a new part of the store.")
      .def(
          "start", torch::wrap_pybind_function(&start), py::arg("kind"), py::arg("tensor"),
          py::arg("src") = 0, py::arg("average") = false, py::arg("wait_soon") = false,
          py::arg("prompt") = false, py::arg("tree") = py::none(),
          "Start an operation on a whole tensor, in place.")
      .def(
          "collectives_of_steps",
          [](const ShmBackend& backend, py::object adopt) {
            return collectives_in_memory(backend.group(), std::move(adopt));
          },
          py::arg("adopt"))
      .def_property_readonly(
          "options", [](ShmBackend& backend) { return backend.getBackendOptions(); },
          "Options with the timeout of the group, as of torch's backends.")
      .def_property_readonly("failure", &failure_of)
      .def_property_readonly("states", &states_of)
      .def("fail", torch::wrap_pybind_function(&fail), py::arg("status"), py::arg("members"))
      .def_property_readonly(
          "staged_operations", &ShmBackend::staged_operations,
          "Number of operations whose data has passed through this rank's staging buffer.");
}

void bind_reconfigurable_backend(py::module_& m) {
  py::class_<ReconfigurableBackend, c10d::Backend, c10::intrusive_ptr<ReconfigurableBackend>>(
      m, "ReconfigurableBackend", "Backend of torch.distributed whose ranks may change.")
      .def(
          py::init([](py::object open, std::string handle, int rank, int size, double timeout_s) {
            return c10::make_intrusive<ReconfigurableBackend>(
                std::move(open), std::move(handle), rank, size, milliseconds(timeout_s));
          }),
          py::arg("open"), py::arg("handle"), py::arg("rank"), py::arg("size"),
          py::arg("timeout_s"))
      .def(
          "reopen",
          torch::wrap_pybind_function_no_gil([](ReconfigurableBackend& backend, int64_t uuid,
                                                const std::vector<std::string>& handles,
                                                double timeout_s) {
            backend.reopen(uuid, handles, milliseconds(timeout_s));
          }),
          py::arg("uuid"), py::arg("handles"), py::arg("timeout_s"),
          "Open a backend for the ranks with these handles, in place of the one opened before.")
      .def_property_readonly("handle", &ReconfigurableBackend::handle)
      .def_property_readonly("opened", &ReconfigurableBackend::opened)
      .def_property_readonly(
          "options", [](ReconfigurableBackend& backend) { return backend.getBackendOptions(); },
          "Options with the timeout of the group, as of torch's backends.");
}

}  // namespace
}  // namespace fddp

void bind_shm_backend(py::module_& m) {
  fddp::bind_operation(m);
  fddp::bind_backend(m);
  fddp::bind_reconfigurable_backend(m);
  m.def(
      "leave_open_groups", &fddp::leave_open_groups,
      "Leave all groups of backends, as `shutdown` does.",
      py::call_guard<py::gil_scoped_release>());
  using fddp::shm::Status;
  m.attr("SHM_PENDING") = static_cast<int>(Status::kPending);
  m.attr("SHM_OK") = static_cast<int>(Status::kOk);
  m.attr("SHM_LOST") = static_cast<int>(Status::kLost);
  m.attr("SHM_TIMEOUT") = static_cast<int>(Status::kTimeout);
  m.attr("SHM_MISMATCH") = static_cast<int>(Status::kMismatch);
  m.attr("SHM_CLOSED") = static_cast<int>(Status::kClosed);
  m.attr("SHM_CORRUPT") = static_cast<int>(Status::kCorrupt);
  m.attr("SHM_PEER_FAILED") = static_cast<int>(Status::kPeerFailed);
}
