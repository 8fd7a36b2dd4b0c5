#include "step/collectives.h"

#include <memory>
#include <string>
#include <utility>

#include "python_entry.h"

namespace py = pybind11;

namespace fddp {
namespace {

class PendingInPython : public PendingCollective {
 public:
  explicit PendingInPython(py::object work) : work_(std::move(work)) {}

  bool done() override {
    const PythonEntry python;
    return work_.get().attr("done").cast<bool>();
  }
  bool wait(const std::function<std::string()>& what) override {
    const PythonEntry python;
    work_.get().attr("wait")(what());
    return true;
  }
  bool notes_waits() const override { return true; }
  void end_range(std::shared_ptr<CollectiveRange> range) override {
    const PythonEntry python;
    work_.get().attr("end_range")(std::move(range));
  }
  py::object to_python() override { return work_.get(); }

 private:
  SharedObject work_;
};

// Collectives of a transport, by its method `all_reduce`.
class CollectivesInPython : public Collectives {
 public:
  explicit CollectivesInPython(py::object all_reduce) : all_reduce_(std::move(all_reduce)) {}

  bool takes(c10::Device) const override { return true; }
  std::shared_ptr<PendingCollective> all_reduce(const at::Tensor& tensor, bool average, bool wait_soon) override {
    const PythonEntry python;
    py::object work =
        all_reduce_.get()(tensor, py::arg("average") = average, py::arg("wait_soon") = wait_soon);
    return std::make_shared<PendingInPython>(std::move(work));
  }

 private:
  SharedObject all_reduce_;
};

// Collectives of a single rank.
class CollectivesOfOne : public Collectives {
 public:
  bool takes(c10::Device) const override { return true; }
  std::shared_ptr<PendingCollective> all_reduce(const at::Tensor&, bool, bool) override { return nullptr; }
};

}  // namespace

std::shared_ptr<PendingCollective> pending_in_python(py::object work) {
  return work.is_none() ? nullptr : std::make_shared<PendingInPython>(std::move(work));
}

}  // namespace fddp

void bind_collectives(py::module_& m) {
  using namespace fddp;
  py::class_<Collectives, std::shared_ptr<Collectives>>(m, "Collectives")
      .def("takes", &Collectives::takes, py::arg("device"));
  py::class_<CollectivesInPython, Collectives, std::shared_ptr<CollectivesInPython>>(m, "CollectivesInPython")
      .def(py::init<py::object>(), py::arg("all_reduce"));
  py::class_<CollectivesOfOne, Collectives, std::shared_ptr<CollectivesOfOne>>(m, "CollectivesOfOne")
      .def(py::init<>());
}
