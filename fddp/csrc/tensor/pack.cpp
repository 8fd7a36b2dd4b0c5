#include "pack.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "parallel.h"

namespace py = pybind11;

namespace fddp {
namespace {

// While this lives, torch operations on plain tensors do just that: no autograd, no modes.
struct PlainOps {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_modes{
      kWrapperKeys |
      c10::DispatchKeySet(
          {c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
           c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

// Complex elements are copied as two real ones.
c10::ScalarType real_dtype(const at::Tensor& tensor) {
  return c10::toRealValueType(tensor.scalar_type());
}

int64_t reals_in(const Slot& slot, const at::Tensor& buffer) {
  return buffer.is_complex() ? 2 * slot.numel : slot.numel;
}

// Reading does not need the writable pointer, for which torch would copy a lazily cloned storage.
Memory readable(const at::Tensor& tensor) {
  return {static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())), real_dtype(tensor)};
}

Memory writable(const at::Tensor& tensor) {
  return {static_cast<char*>(tensor.mutable_data_ptr()), real_dtype(tensor)};
}

Memory at_slot(Memory buffer, const at::Tensor& tensor, const Slot& slot) {
  return {buffer.data + slot.offset * static_cast<int64_t>(tensor.itemsize()), buffer.dtype};
}

at::Tensor empty_in_slot_order(const at::Tensor& leaf, const Slot& slot) {
  const auto options = at::TensorOptions(leaf.scalar_type()).device(leaf.device());
  return at::empty_strided(slot.sizes, slot.strides, options);
}

// The largest magnitude of all pieces.
double run_copies(const Work<CopyKernel>& work, double scale) {
  std::atomic<double> peak{0.0};
  work.run([&](const Piece<CopyKernel>& piece, size_t) {
    const double found = piece.kernel(piece.source, piece.target, piece.count, scale);
    double known = peak.load(std::memory_order_relaxed);
    while (found > known && !peak.compare_exchange_weak(known, found, std::memory_order_relaxed)) {
    }
  });
  return peak.load();
}

double scaled_peak(double peak, double scale) {
  if (peak == 0.0 || std::isinf(peak)) return peak;
  const double scaled = peak * std::abs(scale);
  // What overflows by the scale was finite when it was read.
  return scaled < std::numeric_limits<double>::max() ? scaled : std::numeric_limits<double>::max();
}

Stats run_stats(const Work<StatsKernel>& work, double scale) {
  std::vector<Stats> parts(work.size());
  work.run([&](const Piece<StatsKernel>& piece, size_t i) {
    parts[i] = piece.kernel(piece.source, piece.target, piece.count, scale);
  });
  Stats total;
  for (const Stats& part : parts) {
    total.sq_norm += part.sq_norm;
    total.finite &= part.finite;
  }
  return total;
}

using KernelFor = CopyKernel (*)(c10::ScalarType source, c10::ScalarType target);

// Sends each source that counts to its slot.
double gather_(
    const at::Tensor& buffer, const Layout& layout, const Leaves& sources, double scale,
    KernelFor kernel_for, bool zero_missing) {
  check_cpu_buffer(buffer, layout.numel());
  check_sources(sources, layout, buffer);
  const PlainOps plain_ops;
  buffer.unsafeGetTensorImpl()->bump_version();
  const Memory bucket = writable(buffer);
  Leaves copies;  // of sources whose memory is in another order
  Work<CopyKernel> work(sources.size());
  for (const auto i : c10::irange(sources.size())) {
    const Slot& slot = layout.slots()[i];
    const Memory target = at_slot(bucket, buffer, slot);
    // A NaN times zero is a NaN, but a weight of zero means that the leaf does not count.
    if (!sources[i].defined() || scale == 0.0) {
      if (zero_missing) work.add(zero_kernel(target.dtype), target, target, reals_in(slot, buffer));
      continue;
    }
    Memory source;
    if (is_linear(sources[i], slot)) {
      source = readable(sources[i]);
    } else {
      copies.push_back(empty_in_slot_order(sources[i], slot));
      copies.back().copy_(
          sources[i].layout() == at::kStrided ? sources[i] : sources[i].to_dense());
      source = readable(copies.back());
    }
    work.add(kernel_for(source.dtype, target.dtype), source, target, reals_in(slot, buffer));
  }
  return scaled_peak(run_copies(work, scale), scale);
}

}  // namespace

double pack_(const at::Tensor& buffer, const Layout& layout, const Leaves& sources, double scale) {
  return gather_(buffer, layout, sources, scale, copy_kernel, /*zero_missing=*/true);
}

double pack_add_(
    const at::Tensor& buffer, const Layout& layout, const Leaves& sources, double scale) {
  return gather_(buffer, layout, sources, scale, add_kernel, /*zero_missing=*/false);
}

Stats scale_(const at::Tensor& buffer, double scale) {
  check_cpu_buffer(buffer, 0);
  const int64_t count = buffer.is_complex() ? 2 * buffer.numel() : buffer.numel();
  Work<StatsKernel> work(1);
  if (scale == 1.0) {
    const Memory memory = readable(buffer);
    work.add(measure_kernel(memory.dtype), memory, memory, count);
  } else {
    buffer.unsafeGetTensorImpl()->bump_version();
    const Memory memory = writable(buffer);
    work.add(stats_kernel(memory.dtype, memory.dtype), memory, memory, count);
  }
  return run_stats(work, scale);
}

Stats unpack_(const Leaves& outputs, const Layout& layout, const at::Tensor& buffer, double scale) {
  check_cpu_buffer(buffer, layout.numel());
  check_outputs(outputs, layout, buffer);
  const PlainOps plain_ops;
  const Memory bucket = readable(buffer);
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // outputs in another order, their values
  Work<StatsKernel> work(outputs.size());
  for (const auto i : c10::irange(outputs.size())) {
    const at::Tensor& output = outputs[i];
    if (!output.defined()) continue;
    output.unsafeGetTensorImpl()->bump_version();
    const Slot& slot = layout.slots()[i];
    Memory target;
    if (is_linear(output, slot)) {
      target = writable(output);
    } else {
      copies.emplace_back(output, empty_in_slot_order(output, slot));
      target = writable(copies.back().second);
    }
    const Memory source = at_slot(bucket, buffer, slot);
    work.add(stats_kernel(source.dtype, target.dtype), source, target, reals_in(slot, buffer));
  }
  const Stats stats = run_stats(work, scale);
  for (const auto& [output, values] : copies) output.copy_(values);
  return stats;
}

namespace {

// None becomes an undefined tensor. The result is to be dropped with the GIL held.
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

template <double (*kGather)(const at::Tensor&, const Layout&, const Leaves&, double)>
double gather_from_python(
    const at::Tensor& buffer, const Layout& layout, py::handle sources, double scale) {
  const Leaves leaves = leaves_from(sources);
  const py::gil_scoped_release no_gil;
  return kGather(buffer, layout, leaves, scale);
}

std::pair<double, bool> unpack_from_python(
    py::handle outputs, const Layout& layout, const at::Tensor& buffer, double scale) {
  const Leaves leaves = leaves_from(outputs);
  const py::gil_scoped_release no_gil;
  const Stats stats = unpack_(leaves, layout, buffer, scale);
  return {stats.sq_norm, stats.finite};
}

std::pair<double, bool> scale_from_python(const at::Tensor& buffer, double scale) {
  const py::gil_scoped_release no_gil;
  const Stats stats = scale_(buffer, scale);
  return {stats.sq_norm, stats.finite};
}

}  // namespace
}  // namespace fddp

void bind_pack(py::module_& m) {
  m.def("pack_", torch::wrap_pybind_function(&fddp::gather_from_python<fddp::pack_>));
  m.def("pack_add_", torch::wrap_pybind_function(&fddp::gather_from_python<fddp::pack_add_>));
  m.def("scale_", torch::wrap_pybind_function(&fddp::scale_from_python));
  m.def("unpack_", torch::wrap_pybind_function(&fddp::unpack_from_python));
}
