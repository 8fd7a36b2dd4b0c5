// Operations of a shared-memory group on whole tensors, in place: those of the library's transports.
//
// Unlike the collectives of torch they compare shapes, and a reduce-scatter may sum along a tree.

#pragma once

#include "shm/shm_group.h"
#include "step/collectives.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace fddp {

struct InPlaceOptions {
  // Lists of a tree: the summands of each member, and the additions after each summand.
  using Tree = std::pair<std::vector<uint32_t>, std::vector<uint32_t>>;

  int64_t src = 0;
  bool average = false;
  bool wait_soon = false;  // the caller will wait soon
  bool prompt = false;  // complete as early as possible, even if no thread waits
  std::optional<Tree> tree = std::nullopt;
};

// An operation in flight, with the group that executes it.
class InPlaceOperation {
 public:
  InPlaceOperation(std::shared_ptr<shm::ShmGroup> group, shm::OperationPtr operation)
      : group_(std::move(group)), operation_(std::move(operation)) {}

  // Return the status, waiting for at most `timeout`. Needs no GIL.
  shm::Status status_within(shm::Nanoseconds timeout) const;
  bool done() const {
    return operation_->status() != shm::Status::kPending || group_->done(*operation_);
  }
  // Call `action` once the operation has completed, on any thread.
  void when_completed(std::function<void()> action) const {
    group_->when_completed(*operation_, std::move(action));
  }
  // Time of completion in seconds; nullopt while the operation is pending.
  std::optional<double> done_s() const;
  // The operations of all members if they did not match, else none. Needs the GIL.
  pybind11::list descriptors() const;

 private:
  std::shared_ptr<shm::ShmGroup> group_;
  shm::OperationPtr operation_;
};

// Start an operation of the group. Throws c10::TypeError or c10::ValueError if the arguments are
// unsuitable, which does not affect the other members. Needs no GIL.
InPlaceOperation start_in_place(
    const std::shared_ptr<shm::ShmGroup>& group, std::string_view kind, const at::Tensor& tensor,
    const InPlaceOptions& options);

// All-reduces of the group for compiled steps. `adopt` returns the `Work` of an InPlaceOperation.
std::shared_ptr<Collectives> collectives_in_memory(
    std::shared_ptr<shm::ShmGroup> group, pybind11::object adopt);

}  // namespace fddp
