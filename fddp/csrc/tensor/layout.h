// Where the leaves of a bucket lie in its buffer: shared by pack, unpack and slices.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <vector>

namespace fddp {

// One leaf's stretch of the buffer, in elements: `numel` of them from `offset` on, which read as a
// dense tensor of these sizes and strides.
struct Slot {
  int64_t offset;
  int64_t numel;
  c10::DimVector sizes;
  c10::DimVector strides;

  // True where walking `strides` visits elements in the slot's order. Strides along dimensions of
  // size one are never walked, so they do not count.
  bool has_order_of(at::IntArrayRef strides) const;
};

// A value checked once, when it is built: slots are dense, in ascending order, within `numel`
// elements and apart from each other, so that kernels may trust them.
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

// float16, bfloat16, float32, float64, complex64 or complex128.
bool is_reducible(c10::ScalarType dtype);

// Raises unless `buffer` is a strided, contiguous, one-dimensional tensor of a reducible dtype with
// at least `numel` elements.
void check_buffer(const at::Tensor& buffer, int64_t numel);

}  // namespace fddp
