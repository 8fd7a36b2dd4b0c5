// Validation of the arguments of pack and unpack. Each check raises ValueError or TypeError with
// both values and the position of the leaf.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

#include <vector>

#include "layout.h"

namespace fddp {

// One tensor per slot of a layout; undefined for a missing leaf.
using Leaves = std::vector<at::Tensor>;

// Keys of the tensors of transforms.
inline constexpr c10::DispatchKeySet kTransformKeys =
    c10::functorch_transforms_ks | c10::DispatchKeySet(c10::DispatchKey::Functionalize);

// Keys of wrapper tensors, whose own memory, if any, does not hold their values.
inline constexpr c10::DispatchKeySet kWrapperKeys = kTransformKeys | c10::python_ks;

inline bool is_wrapper(const at::Tensor& tensor) {
  return tensor.key_set().has_any(kWrapperKeys);
}

// Raise unless `buffer` is a plain tensor that passes check_buffer.
void check_plain_buffer(const at::Tensor& buffer, int64_t numel);

// Raise unless it is also on the CPU.
void check_cpu_buffer(const at::Tensor& buffer, int64_t numel);

// Raise unless there is one source, possibly undefined, for each slot. A source has the slot's
// shape and a reducible dtype, is real or complex like the buffer, and either does not overlap the
// buffer or is exactly its slice.
void check_sources(const Leaves& sources, const Layout& layout, const at::Tensor& buffer);

// As check_sources for outputs. An output must be dense, without elements that share memory, and
// must not overlap the buffer.
void check_outputs(const Leaves& outputs, const Layout& layout, const at::Tensor& buffer);

// Return true if the memory of the leaf, from its first element on, equals the contents of its
// slot.
bool is_linear(const at::Tensor& leaf, const Slot& slot);

}  // namespace fddp
