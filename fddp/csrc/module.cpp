#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_backward_watch(py::module_&);
void bind_flight_ring(py::module_&);
void bind_gradient_counter(py::module_&);
void bind_backend_release(py::module_&);
void bind_layout(py::module_&);
void bind_leaves(py::module_&);
void bind_operands(py::module_&);
void bind_pack(py::module_&);
void bind_params(py::module_&);
void bind_shm_arena(py::module_&);
void bind_shm_backend(py::module_&);
void bind_completion_timestamp(py::module_&);
void bind_work_spin(py::module_&);
void bind_storage(py::module_&);
void bind_released_buffers(py::module_&);
void bind_collectives(py::module_&);
void bind_device_collectives(py::module_&);
void bind_executor(py::module_&);
void bind_profile(py::module_&);

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled parts of fddp. Load them with fddp.native.extension, which checks the build.";
  m.attr("torch_version") = FDDP_TORCH_VERSION;
  bind_layout(m);
  bind_operands(m);
  bind_pack(m);
  bind_storage(m);
  bind_released_buffers(m);
  bind_backward_watch(m);
  bind_gradient_counter(m);
  bind_collectives(m);
  bind_device_collectives(m);
  bind_leaves(m);
  bind_params(m);
  bind_flight_ring(m);
  bind_profile(m);
  bind_executor(m);
  bind_backend_release(m);
  bind_shm_arena(m);
  bind_shm_backend(m);
  bind_completion_timestamp(m);
  bind_work_spin(m);
}
