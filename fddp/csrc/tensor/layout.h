// Layout of the leaves of a bucket in its buffer. Shared by pack, unpack and slices.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <vector>

namespace fddp {

// Range of one leaf in the buffer, in elements: `numel` elements from `offset` on, which form a
// dense tensor of these sizes and strides.
struct Slot {
  int64_t offset;
  int64_t numel;
  c10::DimVector sizes;
  c10::DimVector strides;

  // Return true if `strides` visits elements in the slot's order. Strides along dimensions of size
  // one do not matter.
  bool matches_strides(at::IntArrayRef strides) const;
};

// Immutable and validated at construction: slots are dense, ascending, disjoint, and within `numel`
// elements. Kernels rely on this.
class Layout {
 public:
  Layout(
      std::vector<int64_t> offsets,
      std::vector<std::vector<int64_t>> shapes,
      std::vector<std::vector<int64_t>> strides,
      int64_t numel);

  const std::vector<Slot>& slots() const {
    return slots_;
  }
  int64_t numel() const {
    return numel_;
  }

 private:
  std::vector<Slot> slots_;
  int64_t numel_;
};

// Return true for float16, bfloat16, float32, float64, complex64 and complex128.
bool is_reducible(c10::ScalarType dtype);

// Return true if the storage of a strided tensor holds `extent` elements from the first one on.
bool fits_storage(const at::Tensor& tensor, int64_t extent);

// Raise a ValueError that names the tensor unless `fits`.
template <class... Name>
void check_storage(bool fits, const Name&... name) {
  TORCH_CHECK_VALUE(fits, name..., " is larger than its storage, which was resized");
}

// Raise unless `buffer` is a strided, contiguous, one-dimensional tensor of a reducible dtype with
// at least `numel` elements.
void check_buffer(const at::Tensor& buffer, int64_t numel);

}  // namespace fddp
