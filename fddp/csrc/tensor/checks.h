// What callers may hand to pack and unpack. Each check raises ValueError or TypeError with both
// values and the leaf's position.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

#include <vector>

#include "layout.h"

namespace fddp {

// One tensor per slot of a layout; an undefined one stands for a leaf that is not there.
using Leaves = std::vector<at::Tensor>;

// Keys of tensors that stand for others: their own memory, if any, is not what they mean.
inline constexpr c10::DispatchKeySet kWrapperKeys = c10::functorch_transforms_ks | c10::python_ks |
    c10::DispatchKeySet(c10::DispatchKey::Functionalize);

// Raises unless `buffer` is a plain tensor in CPU memory, for which check_buffer holds.
void check_cpu_buffer(const at::Tensor& buffer, int64_t numel);

// Raises unless there is a source, or none, for each slot: of the slot's shape and a reducible
// dtype, real or complex as the buffer is, and apart from the buffer's memory or exactly its slice.
void check_sources(const Leaves& sources, const Layout& layout, const at::Tensor& buffer);

// The same for outputs, which must be dense, without elements that share memory, and apart from
// the buffer.
void check_outputs(const Leaves& outputs, const Layout& layout, const at::Tensor& buffer);

// True where the leaf's memory, read from its first element on, is what its slot holds.
bool is_linear(const at::Tensor& leaf, const Slot& slot);

}  // namespace fddp
