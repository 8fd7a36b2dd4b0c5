// Counting of gradients as they arrive during backward: detects complete buckets and late
// gradients. Base of leaf sets of functional calls (leaves.cpp) and parameter sets of modules
// (params.cpp).

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "step/bucket_listener.h"
#include "tensor/layout.h"

namespace fddp {

// Leaves of each bucket. Created once for a plan and shared by its steps.
struct BucketMembers {
  std::vector<std::vector<int64_t>> leaves;
};

// Layout of a bucket's leaves in its buffer. Created once for a plan.
struct BucketPacking {
  std::vector<int64_t> together;                  // positions of the leaves that are packed in one call
  Layout layout;                                  // layout of these leaves
  std::vector<std::pair<int64_t, Layout>> early;  // positions of the other leaves, with a layout of each
};

// Destination of a large leaf's gradient, which is packed on arrival: the only slot of `layout`, in
// `buffer`. With `sums_squares`, squares are summed in the same pass, for `pack`.
struct EagerSlot {
  int64_t leaf;
  at::Tensor buffer;
  std::shared_ptr<const Layout> layout;
  double scale;
  bool sums_squares;
};

// Return a bound on the magnitude of a sum from bounds of its summands. Infinite only if one of the
// bounds is.
double add_bounds(double bound, double amax);

class GradientCounter {
 public:
  explicit GradientCounter(std::vector<at::Tensor> leaves);
  virtual ~GradientCounter() = default;
  GradientCounter(const GradientCounter&) = delete;
  GradientCounter& operator=(const GradientCounter&) = delete;

  const std::vector<at::Tensor>& leaves() const { return leaves_; }
  size_t size() const { return leaves_.size(); }

  // Start counting. `expected[i]` is the number of gradients of leaf i that its bucket waits for.
  // `on_bucket`, a BucketListener or a Python callable, receives bucket b once its last gradient has
  // arrived. Gradients of the leaves in `eager` are packed on arrival, while they are in cache, and
  // released, so that the allocator reuses warm memory.
  virtual void arm(std::shared_ptr<const BucketMembers> members, std::vector<int64_t> expected,
                   std::vector<EagerSlot> eager, pybind11::object on_bucket);

  // Stop counting and release the listener, which would otherwise close a reference cycle.
  virtual void disarm();

  // Make the current streams the home of a step that begins later, within backward. No effect while a
  // step runs.
  void note_home();

  // Call `body` on the home streams, and make the caller's streams wait for them.
  void on_home_streams(const pybind11::object& body);

  // Return the gradients of one bucket. With `keep`, the leaves continue to accumulate into them.
  // Gradients that arrive later count as late.
  std::vector<std::optional<at::Tensor>> take(int64_t bucket, bool keep);

  // Take the gradients of one bucket as `take` does, and pack those that were not packed on arrival
  // into `buffer`, multiplied by `scale`. Return a bound on the magnitudes of all gradients of the
  // bucket, infinity if any gradient is not finite; it means nothing on other devices than the CPU.
  // `squares`, unless null, receives the sums of squares of the bucket's slots, if those packed on
  // arrival were to be summed. Call without the GIL.
  double pack(int64_t bucket, const at::Tensor& buffer, const BucketPacking& packing, bool keep, double scale,
              double* squares = nullptr);

  // Return the number of leaves of a bucket.
  size_t leaves_of(int64_t bucket) const;

  // Return one leaf's gradient and reset it, so that nothing is accumulated into it later.
  std::optional<at::Tensor> take_one(int64_t leaf);

  // Return, for each leaf, true if a gradient arrived.
  std::vector<bool> used() const;
  // Return true if a gradient arrived for every leaf.
  bool all_used() const;
  // Return true if a gradient arrived for every leaf, and none late.
  bool is_complete() const;
  // Return true if each leaf received as many gradients as `arm` expected.
  bool is_as_expected() const;
  size_t arrival_count() const;
  std::vector<bool> late() const { return copy_of(late_); }
  std::vector<int64_t> counts() const { return copy_of(counts_); }
  std::vector<int64_t> arrivals() const { return copy_of(arrivals_); }
  std::vector<double> arrival_times() const { return copy_of(arrival_times_); }

 protected:
  static constexpr int64_t kNoBucket = -1;
  static constexpr int64_t kNotEager = -1;

  // Called for each gradient that has arrived. An undefined one stands for zeros.
  void on_gradient(size_t leaf, bool is_undefined = false);

  // Release a leaf's gradient after it was taken. Overridden where it must be preserved. Called
  // with the mutex held.
  virtual void release_grad(size_t leaf, bool keep);
  // Return true if the leaf's gradient may be packed on arrival and released. Called with the mutex
  // held.
  virtual bool may_release(size_t leaf) const;

  // Return true if a gradient of the leaf arrived. Called with the mutex held.
  virtual bool was_used(size_t leaf) const = 0;

  // Return a copy of a member, taken under the mutex.
  template <class T>
  T copy_of(const T& member) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return member;
  }

  mutable std::mutex mutex_;
  std::vector<at::Tensor> leaves_;
  std::vector<bool> found_grad_;  // by leaf: take() found a gradient
  std::vector<int64_t> counts_;   // by leaf: number of gradients
  bool armed_ = false;

 private:
  // Implementation of `take` and `pack`. Called with the mutex held.
  std::vector<at::Tensor> take_locked(int64_t bucket, bool keep);
  // Pack the leaf's gradient. Return it, so that it can be released without the mutex.
  at::Tensor pack_on_arrival(size_t leaf, int64_t bucket);
  void notify_bucket(int64_t bucket);
  // [Note: home streams]
  // Backward runs parts of a graph on the streams on which forward ran them. A step packs, sends and
  // unpacks on the stream that was current when it began, its home: that of a device's memory for
  // buckets and results. It waits there for the streams that computed a bucket's gradients. These
  // gradients are memory of the other streams, and must not be reused before home has read them. A
  // step that begins within backward does so on the stream of a parameter, the one on which its hook
  // was made, which would give memory that is freed without regard to the streams of the loop. Its
  // home are the streams that were current in the forward pass. Backward may be called on yet
  // another one: the step ends on home, too, and that one waits for home.
  void note_home_streams();
  void note_stream(int64_t bucket, const at::Tensor& leaf);

  std::shared_ptr<const BucketMembers> members_;
  std::vector<int64_t> bucket_of_;     // by leaf
  std::vector<int64_t> expected_;      // by leaf: number of gradients that its bucket waits for
  std::vector<int64_t> arrivals_;      // leaves in order of arrival, with repeats
  std::vector<double> arrival_times_;  // of arrivals_: seconds, as time.perf_counter
  std::vector<int64_t> pending_;       // by bucket: number of missing gradients
  std::vector<EagerSlot> eager_;
  std::vector<int64_t> eager_of_;                  // by leaf: position in eager_, or kNotEager
  std::vector<bool> packed_on_arrival_;            // by leaf: packed on arrival
  std::vector<double> squares_;                    // by leaf: sum of squares, if packed on arrival
  std::vector<double> amax_bounds_;                // by bucket: bound on gradients packed on arrival
  std::vector<bool> late_;                         // by bucket: a gradient arrived after take()
  std::vector<bool> taken_;                        // by bucket: take() was called
  std::vector<at::Device> accelerators_;           // of the leaves
  std::vector<c10::Stream> home_;                  // of the accelerators, see [Note: home streams]
  std::vector<std::vector<c10::Stream>> streams_;  // by bucket: others that computed its gradients
  std::shared_ptr<BucketListener> listener_;
};

}  // namespace fddp
