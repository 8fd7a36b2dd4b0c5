// Comparison of an operator's operands with those it was prepared for: one call for a whole tree.

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "checks.h"

namespace py = pybind11;

namespace fddp {
namespace {

// Keys of tensors whose own memory does not hold their values: wrappers, nested and quantized tensors,
// and zero tensors.
constexpr c10::DispatchKeySet kIndirectKeys = kWrapperKeys |
    c10::DispatchKeySet({c10::DispatchKey::NestedTensor, c10::DispatchKey::Quantized, c10::DispatchKey::ZeroTensor});

class Operands {
 public:
  // Leaves that were None have no dtype.
  Operands(std::vector<std::vector<int64_t>> shapes, std::vector<std::optional<at::ScalarType>> dtypes,
           std::vector<std::optional<at::Device>> devices)
      : shapes_(std::move(shapes)), dtypes_(std::move(dtypes)), devices_(std::move(devices)) {
    TORCH_CHECK_VALUE(shapes_.size() == dtypes_.size() && shapes_.size() == devices_.size(), shapes_.size(),
                      " shapes for ", dtypes_.size(), " dtypes and ", devices_.size(), " devices");
  }

  // Return true if the leaves are dense tensors of the same shapes, dtypes and devices, and None
  // where None was.
  bool matches(const py::list& leaves) const {
    if (leaves.size() != shapes_.size()) return false;
    for (size_t i = 0; i < shapes_.size(); ++i) {
      PyObject* leaf = PyList_GET_ITEM(leaves.ptr(), i);
      if (!dtypes_[i]) {
        if (leaf != Py_None) return false;
        continue;
      }
      if (!THPVariable_Check(leaf)) return false;
      const at::Tensor& tensor = THPVariable_Unpack(leaf);
      if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return false;
      const bool equal = tensor.scalar_type() == *dtypes_[i] && tensor.layout() == at::kStrided &&
          !tensor.is_nested() && tensor.device() == *devices_[i] && tensor.sizes() == at::IntArrayRef(shapes_[i]);
      if (!equal) return false;
    }
    return true;
  }

 private:
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<std::optional<at::ScalarType>> dtypes_;
  std::vector<std::optional<at::Device>> devices_;
};

// Return the position of the first leaf that is neither None nor a tensor whose memory holds its values,
// or -1.
int64_t first_without_memory(const py::sequence& leaves) {
  int64_t i = 0;
  for (py::handle leaf : leaves) {
    const bool has_memory = leaf.is_none() ||
        (THPVariable_Check(leaf.ptr()) && !THPVariable_Unpack(leaf.ptr()).key_set().has_any(kIndirectKeys));
    if (!has_memory) return i;
    ++i;
  }
  return -1;
}

// Return true if any leaf has a forward-mode tangent or, with `graphs`, requires a gradient.
bool have_derivatives(const py::sequence& leaves, bool graphs) {
  for (py::handle leaf : leaves) {
    if (!THPVariable_Check(leaf.ptr())) continue;
    const at::Tensor& tensor = THPVariable_Unpack(leaf.ptr());
    if (graphs && tensor.requires_grad()) return true;
    if (tensor._fw_grad(/*level=*/0).defined()) return true;
  }
  return false;
}

}  // namespace
}  // namespace fddp

void bind_operands(py::module_& m) {
  using namespace fddp;
  py::class_<Operands>(m, "Operands")
      .def(py::init<std::vector<std::vector<int64_t>>, std::vector<std::optional<at::ScalarType>>,
                    std::vector<std::optional<at::Device>>>(),
           py::arg("shapes"), py::arg("dtypes"), py::arg("devices"))
      .def("matches", &Operands::matches, py::arg("leaves"));
  m.def("first_without_memory", &first_without_memory, py::arg("leaves"));
  m.def("have_derivatives", &have_derivatives, py::arg("leaves"), py::arg("graphs"));
}
