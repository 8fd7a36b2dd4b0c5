// Tensors in shared memory.

#pragma once

#include "shm/arena.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

namespace fddp::shm {

// Return an uninitialized tensor of one dimension in the arena, or nullopt if no pages can be
// reserved. The tensor keeps the arena alive.
std::optional<at::Tensor> empty_in_arena(
    const std::shared_ptr<Arena>& arena, int64_t numel, at::ScalarType dtype);

}  // namespace fddp::shm
