// Slices of a buffer that are returned again.

#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <vector>

#include "layout.h"

namespace fddp {

// Return one tensor per slot over its range of `buffer`, as `slices` does outside of inference mode.
// Tensors of earlier calls are returned again where nothing else refers to them. Needs the GIL, as do the
// functions below.
//
// [Note: kept slices]
// New slices cost a step a storage, a tensor and a Python object for each leaf, which are freed in a
// later step, and Python's garbage collector runs once for every few hundred of them. A buffer therefore
// keeps its slices, in an attribute of its Python object. A kept slice is returned again if it cannot be
// distinguished from a new one: nothing refers to it, it has no attribute, no hook, no weak reference and
// no part in autograd, and its sizes, strides and memory are those of its slot. Its version counter starts
// at 0 again. A slice that only the buffer refers to, but that has been marked in one of these ways, is
// freed. That may run finalizers of the caller's, which may take a step. So marked slices are freed only
// where no other state is half changed: by `free_marked_slices`, and at the end of `kept_slices`.
//
// Kept slices keep the memory of the buffer alive, but not its Python object, which owns them. They are
// freed with the buffer. The memory is unused if only the buffer and kept slices that nothing else refers
// to own it.
std::vector<pybind11::object> kept_slices(const at::Tensor& buffer, const Layout& layout);

// Use of a buffer's memory.
struct MemoryUse {
  int64_t unused = 0;        // kept slices that can be returned again
  int64_t marked = 0;        // kept slices that only the buffer refers to, and that cannot
  bool has_owners = false;   // something else refers to the memory
};

// Return the use of a buffer's memory. Frees nothing. With `stop_at_owner`, slices after the first one in
// use are not counted.
MemoryUse memory_use(const at::Tensor& buffer, bool stop_at_owner = false);

// Return true if only the buffer and kept slices that nothing else refers to own its memory.
bool is_unused(const at::Tensor& buffer);

// Free the marked slices of a buffer. Return true if its memory is unused then.
bool free_marked_slices(const at::Tensor& buffer);

}  // namespace fddp
