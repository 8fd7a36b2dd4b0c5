// Results as slices of a bucket's memory, and ownership of this memory.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <vector>

#include "layout.h"

namespace fddp {

// Return one tensor per slot over its range of `buffer`, without a copy, on any device. Also in inference mode,
// which results outlive, they are ordinary tensors.
//
// [Note: slices]
// Each result has a Storage of its own, exactly as long as the leaf, over the memory of the buffer.
// Saving one leaf therefore saves this leaf alone, and each result has its own version counter. The
// deleter of the storage holds a reference to the buffer's storage. The buffer stays alive as long
// as any result does, and `storage_use_count` of the buffer shows whether one is left. Such a
// storage cannot be resized.
std::vector<at::Tensor> slices(const at::Tensor& buffer, const Layout& layout);

// Return the storage that a tensor of `slices` is part of; null for any other tensor.
c10::StorageImpl* owner_of_slice(const at::Tensor& tensor);

// Return the number of owners of the storage of `tensor`: tensors, views, slices and Python storage
// objects. One means that only `tensor` itself holds the memory. Needs the GIL.
int64_t storage_use_count(const at::Tensor& tensor);

}  // namespace fddp
