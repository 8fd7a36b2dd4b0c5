#include "checks.h"

#include <c10/util/Exception.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <utility>

namespace fddp {
namespace {

// Keys of tensors whose memory does not hold their values directly.
constexpr c10::DispatchKeySet kLazyKeys(
    {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});

bool has_memory(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided &&
      !tensor.key_set().has(c10::DispatchKey::ZeroTensor) && tensor.numel() > 0;
}

// Memory range of a tensor, from its first byte to past its last. A storage may have been resized
// while tensors refer to it, as sharded training does to free parameters.
struct Extent {
  const char* begin = nullptr;
  const char* end = nullptr;
  bool in_storage = true;

  explicit Extent(const at::Tensor& tensor) {
    if (!has_memory(tensor)) return;
    int64_t last = 0;
    for (const auto d : c10::irange(tensor.dim())) last += (tensor.size(d) - 1) * tensor.stride(d);
    in_storage = fits_storage(tensor, last + 1);
    if (!in_storage) return;
    begin = static_cast<const char*>(tensor.const_data_ptr());
    end = begin + (last + 1) * static_cast<int64_t>(tensor.itemsize());
  }

  bool overlaps(const Extent& other) const {
    return begin < other.end && other.begin < end;
  }
};

// Return false if each stride exceeds the extent covered by all smaller strides, as in slices and
// permutations of dense tensors.
bool may_overlap_itself(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> steps;  // stride, size
  for (const auto d : c10::irange(tensor.dim())) {
    if (tensor.size(d) != 1) steps.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(steps.begin(), steps.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : steps) {
    if (stride <= reach) return true;
    reach += (size - 1) * stride;
  }
  return false;
}

void check_count(const char* role, const Leaves& leaves, const Layout& layout) {
  TORCH_CHECK_VALUE(
      leaves.size() == layout.slots().size(), "got ", leaves.size(), " ", role, "s for ",
      layout.slots().size(), " leaves");
}

void check_leaf(
    const char* role, size_t i, const at::Tensor& leaf, const Slot& slot,
    const at::Tensor& buffer) {
  TORCH_CHECK_TYPE(
      !is_wrapper(leaf), role, " ", i,
      " is a tensor subclass or belongs to a torch.func transform; only plain tensors hold memory "
      "that can be copied");
  TORCH_CHECK_TYPE(
      is_reducible(leaf.scalar_type()), role, " ", i, " has dtype ", leaf.scalar_type(),
      ", expected a floating or complex dtype of at least 16 bits");
  TORCH_CHECK_TYPE(
      leaf.is_complex() == buffer.is_complex(), role, " ", i, " has dtype ", leaf.scalar_type(),
      ", the buffer ", buffer.scalar_type(), ": both must be real or both complex");
  TORCH_CHECK_VALUE(
      leaf.device() == buffer.device(), role, " ", i, " is on ", leaf.device(), ", the buffer on ",
      buffer.device());
  TORCH_CHECK_VALUE(
      leaf.sizes() == at::IntArrayRef(slot.sizes), role, " ", i, " has shape ", leaf.sizes(),
      ", the layout says ", at::IntArrayRef(slot.sizes));
}

}  // namespace

void check_plain_buffer(const at::Tensor& buffer, int64_t numel) {
  TORCH_CHECK_TYPE(
      !is_wrapper(buffer),
      "the buffer is a tensor subclass or belongs to a torch.func transform, expected a plain one");
  check_buffer(buffer, numel);
}

void check_cpu_buffer(const at::Tensor& buffer, int64_t numel) {
  check_plain_buffer(buffer, numel);
  TORCH_CHECK_VALUE(buffer.is_cpu(), "the buffer is on ", buffer.device(), ", expected cpu");
}

bool is_linear(const at::Tensor& leaf, const Slot& slot) {
  return leaf.layout() == at::kStrided && !leaf.key_set().has_any(kLazyKeys) &&
      slot.matches_strides(leaf.strides());
}

void check_sources(const Leaves& sources, const Layout& layout, const at::Tensor& buffer) {
  check_count("source", sources, layout);
  const Extent bucket(buffer);
  const auto item_bytes = static_cast<int64_t>(buffer.itemsize());
  for (const auto i : c10::irange(sources.size())) {
    const at::Tensor& source = sources[i];
    if (!source.defined()) continue;
    const Slot& slot = layout.slots()[i];
    check_leaf("source", i, source, slot, buffer);
    const Extent memory(source);
    check_storage(memory.in_storage, "source ", i);
    if (!memory.overlaps(bucket)) continue;
    TORCH_CHECK_VALUE(
        memory.begin == bucket.begin + slot.offset * item_bytes && is_linear(source, slot) &&
            source.scalar_type() == buffer.scalar_type(),
        "source ", i, " overlaps the buffer but is not its slice");
  }
}

void check_outputs(const Leaves& outputs, const Layout& layout, const at::Tensor& buffer) {
  check_count("output", outputs, layout);
  const Extent bucket(buffer);
  for (const auto i : c10::irange(outputs.size())) {
    const at::Tensor& output = outputs[i];
    if (!output.defined()) continue;
    check_leaf("output", i, output, layout.slots()[i], buffer);
    TORCH_CHECK_TYPE(
        output.layout() == at::kStrided && !output._is_zerotensor(), "output ", i, " has layout ",
        output.layout(), ", expected a dense tensor with memory");
    TORCH_CHECK_VALUE(
        output.numel() == 0 || !may_overlap_itself(output), "output ", i, " of shape ",
        output.sizes(), " and strides ", output.strides(), " has elements that share memory");
    const Extent memory(output);
    check_storage(memory.in_storage, "output ", i);
    TORCH_CHECK_VALUE(!memory.overlaps(bucket), "output ", i, " overlaps the buffer");
  }
}

}  // namespace fddp
