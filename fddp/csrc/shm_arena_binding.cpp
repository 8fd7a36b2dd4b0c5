// Python bindings of arenas in shared memory: this process's own, and views of others'.

#include "shm/arena.h"
#include "shm/available_memory.h"
#include "shm/shm_group.h"
#include "shm_ownership.h"
#include "shm_tensor.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

namespace py = pybind11;

namespace fddp::shm {
namespace {

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

py::bytes read_bytes(const Mapping& mapping, uint64_t offset, uint64_t n_bytes) {
  return {checked_address(mapping, offset, n_bytes), n_bytes};
}

void write_bytes(const Mapping& mapping, uint64_t offset, const std::string& data) {
  std::memcpy(checked_address(mapping, offset, data.size()), data.data(), data.size());
}

std::optional<uint64_t> make_control_block(Arena& arena, size_t members) {
  return translate_errors([&] { return ShmGroup::make_control_block(arena, members); });
}

}  // namespace
}  // namespace fddp::shm

void bind_shm_arena(py::module_& m) {
  using namespace fddp::shm;
  using fddp::translate_errors;
  m.def("shm_available_bytes", &available_bytes, py::arg("root") = "");
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
            return read_bytes(*arena.mapping(), offset, n_bytes);
          }),
          py::arg("offset"), py::arg("n_bytes"))
      .def(
          "write",
          torch::wrap_pybind_function(
              [](const Arena& arena, uint64_t offset, const std::string& data) {
                write_bytes(*arena.mapping(), offset, data);
              }),
          py::arg("offset"), py::arg("data"));
  py::class_<Mapping, std::shared_ptr<Mapping>>(m, "ShmView")
      .def(
          py::init([](int fd, uint64_t span) {
            return translate_errors([&] { return map_peer_arena(fd, span); });
          }),
          py::arg("fd"), py::arg("span"))
      .def_property_readonly("span", &Mapping::span)
      .def("read", torch::wrap_pybind_function(&read_bytes), py::arg("offset"), py::arg("n_bytes"))
      .def("write", torch::wrap_pybind_function(&write_bytes), py::arg("offset"), py::arg("data"));
}
