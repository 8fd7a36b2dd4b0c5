#pragma once

#include <Python.h>
#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace fddp {

// Holds the GIL for a call of Python from C++, with dynamo's frame hook off.
//
// A backward pass within a compiled function runs between two graphs, where the hook is on: dynamo
// would compile the code of a step. Functions that are compiled themselves stay compiled.
class PythonEntry {
 public:
  PythonEntry() : hook_(set_hook(Py_None)) {}
  ~PythonEntry() {
    if (hook_ && !hook_.is_none()) {
      const py::error_scope error;
      set_hook(hook_.ptr());
    }
  }
  PythonEntry(const PythonEntry&) = delete;
  PythonEntry& operator=(const PythonEntry&) = delete;

 private:
  // Return the hook before.
  static py::object set_hook(PyObject* hook) {
    // Not a plain static variable: the import may release the GIL to a thread that waits for it here.
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> set;
    set.call_once_and_store_result(
        [] { return py::object(py::module_::import("torch._C._dynamo.eval_frame").attr("set_eval_frame")); });
    auto before = py::reinterpret_steal<py::object>(PyObject_CallOneArg(set.get_stored().ptr(), hook));
    if (!before) throw py::error_already_set();
    return before;
  }

  py::gil_scoped_acquire gil_;
  py::object hook_;
};

// Python object that may be released without the GIL.
class SharedObject {
 public:
  explicit SharedObject(py::object object) : object_(std::move(object)) {}
  ~SharedObject() {
    const py::gil_scoped_acquire gil;
    object_ = py::object();
  }
  SharedObject(const SharedObject&) = delete;
  SharedObject& operator=(const SharedObject&) = delete;
  const py::object& get() const { return object_; }

 private:
  py::object object_;
};

}  // namespace fddp
