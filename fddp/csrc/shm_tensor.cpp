#include "shm_tensor.h"

#include "shm_ownership.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <limits>
#include <utility>

namespace fddp::shm {
namespace {

// Block of an arena, owned by the storage of a tensor.
struct ArenaBlock {
  std::shared_ptr<Arena> arena;
  uint64_t begin;

  ~ArenaBlock() {
    arena->free(begin);
  }
};

}  // namespace

std::optional<at::Tensor> empty_in_arena(
    const std::shared_ptr<Arena>& arena, int64_t numel, at::ScalarType dtype) {
  const auto item_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  TORCH_CHECK_VALUE(
      numel >= 0 && numel <= std::numeric_limits<int64_t>::max() / item_bytes,
      "numel must be between 0 and the number of addressable elements, got ", numel);
  const auto options = at::TensorOptions().dtype(dtype);
  if (numel == 0) return at::empty({0}, options);
  std::optional<ByteRange> block;
  without_gil([&] { block = arena->allocate(static_cast<uint64_t>(numel * item_bytes)); });
  if (!block) return std::nullopt;
  auto owner = std::make_unique<ArenaBlock>(arena, block->begin);
  char* const data = arena->mapping()->base() + block->begin;
  at::Tensor tensor = at::from_blob(
      data, {numel}, [held = owner.get()](void*) { delete held; }, options);
  owner.release();
  return tensor;
}

}  // namespace fddp::shm
