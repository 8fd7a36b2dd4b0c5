// Memory of the tensors of calls, to find those that share some.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

namespace fddp {

// Memory of a tensor that a call reads or writes.
struct TensorRange {
  const char* begin;
  const char* end;
  bool is_written;
  size_t item;  // position in its list
};

// Ranges of the dense and sparse tensors of a call; see Backend for its lists.
std::vector<TensorRange> ranges_of(
    const std::vector<std::vector<at::Tensor>>& outputs, const std::vector<at::Tensor>& inputs);

// Return true if an output of a call shares memory with an input.
bool share_memory(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);

// Return true if one call writes memory that the other one reads or writes.
bool calls_conflict(const std::vector<TensorRange>& one, const std::vector<TensorRange>& other);

// Return true if one item of a coalesced call writes memory that another one reads or writes. An
// item is the tensors at one position of all lists.
bool items_conflict(
    const std::vector<std::vector<at::Tensor>>& outputs, const std::vector<at::Tensor>& inputs);

// Inputs of a coalesced call, copied if items conflict.
std::vector<at::Tensor> read_first(
    const std::vector<at::Tensor>& inputs, const std::vector<std::vector<at::Tensor>>& outputs);

}  // namespace fddp
