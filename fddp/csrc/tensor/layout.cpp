#include "layout.h"

#include <c10/util/Exception.h>
#include <c10/util/irange.h>
#include <c10/util/safe_numerics.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

namespace py = pybind11;

namespace fddp {
namespace {

// Return the product of `sizes`. Raise if it does not fit in 64 bits.
int64_t checked_numel(at::IntArrayRef sizes, size_t leaf) {
  uint64_t numel = 1;
  bool overflows = false;
  for (const int64_t size : sizes) {
    TORCH_CHECK_VALUE(size >= 0, "leaf ", leaf, " has a negative size in shape ", sizes);
    overflows |= c10::mul_overflows(numel, static_cast<uint64_t>(size), &numel);
  }
  TORCH_CHECK_VALUE(
      !overflows && numel <= INT64_MAX, "leaf ", leaf, " of shape ", sizes,
      " has too many elements");
  return static_cast<int64_t>(numel);
}

// Return true if the strides are those of a contiguous tensor with permuted dimensions.
bool is_dense(at::IntArrayRef sizes, at::IntArrayRef strides) {
  c10::DimVector dims;
  for (const auto d : c10::irange(sizes.size())) {
    if (sizes[d] != 1) dims.push_back(static_cast<int64_t>(d));
  }
  const auto by_stride = [&](int64_t a, int64_t b) { return strides[a] < strides[b]; };
  std::sort(dims.begin(), dims.end(), by_stride);
  int64_t expected = 1;
  for (const int64_t d : dims) {
    if (strides[d] != expected) return false;
    expected *= sizes[d];
  }
  return true;
}

}  // namespace

bool Slot::matches_strides(at::IntArrayRef other) const {
  if (numel == 0) return true;
  for (const auto d : c10::irange(sizes.size())) {
    if (sizes[d] != 1 && strides[d] != other[d]) return false;
  }
  return true;
}

Layout::Layout(
    std::vector<int64_t> offsets,
    std::vector<std::vector<int64_t>> shapes,
    std::vector<std::vector<int64_t>> strides,
    int64_t numel)
    : numel_(numel) {
  TORCH_CHECK_VALUE(
      offsets.size() == shapes.size() && offsets.size() == strides.size(),
      "a layout needs an offset, a shape and strides for each leaf, got ", offsets.size(), ", ",
      shapes.size(), " and ", strides.size());
  slots_.reserve(offsets.size());
  int64_t previous_end = 0;
  for (const auto i : c10::irange(offsets.size())) {
    const at::IntArrayRef sizes(shapes[i]);
    TORCH_CHECK_VALUE(
        sizes.size() == strides[i].size(), "leaf ", i, " has shape ", sizes, " but strides ",
        at::IntArrayRef(strides[i]));
    const int64_t leaf_numel = checked_numel(sizes, i);
    TORCH_CHECK_VALUE(
        leaf_numel == 0 || is_dense(sizes, strides[i]), "leaf ", i, " of shape ", sizes,
        " is not dense with strides ", at::IntArrayRef(strides[i]));
    TORCH_CHECK_VALUE(
        offsets[i] >= previous_end, "leaf ", i, " starts at element ", offsets[i],
        ", but the leaf before it ends at ", previous_end);
    TORCH_CHECK_VALUE(
        offsets[i] <= numel && leaf_numel <= numel - offsets[i], "leaf ", i, " ends at element ",
        offsets[i], " + ", leaf_numel, ", past the layout's ", numel);
    previous_end = offsets[i] + leaf_numel;
    const at::IntArrayRef steps(strides[i]);
    slots_.push_back({offsets[i], leaf_numel, c10::DimVector(sizes), c10::DimVector(steps)});
  }
}

bool is_reducible(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::ComplexFloat:
    case c10::ScalarType::ComplexDouble:
      return true;
    default:
      return false;
  }
}

bool fits_storage(const at::Tensor& tensor, int64_t extent) {
  const int64_t end = tensor.storage_offset() + extent;
  return extent == 0 ||
      end * static_cast<int64_t>(tensor.itemsize()) <=
      static_cast<int64_t>(tensor.storage().nbytes());
}

void check_buffer(const at::Tensor& buffer, int64_t numel) {
  TORCH_CHECK_TYPE(
      is_reducible(buffer.scalar_type()), "the buffer has dtype ", buffer.scalar_type(),
      ", expected a floating or complex dtype of at least 16 bits");
  TORCH_CHECK_TYPE(
      buffer.layout() == at::kStrided && buffer.has_storage() && !buffer.is_conj() &&
          !buffer.is_neg() && !buffer._is_zerotensor(),
      "the buffer must be a strided tensor with memory, without conjugate or negative bit");
  TORCH_CHECK_VALUE(
      buffer.dim() == 1 && buffer.is_contiguous(),
      "the buffer must be one-dimensional and contiguous, got shape ", buffer.sizes(),
      " with strides ", buffer.strides());
  TORCH_CHECK_VALUE(
      buffer.numel() >= numel, "the buffer has ", buffer.numel(), " elements, the layout needs ",
      numel);
  check_storage(fits_storage(buffer, buffer.numel()), "the buffer");
}

}  // namespace fddp

void bind_layout(py::module_& m) {
  using Rows = std::vector<std::vector<int64_t>>;
  py::class_<fddp::Layout, std::shared_ptr<fddp::Layout>>(m, "Layout")
      .def(py::init(torch::wrap_pybind_function(
          [](std::vector<int64_t> offsets, Rows shapes, Rows strides, int64_t numel) {
            return fddp::Layout(std::move(offsets), std::move(shapes), std::move(strides), numel);
          })),
           py::arg("offsets"), py::arg("shapes"), py::arg("strides"), py::arg("numel"))
      .def("__len__", [](const fddp::Layout& layout) { return layout.slots().size(); });
}
