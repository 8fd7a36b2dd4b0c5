// Descriptions of the leaves of a tree: one call for a whole tree.
//
// Knows the usual leaves only and leaves all others to Python (fddp/tree/describe.py), whose results
// it repeats.

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/hash.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace fddp {
namespace {

// Keys of tensors whose attributes are not those of their memory.
constexpr c10::DispatchKeySet kTransformedKeys{c10::DispatchKey::FuncTorchBatched,
                                               c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Batched,
                                               c10::DispatchKey::Python, c10::DispatchKey::ZeroTensor};

bool is_usual_tensor(PyObject* leaf) {
  if (!THPVariable_CheckExact(leaf)) return false;
  const at::Tensor& tensor = THPVariable_Unpack(leaf);
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.key_set().has_any(kTransformedKeys) &&
      !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && tensor.is_contiguous();
}

// Describes leaves. Equal values become one Python object, since a plan may hold 100,000 of them.
class Describer {
 public:
  explicit Describer(PyTypeObject* spec_type) : spec_type_(spec_type) {}

  // Return the spec of None or a contiguous tensor, and null without an error for any other leaf.
  // `device` becomes the type and index of its device.
  py::object describe(PyObject* path, PyObject* leaf, bool sparse, py::object& device) {
    if (leaf == Py_None) {
      device = none_device_;
      return spec(path, empty_shape_, none_name_, none_name_, sparse);
    }
    if (!is_usual_tensor(leaf)) return {};
    const at::Tensor& tensor = THPVariable_Unpack(leaf);
    device = device_of(tensor.device());
    const py::object kind = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(device.ptr(), 0));
    return spec(path, shape_of(tensor.sizes()), dtype_of(tensor.scalar_type()), kind, sparse);
  }

 private:
  py::object spec(PyObject* path, const py::object& shape, const py::object& dtype, const py::object& device,
                  bool sparse) const {
    PyObject* made = spec_type_->tp_alloc(spec_type_, 6);
    if (made == nullptr) throw py::error_already_set();
    const py::object fields[] = {py::reinterpret_borrow<py::object>(path), shape, dtype, py::none(), device,
                                 py::bool_(sparse)};
    for (Py_ssize_t i = 0; i < 6; ++i) PyTuple_SET_ITEM(made, i, py::object(fields[i]).release().ptr());
    // It holds strings and tuples of ints, so it is part of no cycle. The collector leaves out plain
    // tuples of this kind by itself, but not those of a subclass, and 100,000 objects that it has to
    // visit would start collections of all that is in memory.
    PyObject_GC_UnTrack(made);
    return py::reinterpret_steal<py::object>(made);
  }

  const py::object& shape_of(at::IntArrayRef sizes) {
    key_.assign(sizes.begin(), sizes.end());
    py::object& shape = shapes_[key_];
    if (!shape) {
      py::tuple numbers(sizes.size());
      for (size_t i = 0; i < sizes.size(); ++i) numbers[i] = py::int_(sizes[i]);
      shape = std::move(numbers);
    }
    return shape;
  }

  const py::object& dtype_of(at::ScalarType type) {
    py::object& name = dtypes_[type];
    if (!name) name = py::str(torch::getTHPDtype(type)->name);
    return name;
  }

  const py::object& device_of(c10::Device device) {
    py::object& pair = devices_[device];
    if (!pair) {
      py::object index = py::none();
      if (device.has_index()) index = py::int_(static_cast<int>(device.index()));
      pair = py::make_tuple(c10::DeviceTypeName(device.type(), /*lower_case=*/true), index);
    }
    return pair;
  }

  PyTypeObject* spec_type_;
  py::object empty_shape_ = py::tuple(0);
  py::object none_name_ = py::str("none");
  py::object none_device_ = py::make_tuple("none", py::none());
  std::vector<int64_t> key_;
  std::unordered_map<std::vector<int64_t>, py::object, c10::hash<std::vector<int64_t>>> shapes_;
  std::unordered_map<at::ScalarType, py::object> dtypes_;
  std::unordered_map<c10::Device, py::object> devices_;
};

// Return the spec and the device of each leaf; None for both of a leaf that is left to Python.
py::tuple describe_leaves(const py::type& spec_type, const py::sequence& paths, const py::list& leaves,
                          const py::frozenset& sparse) {
  auto* type = reinterpret_cast<PyTypeObject*>(spec_type.ptr());
  TORCH_CHECK_TYPE(PyType_IsSubtype(type, &PyTuple_Type), "spec_type must be a named tuple");
  TORCH_CHECK_VALUE(paths.size() == leaves.size(), paths.size(), " paths for ", leaves.size(), " leaves");
  Describer describer(type);
  py::list specs(leaves.size()), devices(leaves.size());
  const bool any_sparse = PySet_GET_SIZE(sparse.ptr()) > 0;
  for (size_t i = 0; i < leaves.size(); ++i) {
    const py::object path = paths[i];
    const bool is_sparse = any_sparse && sparse.contains(path);
    py::object device = py::none();
    py::object spec = describer.describe(path.ptr(), PyList_GET_ITEM(leaves.ptr(), i), is_sparse, device);
    PyList_SET_ITEM(specs.ptr(), i, (spec ? std::move(spec) : py::none()).release().ptr());
    PyList_SET_ITEM(devices.ptr(), i, device.release().ptr());
  }
  return py::make_tuple(std::move(specs), std::move(devices));
}

}  // namespace
}  // namespace fddp

void bind_describe(py::module_& m) {
  m.def("describe_leaves", torch::wrap_pybind_function(&fddp::describe_leaves), py::arg("spec_type"),
        py::arg("paths"), py::arg("leaves"), py::arg("sparse"));
}
