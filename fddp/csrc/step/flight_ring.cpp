#include "step/flight_ring.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>

namespace py = pybind11;

namespace {

// An operation in Python's hands.
struct FlightEntry {
  std::shared_ptr<fddp::FlightRing> ring;
  int64_t number;
  double launched_s;
};

}  // namespace

void bind_flight_ring(py::module_& m) {
  using fddp::FlightRing;
  py::class_<FlightEntry>(m, "FlightEntry")
      .def_readonly("launched_s", &FlightEntry::launched_s)
      .def("note_wait", [](const FlightEntry& e) { e.ring->set_waited(e.number, fddp::perf_counter_s()); })
      .def("note_done", [](const FlightEntry& e) { e.ring->set_done(e.number, fddp::perf_counter_s()); });
  py::class_<FlightRing, std::shared_ptr<FlightRing>>(m, "FlightRing")
      .def(py::init([](int64_t size) {
             if (size < 1) throw py::value_error("size must be at least 1, got " + std::to_string(size));
             return std::make_shared<FlightRing>(static_cast<size_t>(size));
           }),
           py::arg("size"))
      .def("launch",
           [](std::shared_ptr<FlightRing> ring, int64_t source, int64_t step, int64_t position) {
             const FlightRing::Record record = ring->launch(source, step, position);
             return FlightEntry{std::move(ring), record.number, record.launched_s};
           },
           py::arg("source"), py::arg("step"), py::arg("position"))
      .def("entry",
           [](std::shared_ptr<FlightRing> ring, int64_t number) { return FlightEntry{std::move(ring), number, 0.0}; },
           py::arg("number"))
      .def("fail", &FlightRing::fail)
      .def("records", [](const FlightRing& ring) {
        std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, double, double, double>> records;
        for (const auto& r : ring.records()) {
          records.emplace_back(r.number, r.source, r.step, r.position, r.launched_s, r.waited_s, r.done_s);
        }
        return records;
      });
}
