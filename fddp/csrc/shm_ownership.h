// Ownership of objects in shared memory whose destructors wait for their threads, and errors of their
// constructors.

#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

namespace fddp {

// Call `body` without the GIL, because it may wait for threads that need the GIL.
template <class Body>
void without_gil(const Body& body) {
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
    const pybind11::gil_scoped_release released;
    body();
  } else {
    body();
  }
}

// Own a group or its messages. A forked process has none of their threads and leaks them.
template <class Object>
std::shared_ptr<Object> owned(Object* object) {
  return {object, [](Object* unused) {
            if (unused->is_forked()) return;
            if (unused->is_own_thread()) {
              // A thread cannot join itself.
              std::thread([unused] { delete unused; }).detach();
            } else {
              without_gil([&] { delete unused; });
            }
          }};
}

// Call `body`. Translate std::invalid_argument to ValueError and std::system_error to OSError.
template <class Body>
auto translate_errors(const Body& body) {
  try {
    return body();
  } catch (const std::invalid_argument& error) {
    throw pybind11::value_error(error.what());
  } catch (const std::system_error& error) {
    PyErr_SetObject(
        PyExc_OSError, pybind11::make_tuple(error.code().value(), std::string(error.what())).ptr());
    throw pybind11::error_already_set();
  }
}

}  // namespace fddp
