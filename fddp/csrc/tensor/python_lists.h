// Tensors in lists of Python.
//
// [Note: tensors known to Python]
// A tensor that has an object in Python enters Python, and acquires the GIL, when it gets a second
// owner and when it loses it again (`incref_pyobject` in torch 2.13): some hundred instructions, for
// each leaf of a step. Tensors are therefore borrowed from lists, and moved into them.

#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/MaybeOwned.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace fddp {

// Return the tensor at a position, or null for None. The list owns it.
inline const at::Tensor* tensor_or_none_at(const pybind11::list& list, size_t position) {
  PyObject* const item = PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(position));
  if (item == Py_None) return nullptr;
  TORCH_CHECK_TYPE(
      THPVariable_Check(item), "item ", position, " of a list of tensors is a ", Py_TYPE(item)->tp_name);
  return &THPVariable_Unpack(item);
}

// Return the tensor at a position. The list owns it.
inline const at::Tensor& tensor_at(const pybind11::list& list, size_t position) {
  const at::Tensor* const tensor = tensor_or_none_at(list, position);
  TORCH_CHECK_TYPE(tensor != nullptr, "item ", position, " of a list of tensors is None");
  return *tensor;
}

// Return a list of tensors, with None for undefined ones.
inline pybind11::list to_list(std::vector<at::Tensor> tensors) {
  pybind11::list list(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyObject* const item = THPVariable_Wrap(std::move(tensors[i]));
    if (item == nullptr) throw pybind11::error_already_set();
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), item);
  }
  return list;
}

// Tensors that others own, and keep alive meanwhile.
class BorrowedTensors {
 public:
  explicit BorrowedTensors(size_t expected) { tensors_.reserve(expected); }
  ~BorrowedTensors() {
    for (at::Tensor& tensor : tensors_) Traits::destroyBorrow(tensor);
  }
  BorrowedTensors(BorrowedTensors&&) noexcept = default;
  BorrowedTensors& operator=(BorrowedTensors&&) = delete;
  BorrowedTensors(const BorrowedTensors&) = delete;
  BorrowedTensors& operator=(const BorrowedTensors&) = delete;

  void borrow(const at::Tensor& tensor) { tensors_.push_back(Traits::createBorrow(tensor)); }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }

 private:
  using Traits = c10::MaybeOwnedTraits<at::Tensor>;

  std::vector<at::Tensor> tensors_;
};

}  // namespace fddp
