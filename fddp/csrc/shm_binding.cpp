// Arenas as tensors, teams as objects; what they are is in shm/.

#include "shm/arena.h"
#include "shm/budget.h"
#include "shm/team.h"

#include <ATen/ATen.h>
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
#include <thread>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace fddp::shm {
namespace {

constexpr std::string_view kKindNames[] = {
    "all_reduce", "reduce_scatter", "all_gather", "broadcast"};
constexpr std::string_view kStateNames[] = {"here", "left", "failed"};

// Runs `body`; what the core refuses becomes ValueError, errors of the system OSError.
template <class Body>
auto translated(const Body& body) {
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

// A block of an arena that a tensor's storage owns.
struct Loan {
  std::shared_ptr<Arena> arena;
  uint64_t begin;

  ~Loan() {
    arena->give(begin);
  }
};

std::optional<at::Tensor> empty(
    const std::shared_ptr<Arena>& arena, int64_t numel, at::ScalarType dtype) {
  const auto item_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  TORCH_CHECK_VALUE(
      numel >= 0 && numel <= std::numeric_limits<int64_t>::max() / item_bytes, "numel=", numel,
      " is no number of elements");
  const auto options = at::TensorOptions().dtype(dtype);
  if (numel == 0) return at::empty({0}, options);
  std::optional<Range> block;
  {
    const py::gil_scoped_release released;
    block = arena->take(static_cast<uint64_t>(numel * item_bytes));
  }
  if (!block) return std::nullopt;
  auto loan = std::make_unique<Loan>(arena, block->begin);
  char* const data = arena->mapping()->base() + block->begin;
  at::Tensor tensor = at::from_blob(
      data, {numel}, [owner = loan.get()](void*) { delete owner; }, options);
  loan.release();
  return tensor;
}

bool holds(const Arena& arena, const at::Tensor& tensor) {
  return tensor.is_cpu() && arena.mapping()->offset_of(tensor.data_ptr(), tensor.nbytes());
}

std::optional<uint64_t> zeroed_block(Arena& arena, uint64_t n_bytes) {
  const auto block = arena.take(n_bytes);
  if (!block) return std::nullopt;
  std::memset(arena.mapping()->base() + block->begin, 0, block->bytes);
  return block->begin;
}

char* checked(const Mapping& mapping, uint64_t offset, uint64_t n_bytes) {
  TORCH_CHECK_VALUE(
      mapping.holds(offset, n_bytes), n_bytes, " bytes at offset ", offset,
      " lie outside an arena of ", mapping.span());
  return mapping.base() + offset;
}

py::bytes read(const Mapping& mapping, uint64_t offset, uint64_t n_bytes) {
  return {checked(mapping, offset, n_bytes), n_bytes};
}

void write(const Mapping& mapping, uint64_t offset, const std::string& data) {
  std::memcpy(checked(mapping, offset, data.size()), data.data(), data.size());
}

Number number_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
    case at::kComplexDouble:
      return Number::kF64;
    case at::kFloat:
    case at::kComplexFloat:
      return Number::kF32;
    case at::kHalf:
      return Number::kF16;
    case at::kBFloat16:
      return Number::kBF16;
    case at::kByte:
      return Number::kU8;
    case at::kChar:
      return Number::kI8;
    case at::kInt:
      return Number::kI32;
    case at::kLong:
      return Number::kI64;
    default:
      return Number::kOpaque;
  }
}

Kind kind_of(std::string_view name) {
  const auto* const found = std::find(std::begin(kKindNames), std::end(kKindNames), name);
  TORCH_CHECK_VALUE(found != std::end(kKindNames), "there is no operation ", std::string(name));
  return static_cast<Kind>(found - std::begin(kKindNames));
}

Terms terms_of(
    Kind kind, const at::Tensor& tensor, int64_t src, bool average,
    const std::vector<int64_t>& order) {
  Terms terms{};
  terms.kind = kind;
  terms.tag = static_cast<uint32_t>(tensor.scalar_type());
  terms.src = src < 0 || src > UINT32_MAX ? UINT32_MAX : static_cast<uint32_t>(src);
  terms.average = average ? 1 : 0;
  const bool sums = kind == Kind::kAllReduce || kind == Kind::kReduceScatter;
  terms.number = sums ? number_of(tensor.scalar_type()) : Number::kOpaque;
  TORCH_CHECK_TYPE(
      !sums || terms.number != Number::kOpaque, "no sums of ", tensor.scalar_type());
  terms.unit_bytes = static_cast<uint32_t>(
      sums ? number_bytes(terms.number) : static_cast<size_t>(tensor.itemsize()));
  terms.units = tensor.numel() * (sums && tensor.is_complex() ? 2 : 1);
  terms.n_dims = static_cast<uint32_t>(tensor.dim());
  for (size_t d = 0; d < std::min<size_t>(terms.n_dims, Terms::kDims); ++d) {
    terms.dims[d] = tensor.size(static_cast<int64_t>(d));
  }
  TORCH_CHECK_VALUE(order.size() <= Order::kAxes, "order has more than ", Order::kAxes, " axes");
  terms.order.axes = static_cast<uint16_t>(order.size());
  for (size_t a = 0; a < order.size(); ++a) {
    TORCH_CHECK_VALUE(order[a] > 0 && order[a] <= UINT16_MAX, "order has an axis of ", order[a]);
    terms.order.sizes[a] = static_cast<uint16_t>(order[a]);
  }
  return terms;
}

py::dict described(const Terms& terms, uint64_t number) {
  py::list shape;
  for (size_t d = 0; d < std::min<size_t>(terms.n_dims, Terms::kDims); ++d) {
    shape.append(terms.dims[d]);
  }
  py::list order;
  for (size_t a = 0; a < std::min<size_t>(terms.order.axes, Order::kAxes); ++a) {
    order.append(terms.order.sizes[a]);
  }
  const auto kind = static_cast<size_t>(terms.kind);
  // A member that went wrong may have told a dtype that there is none of.
  py::object dtype = py::none();
  if (terms.tag < static_cast<uint32_t>(at::ScalarType::NumOptions)) {
    try {
      dtype = py::reinterpret_borrow<py::object>(
          reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<at::ScalarType>(terms.tag))));
    } catch (const std::exception&) {
    }
  }
  py::dict result;
  result["kind"] = kind < std::size(kKindNames) ? std::string(kKindNames[kind]) : "unknown";
  result["dtype"] = dtype;
  result["shape"] = py::tuple(shape);
  result["src"] = terms.src;
  result["average"] = terms.average != 0;
  result["order"] = py::tuple(order);
  result["number"] = number;
  return result;
}

Nanoseconds nanoseconds(double seconds) {
  constexpr double kLongest = 1e9;
  TORCH_CHECK_VALUE(!std::isnan(seconds), "a time of NaN seconds");
  return std::chrono::duration_cast<Nanoseconds>(Seconds(std::clamp(seconds, 0.0, kLongest)));
}

// An operation, and the team that it needs.
class Op {
 public:
  Op(std::shared_ptr<Team> team, OperationPtr operation)
      : team_(std::move(team)), operation_(std::move(operation)) {}

  int wait(double slice_s) const {
    Status status = operation_->status();
    if (status == Status::kPending) {
      TORCH_CHECK_VALUE(!team_->is_forked(), "a team is its process's, not that of a fork");
      const py::gil_scoped_release released;
      status = team_->wait(*operation_, nanoseconds(slice_s));
    }
    return static_cast<int>(status);
  }

  bool done() const {
    return operation_->status() != Status::kPending || team_->done(*operation_);
  }

  std::optional<double> done_s() const {
    if (operation_->status() == Status::kPending) return std::nullopt;
    return Seconds(operation_->ended_at().time_since_epoch()).count();
  }

  uint64_t number() const {
    return operation_->number();
  }

  py::list descriptors() const {
    py::list result;
    if (operation_->status() != Status::kMismatch) return result;
    for (const Terms& terms : operation_->met()) result.append(described(terms, number()));
    return result;
  }

 private:
  std::shared_ptr<Team> team_;
  OperationPtr operation_;
};

// The thread of a team drops tensors, for which it may need the interpreter's lock; and a process
// that was forked off has no such thread, so that it lets the team be.
void drop_team(Team* team) {
  if (team->is_forked()) return;
  if (team->is_own_thread()) {
    // It can't wait for its own end.
    std::thread([team] { delete team; }).detach();
  } else if (PyGILState_Check() != 0) {
    const py::gil_scoped_release released;
    delete team;
  } else {
    delete team;
  }
}

std::optional<uint64_t> make_board(Arena& arena, size_t members) {
  return translated([&] { return Team::make_board(arena, members); });
}

std::shared_ptr<Team> make_team(
    const std::shared_ptr<Arena>& arena, const std::vector<std::shared_ptr<Mapping>>& views,
    size_t index, uint64_t board_offset, const std::vector<int>& pidfds, double timeout_s,
    size_t crowd) {
  TORCH_CHECK_TYPE(arena != nullptr, "the arena is None");
  TORCH_CHECK_VALUE(
      index < views.size() && views.size() == pidfds.size(), "index=", index, " with ",
      views.size(), " views and ", pidfds.size(), " pidfds");
  TeamOptions options = {
      arena, views, index, board_offset, pidfds, nanoseconds(timeout_s), crowd};
  options.mappings[index] = arena->mapping();
  for (const auto& mapping : options.mappings) {
    TORCH_CHECK_VALUE(mapping != nullptr, "a peer of member ", index, " has no view");
  }
  return translated([&] {
    return std::shared_ptr<Team>(new Team(std::move(options)), &drop_team);
  });
}

Op start(
    const std::shared_ptr<Team>& team, std::string_view kind, const at::Tensor& tensor,
    int64_t src, bool average, const std::vector<int64_t>& order, bool soon, bool stamp) {
  // What is wrong with a tensor is said in Python; here it takes no time to see that something is.
  TORCH_CHECK_VALUE(
      tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
          !tensor.requires_grad() && !tensor.is_conj() && !tensor.is_neg() &&
          !tensor._is_zerotensor(),
      "pass a contiguous tensor of the CPU that needs no gradient");
  TORCH_CHECK_VALUE(
      tensor.numel() == 0 ||
          static_cast<size_t>(tensor.storage_offset() + tensor.numel()) * tensor.itemsize() <= tensor.storage().nbytes(),
      "the tensor has less memory than elements: its storage was resized");
  TORCH_CHECK_TYPE(
      !average || tensor.is_floating_point() || tensor.is_complex(), "no averages of ",
      tensor.scalar_type());
  const Terms terms = terms_of(kind_of(kind), tensor, src, average, order);
  auto* const data = static_cast<char*>(tensor.data_ptr());
  return translated([&] {
    return Op(team, team->start({terms, data, soon, stamp, std::make_shared<at::Tensor>(tensor)}));
  });
}

py::tuple failure_of(const Team& team) {
  const Failure failure = team.failure();
  py::list about;
  for (size_t m = 0; m < team.members(); ++m) {
    if (failure.about[m]) about.append(m);
  }
  return py::make_tuple(static_cast<int>(failure.status), py::tuple(about), failure.teller);
}

std::vector<std::string> states_of(const Team& team) {
  std::vector<std::string> states;
  for (size_t m = 0; m < team.members(); ++m) {
    const auto state = std::min<size_t>(static_cast<size_t>(team.state(m)), 2);
    states.emplace_back(kStateNames[state]);
  }
  return states;
}

void fail_team(Team& team, int status, const std::vector<size_t>& members) {
  const auto told = static_cast<Status>(status);
  const bool known = told == Status::kLost || told == Status::kTimeout || told == Status::kBroken ||
                     told == Status::kTold;
  TORCH_CHECK_VALUE(known, "status ", status, " does not end a team");
  Members about;
  for (const size_t member : members) {
    TORCH_CHECK_VALUE(member < team.members(), member, " is no member");
    about.set(member);
  }
  const py::gil_scoped_release released;
  team.fail(told, about);
}

void bind_arenas(py::module_& m) {
  py::class_<Arena, std::shared_ptr<Arena>>(m, "ShmArena")
      .def(
          py::init([](uint64_t span_bytes) {
            return translated([&] { return std::make_shared<Arena>(span_bytes); });
          }),
          py::arg("span_bytes") = 0)
      .def_property_readonly("fd", &Arena::fd)
      .def_property_readonly("span", [](const Arena& arena) { return arena.mapping()->span(); })
      .def_property_readonly("reserved", &Arena::reserved)
      .def_property_readonly("used", &Arena::used)
      .def("empty", torch::wrap_pybind_function(&empty), py::arg("numel"), py::arg("dtype"))
      .def("holds", torch::wrap_pybind_function(&holds), py::arg("tensor"))
      .def("block", torch::wrap_pybind_function(&zeroed_block), py::arg("n_bytes"))
      .def("board", torch::wrap_pybind_function(&make_board), py::arg("members"))
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
            return translated([&] { return adopt(fd, span); });
          }),
          py::arg("fd"), py::arg("span"))
      .def_property_readonly("span", &Mapping::span)
      .def("read", torch::wrap_pybind_function(&read), py::arg("offset"), py::arg("n_bytes"))
      .def("write", torch::wrap_pybind_function(&write), py::arg("offset"), py::arg("data"));
}

void bind_teams(py::module_& m) {
  py::class_<Op>(m, "ShmOp")
      .def("wait", torch::wrap_pybind_function(&Op::wait), py::arg("slice_s"))
      .def_property_readonly("done", &Op::done)
      .def_property_readonly("done_s", &Op::done_s)
      .def_property_readonly("number", &Op::number)
      .def("descriptors", &Op::descriptors);
  py::class_<Team, std::shared_ptr<Team>>(m, "ShmTeam")
      .def(
          py::init(torch::wrap_pybind_function(&make_team)), py::arg("arena"), py::arg("views"),
          py::arg("index"), py::arg("board_offset"), py::arg("pidfds"), py::arg("timeout_s"),
          py::arg("crowd") = 0)
      .def(
          "start", torch::wrap_pybind_function(&start), py::arg("kind"), py::arg("tensor"),
          py::arg("src") = 0, py::arg("average") = false,
          py::arg("order") = std::vector<int64_t>{}, py::arg("soon") = false,
          py::arg("stamp") = false)
      .def_property_readonly("failure", &failure_of)
      .def_property_readonly("states", &states_of)
      .def("fail", torch::wrap_pybind_function(&fail_team), py::arg("status"), py::arg("members"))
      .def("leave", &Team::leave, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("members", &Team::members)
      .def_property_readonly("index", &Team::me);
}

void bind_statuses(py::module_& m) {
  m.def("shm_available_bytes", &available_bytes, py::arg("root") = "");
  m.attr("SHM_PENDING") = static_cast<int>(Status::kPending);
  m.attr("SHM_OK") = static_cast<int>(Status::kOk);
  m.attr("SHM_LOST") = static_cast<int>(Status::kLost);
  m.attr("SHM_TIMEOUT") = static_cast<int>(Status::kTimeout);
  m.attr("SHM_MISMATCH") = static_cast<int>(Status::kMismatch);
  m.attr("SHM_CLOSED") = static_cast<int>(Status::kClosed);
  m.attr("SHM_BROKEN") = static_cast<int>(Status::kBroken);
  m.attr("SHM_TOLD") = static_cast<int>(Status::kTold);
}

}  // namespace
}  // namespace fddp::shm

void bind_shm(py::module_& m) {
  fddp::shm::bind_statuses(m);
  fddp::shm::bind_arenas(m);
  fddp::shm::bind_teams(m);
}
