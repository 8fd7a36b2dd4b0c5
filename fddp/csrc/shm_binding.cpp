// Python bindings of shm/: arenas that allocate tensors, and groups.

#include "shm/arena.h"
#include "shm/available_memory.h"
#include "shm/shm_group.h"
#include "shm_ownership.h"
#include "shm_tensor.h"
#include "step/collectives.h"
#include "tensor/layout.h"
#include "tensor/number_type.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace fddp::shm {
namespace {

constexpr std::string_view kKindNames[] = {
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "reduce", "exchange"};
constexpr std::string_view kStateNames[] = {"active", "left", "failed"};

// Call `body`. Translate std::invalid_argument to ValueError and std::system_error to OSError.
template <class Body>
auto translate_errors(const Body& body) {
  try {
    return body();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
    throw py::error_already_set();
  } catch (const std::system_error& error) {
    PyErr_SetObject(
        PyExc_OSError, py::make_tuple(error.code().value(), std::string(error.what())).ptr());
    throw py::error_already_set();
  }
}

bool holds(const Arena& arena, const at::Tensor& tensor) {
  return tensor.is_cpu() && arena.mapping()->offset_of(tensor.data_ptr(), tensor.nbytes());
}

std::optional<uint64_t> allocate_zeroed(Arena& arena, uint64_t n_bytes) {
  const auto block = arena.allocate(n_bytes);
  if (!block) return std::nullopt;
  std::memset(arena.mapping()->base() + block->begin, 0, block->bytes);
  return block->begin;
}

char* checked_address(const Mapping& mapping, uint64_t offset, uint64_t n_bytes) {
  TORCH_CHECK_VALUE(
      mapping.contains(offset, n_bytes), n_bytes, " bytes at offset ", offset,
      " lie outside an arena of ", mapping.span(), " bytes");
  return mapping.base() + offset;
}

py::bytes read(const Mapping& mapping, uint64_t offset, uint64_t n_bytes) {
  return {checked_address(mapping, offset, n_bytes), n_bytes};
}

void write(const Mapping& mapping, uint64_t offset, const std::string& data) {
  std::memcpy(checked_address(mapping, offset, data.size()), data.data(), data.size());
}

Kind kind_of(std::string_view name) {
  const auto* const found = std::find(std::begin(kKindNames), std::end(kKindNames), name);
  TORCH_CHECK_VALUE(found != std::end(kKindNames), "unknown operation '", std::string(name), "'");
  return static_cast<Kind>(found - std::begin(kKindNames));
}

Signature signature_of(
    Kind kind, const at::Tensor& tensor, int64_t src, bool average,
    const std::vector<int64_t>& association) {
  Signature signature{};
  signature.kind = kind;
  signature.tag = static_cast<uint32_t>(tensor.scalar_type());
  signature.src = src < 0 || src > UINT32_MAX ? UINT32_MAX : static_cast<uint32_t>(src);
  signature.reduction = average ? Reduction::kAverage : Reduction::kSum;
  const bool sums = is_reduction(kind);
  signature.number_type = sums ? number_type_of(tensor.scalar_type()) : NumberType::kOpaque;
  TORCH_CHECK_TYPE(
      !sums || signature.number_type != NumberType::kOpaque, "cannot sum dtype ",
      tensor.scalar_type());
  signature.unit_bytes = static_cast<uint32_t>(
      sums ? number_bytes(signature.number_type) : static_cast<size_t>(tensor.itemsize()));
  signature.units = tensor.numel() * (sums && tensor.is_complex() ? 2 : 1);
  signature.n_dims = static_cast<uint32_t>(tensor.dim());
  for (size_t d = 0; d < std::min<size_t>(signature.n_dims, Signature::kDims); ++d) {
    signature.dims[d] = tensor.size(static_cast<int64_t>(d));
  }
  TORCH_CHECK_VALUE(
      association.size() <= SumOrder::kAxes, "association has ", association.size(),
      " axes, expected at most ",
      SumOrder::kAxes);
  signature.order.axes = static_cast<uint16_t>(association.size());
  for (size_t a = 0; a < association.size(); ++a) {
    TORCH_CHECK_VALUE(
        association[a] > 0 && association[a] <= UINT16_MAX, "association has an axis of size ",
        association[a]);
    signature.order.sizes[a] = static_cast<uint16_t>(association[a]);
  }
  return signature;
}

// Lists of a tree: the summands of each member, and the additions after each summand.
using TreeLists = std::pair<std::vector<uint32_t>, std::vector<uint32_t>>;

// Return the tree of an operation, and set its order in the signature, which members compare.
std::shared_ptr<const SumTree> tree_of(const TreeLists& lists, Signature& signature) {
  auto tree = std::make_shared<const SumTree>(SumTree{lists.first, lists.second});
  TORCH_CHECK_VALUE(
      !tree->summands.empty() && tree->rows() <= UINT16_MAX, "a tree needs summands");
  signature.order = {};
  signature.order.axes = SumOrder::kTree;
  signature.order.sizes[0] = static_cast<uint16_t>(tree->rows());
  const uint64_t digest = tree->digest();
  for (size_t part = 0; part < 4; ++part) {
    signature.order.sizes[1 + part] = static_cast<uint16_t>(digest >> (16 * part));
  }
  return tree;
}

py::dict describe(const Signature& signature, uint64_t number) {
  py::list shape;
  for (size_t d = 0; d < std::min<size_t>(signature.n_dims, Signature::kDims); ++d) {
    shape.append(signature.dims[d]);
  }
  py::list order;
  const bool is_tree = signature.order.axes == SumOrder::kTree;
  if (is_tree) order.append("of tree");
  for (size_t a = 0; a < std::min<size_t>(signature.order.axes, SumOrder::kAxes); ++a) {
    order.append(signature.order.sizes[a]);
  }
  const auto kind = static_cast<size_t>(signature.kind);
  // A faulty member may have posted an invalid dtype.
  py::object dtype = py::none();
  if (signature.tag < static_cast<uint32_t>(at::ScalarType::NumOptions)) {
    try {
      const auto type = static_cast<at::ScalarType>(signature.tag);
      dtype = py::reinterpret_borrow<py::object>(
          reinterpret_cast<PyObject*>(torch::getTHPDtype(type)));
    } catch (const std::exception&) {
    }
  }
  py::dict result;
  result["kind"] = kind < std::size(kKindNames) ? std::string(kKindNames[kind]) : "unknown";
  result["dtype"] = dtype;
  result["shape"] = py::tuple(shape);
  result["src"] = signature.src;
  result["average"] = signature.reduction == Reduction::kAverage;
  result["association"] = py::tuple(order);
  result["number"] = number;
  return result;
}

Nanoseconds nanoseconds(double seconds) {
  constexpr double kMaxSeconds = 1e9;
  TORCH_CHECK_VALUE(!std::isnan(seconds), "the timeout is NaN");
  return std::chrono::duration_cast<Nanoseconds>(Seconds(std::clamp(seconds, 0.0, kMaxSeconds)));
}

// Operation together with the group that executes it.
class PendingOp {
 public:
  PendingOp(std::shared_ptr<ShmGroup> group, OperationPtr operation)
      : group_(std::move(group)), operation_(std::move(operation)) {}

  // Called without the GIL.
  Status wait(Nanoseconds slice) const {
    const Status status = operation_->status();
    if (status != Status::kPending) return status;
    TORCH_CHECK_VALUE(!group_->is_forked(), kForkedError);
    return group_->wait(*operation_, slice);
  }

  bool done() const {
    return operation_->status() != Status::kPending || group_->done(*operation_);
  }

  std::optional<double> done_s() const {
    if (operation_->status() == Status::kPending) return std::nullopt;
    return Seconds(operation_->completed_at().time_since_epoch()).count();
  }

  uint64_t number() const {
    return operation_->number();
  }

  py::list descriptors() const {
    py::list result;
    if (operation_->status() != Status::kMismatch) return result;
    for (const Signature& signature : operation_->signatures()) {
      result.append(describe(signature, number()));
    }
    return result;
  }

 private:
  std::shared_ptr<ShmGroup> group_;
  OperationPtr operation_;
};

std::optional<uint64_t> make_control_block(Arena& arena, size_t members) {
  return translate_errors([&] { return ShmGroup::make_control_block(arena, members); });
}

std::shared_ptr<ShmGroup> make_group(
    const std::shared_ptr<Arena>& arena, const std::vector<std::shared_ptr<Mapping>>& views,
    size_t index, uint64_t control_block_offset, const std::vector<int>& pidfds, double timeout_s,
    size_t waiters_on_host) {
  TORCH_CHECK_TYPE(arena != nullptr, "the arena is None");
  TORCH_CHECK_VALUE(
      index < views.size() && views.size() == pidfds.size(), "index=", index, " with ",
      views.size(), " views and ", pidfds.size(), " pidfds");
  ShmGroupOptions options = {
      arena, views, index, control_block_offset, pidfds, nanoseconds(timeout_s), waiters_on_host};
  options.mappings[index] = arena->mapping();
  for (const auto& mapping : options.mappings) {
    TORCH_CHECK_VALUE(mapping != nullptr, "views is None for a peer of member ", index);
  }
  return translate_errors([&] {
    return owned(new ShmGroup(std::move(options)));
  });
}

PendingOp start(
    const std::shared_ptr<ShmGroup>& group, std::string_view kind, const at::Tensor& tensor,
    int64_t src, bool average, const std::vector<int64_t>& association, bool wait_soon,
    bool record_time, const std::optional<TreeLists>& tree = std::nullopt) {
  // Python reports the details of unsuitable tensors. The checks here are cheap.
  TORCH_CHECK_VALUE(
      tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
          !tensor.requires_grad() && !tensor.is_conj() && !tensor.is_neg() &&
          !tensor._is_zerotensor(),
      "expected a contiguous CPU tensor that does not require grad");
  check_storage(fits_storage(tensor, tensor.numel()), "the tensor");
  TORCH_CHECK_TYPE(
      !average || tensor.is_floating_point() || tensor.is_complex(), "cannot average dtype ",
      tensor.scalar_type());
  Signature signature = signature_of(kind_of(kind), tensor, src, average, association);
  std::shared_ptr<const SumTree> own_tree;
  if (tree.has_value()) own_tree = tree_of(*tree, signature);
  auto* const data = static_cast<char*>(tensor.data_ptr());
  return translate_errors([&] {
    Request request{
        signature, data, wait_soon, record_time, std::make_shared<at::Tensor>(tensor)};
    request.tree = std::move(own_tree);
    return PendingOp(group, group->start(std::move(request)));
  });
}

py::tuple failure_of(const ShmGroup& group) {
  const Failure failure = group.failure();
  py::list blamed;
  for (size_t m = 0; m < group.members(); ++m) {
    if (failure.blamed[m]) blamed.append(m);
  }
  return py::make_tuple(static_cast<int>(failure.status), py::tuple(blamed), failure.reporter);
}

// Longest wait before Python checks the other ranks, as _CHECK_INTERVAL_S in transport.py.
constexpr auto kCheckInterval = std::chrono::milliseconds(250);

class PendingInMemory : public PendingCollective {
 public:
  explicit PendingInMemory(PendingOp operation) : operation_(std::move(operation)) {}

  bool done() override {
    return operation_.done();
  }
  bool wait(const std::function<std::string()>&) override {
    return operation_.wait(kCheckInterval) == Status::kOk;
  }
  py::object to_python() override {
    return py::cast(operation_);
  }

 private:
  PendingOp operation_;
};

class ShmCollectives : public Collectives {
 public:
  explicit ShmCollectives(std::shared_ptr<ShmGroup> group) : group_(std::move(group)) {}

  std::shared_ptr<PendingCollective> all_reduce(
      const at::Tensor& tensor, bool average, bool wait_soon) override {
    return std::make_shared<PendingInMemory>(
        start(group_, "all_reduce", tensor, 0, average, {}, wait_soon, false));
  }

 private:
  std::shared_ptr<ShmGroup> group_;
};

std::vector<std::string> states_of(const ShmGroup& group) {
  std::vector<std::string> states;
  for (size_t m = 0; m < group.members(); ++m) {
    const auto state = std::min<size_t>(static_cast<size_t>(group.state(m)), 2);
    states.emplace_back(kStateNames[state]);
  }
  return states;
}

void fail_group(ShmGroup& group, int status, const std::vector<size_t>& members) {
  const auto cause = static_cast<Status>(status);
  TORCH_CHECK_VALUE(is_failure(cause), "status ", status, " is not a failure of a group");
  Members blamed;
  for (const size_t member : members) {
    TORCH_CHECK_VALUE(member < group.members(), "member ", member, " is not in the group of ",
                      group.members());
    blamed.set(member);
  }
  const py::gil_scoped_release released;
  group.fail(cause, blamed);
}

void bind_arenas(py::module_& m) {
  py::class_<Arena, std::shared_ptr<Arena>>(m, "ShmArena")
      .def(
          py::init([](uint64_t span_bytes) {
            return translate_errors([&] { return std::make_shared<Arena>(span_bytes); });
          }),
          py::arg("span_bytes") = 0)
      .def_property_readonly("fd", &Arena::fd)
      .def_property_readonly("span", [](const Arena& arena) { return arena.mapping()->span(); })
      .def_property_readonly("reserved", &Arena::reserved)
      .def_property_readonly("used", &Arena::used)
      .def("empty", torch::wrap_pybind_function(&empty_in_arena), py::arg("numel"), py::arg("dtype"))
      .def("holds", torch::wrap_pybind_function(&holds), py::arg("tensor"))
      .def("allocate_zeroed", torch::wrap_pybind_function(&allocate_zeroed), py::arg("n_bytes"))
      .def(
          "make_control_block", torch::wrap_pybind_function(&make_control_block),
          py::arg("members"))
      .def("trim", &Arena::trim)
      .def("close_fd", &Arena::close_fd)
      .def(
          "read",
          torch::wrap_pybind_function([](const Arena& arena, uint64_t offset, uint64_t n_bytes) {
            return read(*arena.mapping(), offset, n_bytes);
          }),
          py::arg("offset"), py::arg("n_bytes"))
      .def(
          "write",
          torch::wrap_pybind_function(
              [](const Arena& arena, uint64_t offset, const std::string& data) {
                write(*arena.mapping(), offset, data);
              }),
          py::arg("offset"), py::arg("data"));
  py::class_<Mapping, std::shared_ptr<Mapping>>(m, "ShmView")
      .def(
          py::init([](int fd, uint64_t span) {
            return translate_errors([&] { return map_peer_arena(fd, span); });
          }),
          py::arg("fd"), py::arg("span"))
      .def_property_readonly("span", &Mapping::span)
      .def("read", torch::wrap_pybind_function(&read), py::arg("offset"), py::arg("n_bytes"))
      .def("write", torch::wrap_pybind_function(&write), py::arg("offset"), py::arg("data"));
}

void bind_groups(py::module_& m) {
  py::class_<PendingOp>(m, "ShmPendingOp")
      .def(
          "wait", torch::wrap_pybind_function_no_gil([](const PendingOp& operation, double slice_s) {
            return static_cast<int>(operation.wait(nanoseconds(slice_s)));
          }),
          py::arg("slice_s"))
      .def_property_readonly("done", &PendingOp::done)
      .def_property_readonly("done_s", &PendingOp::done_s)
      .def_property_readonly("number", &PendingOp::number)
      .def("descriptors", &PendingOp::descriptors);
  py::class_<ShmGroup, std::shared_ptr<ShmGroup>>(m, "ShmGroup")
      .def(
          py::init(torch::wrap_pybind_function(&make_group)), py::arg("arena"), py::arg("views"),
          py::arg("index"), py::arg("control_block_offset"), py::arg("pidfds"),
          py::arg("timeout_s"), py::arg("waiters_on_host") = 0)
      .def(
          "start", torch::wrap_pybind_function(&start), py::arg("kind"), py::arg("tensor"),
          py::arg("src") = 0, py::arg("average") = false,
          py::arg("association") = std::vector<int64_t>{}, py::arg("wait_soon") = false,
          py::arg("record_time") = false, py::arg("tree") = py::none())
      .def_property_readonly("failure", &failure_of)
      .def_property_readonly("states", &states_of)
      .def("fail", torch::wrap_pybind_function(&fail_group), py::arg("status"), py::arg("members"))
      .def("leave", &ShmGroup::leave, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("members", &ShmGroup::members)
      .def_property_readonly("index", &ShmGroup::index);
}

void bind_collectives(py::module_& m) {
  py::class_<ShmCollectives, Collectives, std::shared_ptr<ShmCollectives>>(m, "ShmCollectives")
      .def(py::init<std::shared_ptr<ShmGroup>>(), py::arg("group").none(false));
}

void bind_statuses(py::module_& m) {
  m.def("shm_available_bytes", &available_bytes, py::arg("root") = "");
  m.attr("SHM_PENDING") = static_cast<int>(Status::kPending);
  m.attr("SHM_OK") = static_cast<int>(Status::kOk);
  m.attr("SHM_LOST") = static_cast<int>(Status::kLost);
  m.attr("SHM_TIMEOUT") = static_cast<int>(Status::kTimeout);
  m.attr("SHM_MISMATCH") = static_cast<int>(Status::kMismatch);
  m.attr("SHM_CLOSED") = static_cast<int>(Status::kClosed);
  m.attr("SHM_CORRUPT") = static_cast<int>(Status::kCorrupt);
  m.attr("SHM_PEER_FAILED") = static_cast<int>(Status::kPeerFailed);
}

}  // namespace
}  // namespace fddp::shm

void bind_shm(py::module_& m) {
  fddp::shm::bind_statuses(m);
  fddp::shm::bind_arenas(m);
  fddp::shm::bind_groups(m);
  fddp::shm::bind_collectives(m);
}
