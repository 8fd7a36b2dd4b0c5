// Memory of large gradients: autograd writes them into their buckets.
//
// [Note: gradients in place]
// Autograd allocates the memory of a gradient while an operation computes it, when it isn't known
// yet which leaf it will reach. But steps repeat their allocations. A placement records which
// allocation of a backward pass became the gradient of which leaf. In the next step it serves that
// allocation from the leaf's slot in its bucket, and the gradient needs no copy when it arrives.
//
// A wrong prediction costs time only. Before anything is written to a bucket or sent, each of its
// slots that was served must be free again, or hold its own leaf's gradient, to which nothing else
// refers. Otherwise the bucket gets other memory, and the tensors keep the old one.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "tensor/layout.h"

namespace fddp {

// What earlier backward passes allocated. Created once for a plan and shared by its steps.
class PlacementHistory {
 public:
  // An allocation of a backward pass: the number-th one of this size.
  struct Allocation {
    size_t nbytes;
    int64_t number;
  };

  // Return the allocation that is expected to become the gradient of a leaf.
  std::optional<Allocation> prediction(int64_t leaf) const;

  // Record the allocation that became the gradient of a leaf.
  void learn(int64_t leaf, Allocation allocation);

  // Record a prediction for a leaf that came true, or was wrong. After a few wrong ones without a
  // right one in between, no further ones are made for the leaf.
  void hit(int64_t leaf);
  void miss(int64_t leaf);

 private:
  static constexpr int kMostMisses = 3;

  mutable std::mutex mutex_;
  std::unordered_map<int64_t, Allocation> known_;  // by leaf
  std::unordered_map<int64_t, int> misses_;        // by leaf, since its last hit
};

// Slot of a leaf's gradient in a bucket in CPU memory.
struct PlacementSlot {
  int64_t leaf;
  int64_t bucket;
  at::Tensor buffer;
  std::shared_ptr<const Layout> layout;  // of this slot alone

  const Slot& slot() const { return layout->slots()[0]; }
  size_t nbytes() const { return static_cast<size_t>(slot().numel) * buffer.itemsize(); }
  char* data() const {
    return static_cast<char*>(buffer.data_ptr()) + slot().offset * static_cast<int64_t>(buffer.itemsize());
  }
};

// Tensor that autograd has accumulated into a leaf's gradient, of which it may be an alias.
struct PassedGradient {
  const at::Tensor& tensor = undefined();  // undefined if autograd no longer refers to it
  bool has_further_hooks = false;          // hooks that follow receive it, and may keep it

  static const at::Tensor& undefined() {
    static const at::Tensor none;
    return none;
  }
};

// One backward pass, which runs on the thread that calls `begin`.
class GradientPlacement {
 public:
  // Size of the smallest gradients that are placed. A copy of smaller ones costs less than that.
  static constexpr size_t kLeastBytes = 16384;

  // Start to serve allocations of this thread that operations of backward make.
  static std::shared_ptr<GradientPlacement> begin(
      std::shared_ptr<PlacementHistory> history, std::vector<PlacementSlot> slots);
  GradientPlacement(const GradientPlacement&) = delete;
  GradientPlacement& operator=(const GradientPlacement&) = delete;

  // Return memory for an allocation of `nbytes`: that of a slot, or of `others`.
  c10::DataPtr allocate(size_t nbytes, c10::Allocator& others);

  // Note the gradient of a leaf of a bucket that has arrived, before it is packed. Return true if it
  // is in its slot, to stay there.
  bool arrive(int64_t leaf, int64_t bucket, const at::Tensor& grad, const PassedGradient& passed);

  // Serve no slot of a bucket any more, and give the bucket other memory if tensors still use one.
  void close(int64_t bucket);
  // Close all buckets.
  void end();

 private:
  // Ownership of a slot's memory, shared by the tensors that use it.
  struct Claim {
    c10::Storage memory;
  };
  struct Place : PlacementSlot {
    bool is_open;  // may be served
    std::weak_ptr<Claim> claim = {};
  };
  struct Size {
    size_t nbytes;
    int64_t count = 0;                                   // allocations so far
    std::unordered_map<int64_t, size_t> predicted = {};  // places, by number of the allocation
  };
  struct Record {
    const void* data;
    PlacementHistory::Allocation allocation;
  };

  GradientPlacement(std::shared_ptr<PlacementHistory> history, std::vector<PlacementSlot> slots);
  c10::DataPtr serve(size_t place);
  void learn(const Place& place, const void* data);
  void drop_unused();
  void move_bucket(int64_t bucket);

  std::mutex mutex_;
  const std::shared_ptr<PlacementHistory> history_;
  std::vector<Place> places_;
  std::unordered_map<int64_t, size_t> place_of_;  // by leaf
  std::vector<size_t> served_;  // places that were served, without those that hold their gradients
  std::unordered_set<int64_t> closed_;  // buckets
  std::vector<Size> sizes_;
  std::vector<Record> records_;
};

}  // namespace fddp
