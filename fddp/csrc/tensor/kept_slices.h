// Slices of a buffer that are returned again.

#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <vector>

#include "layout.h"

namespace fddp {

// Return one tensor per slot over its range of `buffer`, as `slices` does. Tensors of earlier calls are
// returned again where nothing else refers to them. Needs the GIL, as do the functions below.
//
// [Note: kept slices]
// New slices cost a step a storage, a tensor and a Python object for each leaf, which are freed in a
// later step, and Python's garbage collector runs once for every few hundred of them. A buffer therefore
// keeps its slices, in an attribute of its Python object. A kept slice is returned again if it cannot be
// distinguished from a new one: nothing refers to it, weak references included, it has no attribute, no hook
// and no part in autograd, and its sizes, strides and memory are those of its slot. Otherwise a new one takes
// its place. Its version counter starts at 0 again.
//
// Kept slices keep the memory of the buffer alive, but not its Python object, which owns them. They are
// freed with the buffer. The memory is unused if only the buffer and unused kept slices refer to it.
std::vector<pybind11::object> kept_slices(const at::Tensor& buffer, const Layout& layout);

// Return the number of kept slices that only the buffer refers to. Frees those that cannot be returned
// again.
int64_t unused_slices(const at::Tensor& buffer);

// Return true if nothing refers to the memory of the buffer but the buffer and unused kept slices.
bool is_unused(const at::Tensor& buffer);

}  // namespace fddp
