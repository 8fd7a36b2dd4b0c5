#include "pack.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/irange.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "foreach_pack.h"
#include "parallel.h"
#include "plain_ops.h"

namespace py = pybind11;

namespace fddp {
namespace {

// A complex element is copied as two real ones.
c10::ScalarType real_dtype(const at::Tensor& tensor) {
  return c10::toRealValueType(tensor.scalar_type());
}

int64_t real_numel(const Slot& slot, const at::Tensor& buffer) {
  return buffer.is_complex() ? 2 * slot.numel : slot.numel;
}

// const_data_ptr, because the mutable one would materialize a lazily cloned storage.
TypedPointer const_pointer(const at::Tensor& tensor) {
  return {static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())), real_dtype(tensor)};
}

TypedPointer mutable_pointer(const at::Tensor& tensor) {
  return {static_cast<char*>(tensor.mutable_data_ptr()), real_dtype(tensor)};
}

TypedPointer slot_pointer(TypedPointer buffer, const at::Tensor& tensor, const Slot& slot) {
  return {buffer.data + slot.offset * static_cast<int64_t>(tensor.itemsize()), buffer.dtype};
}

at::Tensor empty_in_slot_order(const at::Tensor& leaf, const Slot& slot) {
  const auto options = at::TensorOptions(leaf.scalar_type()).device(leaf.device());
  return at::empty_strided(slot.sizes, slot.strides, options);
}

// Run all tasks. Return the largest magnitude. Write the sum of squares of each task to `sq_norms`,
// unless it is empty.
double run_copy_tasks(const KernelTasks<CopyKernel>& tasks, double scale, std::vector<double>& sq_norms) {
  std::atomic<double> amax{0.0};
  tasks.run([&](const KernelTask<CopyKernel>& task, size_t i) {
    const Copied found = task.kernel(task.source, task.target, task.count, scale);
    if (!sq_norms.empty()) sq_norms[i] = found.sq_norm;
    double known = amax.load(std::memory_order_relaxed);
    while (found.amax > known && !amax.compare_exchange_weak(known, found.amax, std::memory_order_relaxed)) {
    }
  });
  return amax.load();
}

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

double scaled_amax(double amax, double scale) {
  if (amax == 0.0 || std::isinf(amax)) return amax;
  const double scaled = amax * std::abs(scale);
  // An overflow by the scale is not a non-finite value that was read.
  return scaled < std::numeric_limits<double>::max() ? scaled : std::numeric_limits<double>::max();
}

Stats run_stats_tasks(const KernelTasks<StatsKernel>& tasks, double scale) {
  std::vector<Stats> parts(tasks.size());
  tasks.run([&](const KernelTask<StatsKernel>& task, size_t i) {
    parts[i] = task.kernel(task.source, task.target, task.count, scale);
  });
  Stats total;
  for (const Stats& part : parts) {
    total.sq_norm += part.sq_norm;
    total.finite &= part.finite;
  }
  return total;
}

using KernelFor = CopyKernel (*)(c10::ScalarType source, c10::ScalarType target, bool sums_squares);

// Pack each source into its slot.
double pack_leaves_(
    const at::Tensor& buffer, const Layout& layout, const Leaves& sources, double scale, double* squares,
    KernelFor kernel_for, bool zero_missing) {
  check_cpu_buffer(buffer, layout.numel());
  check_sources(sources, layout, buffer);
  const PlainOps plain_ops;
  buffer.unsafeGetTensorImpl()->bump_version();
  const TypedPointer bucket = mutable_pointer(buffer);
  Leaves reordered;  // of sources whose memory has another order
  KernelTasks<CopyKernel> tasks(sources.size());
  std::vector<size_t> written;  // leaf of each task
  const auto add = [&](size_t i, CopyKernel kernel, TypedPointer source, TypedPointer target) {
    tasks.add(kernel, source, target, real_numel(layout.slots()[i], buffer));
    if (squares == nullptr) return;
    squares[i] = 0.0;
    written.resize(tasks.size(), i);
  };
  for (const auto i : c10::irange(sources.size())) {
    const Slot& slot = layout.slots()[i];
    const TypedPointer target = slot_pointer(bucket, buffer, slot);
    // A leaf of weight zero does not count, although NaN times zero would be NaN.
    if (!sources[i].defined() || scale == 0.0) {
      if (!zero_missing) continue;
      add(i, zero_kernel(target.dtype), target, target);
      continue;
    }
    TypedPointer source;
    if (is_linear(sources[i], slot)) {
      source = const_pointer(sources[i]);
    } else {
      reordered.push_back(empty_in_slot_order(sources[i], slot));
      reordered.back().copy_(
          sources[i].layout() == at::kStrided ? sources[i] : sources[i].to_dense());
      source = const_pointer(reordered.back());
    }
    const bool is_in_place = source.data == target.data && scale == 1.0 && kernel_for == copy_kernel;
    const bool sums_squares = squares != nullptr;
    const CopyKernel kernel = is_in_place ? magnitude_kernel(source.dtype, sums_squares)
                                          : kernel_for(source.dtype, target.dtype, sums_squares);
    add(i, kernel, source, target);
  }
  std::vector<double> sq_norms(written.size());
  const double amax = run_copy_tasks(tasks, scale, sq_norms);
  for (const auto task : c10::irange(sq_norms.size())) squares[written[task]] += sq_norms[task];
  return scaled_amax(amax, scale);
}

}  // namespace

double pack_(const at::Tensor& buffer, const Layout& layout, const Leaves& sources, double scale, double* squares) {
  if (!buffer.is_cpu()) {
    foreach_pack_(buffer, layout, sources, scale);
    return kUnknown;
  }
  return pack_leaves_(buffer, layout, sources, scale, squares, copy_kernel, /*zero_missing=*/true);
}

double pack_add_(
    const at::Tensor& buffer, const Layout& layout, const Leaves& sources, double scale, double* squares) {
  if (!buffer.is_cpu()) {
    foreach_pack_add_(buffer, layout, sources, scale);
    return kUnknown;
  }
  return pack_leaves_(buffer, layout, sources, scale, squares, add_kernel, /*zero_missing=*/false);
}

double* squares_of(const at::Tensor& squares, size_t leaves) {
  TORCH_CHECK_VALUE(
      squares.is_cpu() && squares.is_contiguous() && squares.dim() == 1 && squares.numel() == static_cast<int64_t>(leaves),
      "squares must be a contiguous tensor of ", leaves, " elements on the CPU, got one of shape ", squares.sizes());
  return squares.mutable_data_ptr<double>();
}

Stats scale_(const at::Tensor& buffer, double scale) {
  check_cpu_buffer(buffer, 0);
  const int64_t count = buffer.is_complex() ? 2 * buffer.numel() : buffer.numel();
  KernelTasks<StatsKernel> tasks(1);
  if (scale == 1.0) {
    const TypedPointer memory = const_pointer(buffer);
    tasks.add(stats_only_kernel(memory.dtype), memory, memory, count);
  } else {
    buffer.unsafeGetTensorImpl()->bump_version();
    const TypedPointer memory = mutable_pointer(buffer);
    tasks.add(stats_kernel(memory.dtype, memory.dtype), memory, memory, count);
  }
  return run_stats_tasks(tasks, scale);
}

Stats unpack_(const Leaves& outputs, const Layout& layout, const at::Tensor& buffer, double scale) {
  check_cpu_buffer(buffer, layout.numel());
  check_outputs(outputs, layout, buffer);
  const PlainOps plain_ops;
  const TypedPointer bucket = const_pointer(buffer);
  // Outputs whose memory has another order, with their values.
  std::vector<std::pair<at::Tensor, at::Tensor>> reordered;
  KernelTasks<StatsKernel> tasks(outputs.size());
  for (const auto i : c10::irange(outputs.size())) {
    const at::Tensor& output = outputs[i];
    if (!output.defined()) continue;
    output.unsafeGetTensorImpl()->bump_version();
    const Slot& slot = layout.slots()[i];
    TypedPointer target;
    if (is_linear(output, slot)) {
      target = mutable_pointer(output);
    } else {
      reordered.emplace_back(output, empty_in_slot_order(output, slot));
      target = mutable_pointer(reordered.back().second);
    }
    const TypedPointer source = slot_pointer(bucket, buffer, slot);
    tasks.add(stats_kernel(source.dtype, target.dtype), source, target, real_numel(slot, buffer));
  }
  const Stats stats = run_stats_tasks(tasks, scale);
  for (const auto& [output, values] : reordered) output.copy_(values);
  return stats;
}

namespace {

// Convert a sequence of tensors and None. None becomes an undefined tensor. Destroy the result with
// the GIL held.
Leaves leaves_from(py::handle items) {
  const auto sequence = py::reinterpret_steal<py::object>(
      PySequence_Fast(items.ptr(), "expected a sequence of tensors and None"));
  if (!sequence) throw py::error_already_set();
  PyObject** const entries = PySequence_Fast_ITEMS(sequence.ptr());
  Leaves leaves(static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence.ptr())));
  for (const auto i : c10::irange(leaves.size())) {
    if (entries[i] == Py_None) continue;
    TORCH_CHECK_TYPE(
        THPVariable_Check(entries[i]), "leaf ", i, " is of type ", Py_TYPE(entries[i])->tp_name,
        ", expected a tensor or None");
    leaves[i] = THPVariable_Unpack(entries[i]);
  }
  return leaves;
}

template <auto kPack>
auto pack_from_python(
    const at::Tensor& buffer, const Layout& layout, py::handle sources, double scale) {
  const Leaves leaves = leaves_from(sources);
  const py::gil_scoped_release no_gil;
  return kPack(buffer, layout, leaves, scale);
}

template <auto kPack>
double measured_pack_from_python(
    const at::Tensor& buffer, const Layout& layout, py::handle sources, double scale,
    const std::optional<at::Tensor>& squares) {
  const Leaves leaves = leaves_from(sources);
  double* const written = squares ? squares_of(*squares, leaves.size()) : nullptr;
  const py::gil_scoped_release no_gil;
  return kPack(buffer, layout, leaves, scale, written);
}

std::pair<double, bool> unpack_from_python(
    py::handle outputs, const Layout& layout, const at::Tensor& buffer, double scale) {
  const Leaves leaves = leaves_from(outputs);
  const py::gil_scoped_release no_gil;
  const Stats stats = unpack_(leaves, layout, buffer, scale);
  return {stats.sq_norm, stats.finite};
}

void foreach_unpack_from_python(
    py::handle outputs, const Layout& layout, const at::Tensor& buffer, double scale) {
  const Leaves leaves = leaves_from(outputs);
  const py::gil_scoped_release no_gil;
  foreach_unpack_(leaves, layout, buffer, scale);
}

std::pair<double, bool> scale_from_python(const at::Tensor& buffer, double scale) {
  const py::gil_scoped_release no_gil;
  const Stats stats = scale_(buffer, scale);
  return {stats.sq_norm, stats.finite};
}

}  // namespace
}  // namespace fddp

void bind_pack(py::module_& m) {
  m.def("pack_", torch::wrap_pybind_function(&fddp::measured_pack_from_python<fddp::pack_>),
        py::arg("buffer"), py::arg("layout"), py::arg("sources"), py::arg("scale"), py::arg("squares") = py::none());
  m.def("pack_add_", torch::wrap_pybind_function(&fddp::measured_pack_from_python<fddp::pack_add_>),
        py::arg("buffer"), py::arg("layout"), py::arg("sources"), py::arg("scale"), py::arg("squares") = py::none());
  m.def("scale_", torch::wrap_pybind_function(&fddp::scale_from_python), py::arg("buffer"), py::arg("scale"));
  m.def("unpack_", torch::wrap_pybind_function(&fddp::unpack_from_python),
        py::arg("outputs"), py::arg("layout"), py::arg("buffer"), py::arg("scale"));
  m.def("foreach_pack_", torch::wrap_pybind_function(&fddp::pack_from_python<fddp::foreach_pack_>),
        py::arg("buffer"), py::arg("layout"), py::arg("sources"), py::arg("scale"));
  m.def("foreach_pack_add_", torch::wrap_pybind_function(&fddp::pack_from_python<fddp::foreach_pack_add_>),
        py::arg("buffer"), py::arg("layout"), py::arg("sources"), py::arg("scale"));
  m.def("foreach_unpack_", torch::wrap_pybind_function(&fddp::foreach_unpack_from_python),
        py::arg("outputs"), py::arg("layout"), py::arg("buffer"), py::arg("scale"));
}
