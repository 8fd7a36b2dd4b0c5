// Results over a bucket's memory, and the question of who still holds it.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <vector>

#include "layout.h"

namespace fddp {

// One tensor per slot over its stretch of `buffer`, without a copy, on any device.
//
// [Note: slices]
// Each result has a Storage of its own, exactly as long as the leaf, although the memory is the
// buffer's: so saving one leaf saves that leaf alone, and each has its own version counter. The
// storage's deleter holds a reference to the buffer's storage instead of freeing memory, which
// keeps the buffer alive as long as any result is, and lets `storage_use_count` of the buffer tell
// whether one is. Such a storage cannot be resized.
std::vector<at::Tensor> slices(const at::Tensor& buffer, const Layout& layout);

// The storage whose memory a tensor of `slices` lies over; null for any other tensor.
c10::StorageImpl* owner_of_slice(const at::Tensor& tensor);

// Owners of the storage of `tensor`: tensors, views and slices over it, and Python storage objects.
// One means that nothing but `tensor` itself holds the memory. Needs the GIL.
int64_t storage_use_count(const at::Tensor& tensor);

}  // namespace fddp
