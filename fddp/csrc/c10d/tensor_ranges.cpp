#include "c10d/tensor_ranges.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace fddp {
namespace {

void append(std::vector<TensorRange>& ranges, const std::vector<at::Tensor>& tensors, bool is_written) {
  for (size_t item = 0; item < tensors.size(); ++item) {
    const at::Tensor& tensor = tensors[item];
    if (!tensor.defined() || tensor.numel() == 0) continue;
    if (tensor.is_sparse()) {
      // A result has other memory, so the tensor itself stands for it.
      const auto* const begin = reinterpret_cast<const char*>(tensor.unsafeGetTensorImpl());
      ranges.push_back({begin, begin + 1, is_written, item});
      continue;
    }
    if (tensor.layout() != at::kStrided) continue;
    int64_t last = 0;  // offset of the last element
    for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    const auto* const begin = static_cast<const char*>(tensor.const_data_ptr());
    const char* const end = begin + (last + 1) * static_cast<int64_t>(tensor.itemsize());
    ranges.push_back({begin, end, is_written, item});
  }
}

// Return true if one item writes memory that another one reads or writes.
bool have_conflict(std::vector<TensorRange> ranges) {
  const auto is_before = [](const TensorRange& a, const TensorRange& b) { return a.begin < b.begin; };
  std::sort(ranges.begin(), ranges.end(), is_before);
  for (size_t i = 0; i < ranges.size(); ++i) {
    for (size_t j = i + 1; j < ranges.size() && ranges[j].begin < ranges[i].end; ++j) {
      const bool writes = ranges[i].is_written || ranges[j].is_written;
      if (writes && ranges[i].item != ranges[j].item) return true;
    }
  }
  return false;
}

}  // namespace

std::vector<TensorRange> ranges_of(
    const std::vector<std::vector<at::Tensor>>& outputs, const std::vector<at::Tensor>& inputs) {
  std::vector<TensorRange> ranges;
  for (const auto& list : outputs) append(ranges, list, /*is_written=*/true);
  append(ranges, inputs, /*is_written=*/false);
  return ranges;
}

bool calls_conflict(const std::vector<TensorRange>& one, const std::vector<TensorRange>& other) {
  for (const TensorRange& a : one) {
    for (const TensorRange& b : other) {
      if ((a.is_written || b.is_written) && a.begin < b.end && b.begin < a.end) return true;
    }
  }
  return false;
}

bool share_memory(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  std::vector<TensorRange> ranges = ranges_of({outputs}, inputs);
  for (TensorRange& range : ranges) range.item = range.is_written ? 0 : 1;
  return have_conflict(std::move(ranges));
}

bool items_conflict(
    const std::vector<std::vector<at::Tensor>>& outputs, const std::vector<at::Tensor>& inputs) {
  return have_conflict(ranges_of(outputs, inputs));
}

std::vector<at::Tensor> read_first(
    const std::vector<at::Tensor>& inputs, const std::vector<std::vector<at::Tensor>>& outputs) {
  if (!items_conflict(outputs, inputs)) return inputs;
  std::vector<at::Tensor> copies;
  for (const at::Tensor& input : inputs) copies.push_back(input.clone(at::MemoryFormat::Contiguous));
  return copies;
}

}  // namespace fddp
