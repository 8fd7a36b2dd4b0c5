// Gradients counted as they arrive: which bucket is full, what came late, what is packed already.
// Shared by fresh leaves of functional calls (leaves.cpp) and parameters of modules (params.cpp).

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

#include "tensor/layout.h"

namespace fddp {

// The leaves of each bucket; made once for a plan, shared by its steps.
struct BucketMembers {
  std::vector<std::vector<int64_t>> leaves;
};

// How a bucket's leaves get into its buffer; made once for a plan.
struct BucketPacking {
  std::vector<int64_t> together;                 // positions of the leaves that are packed at once
  Layout layout;                                 // where these lie
  std::vector<std::pair<int64_t, Layout>> early;  // positions of the others, and where each lies
};

// Where a large leaf's gradient goes as soon as it arrives: into `layout`'s only slot of `buffer`.
struct EagerSlot {
  int64_t leaf;
  at::Tensor buffer;
  std::shared_ptr<const Layout> layout;
  double scale;
};

// A bound on magnitudes of sums, from bounds of two summands; infinite only if one of these is.
double plus(double bound, double peak);

class Arrivals {
 public:
  explicit Arrivals(std::vector<at::Tensor> leaves);
  virtual ~Arrivals();
  Arrivals(const Arrivals&) = delete;
  Arrivals& operator=(const Arrivals&) = delete;

  const std::vector<at::Tensor>& leaves() const { return leaves_; }
  size_t size() const { return leaves_.size(); }

  // Starts counting. `expected[i]` is how many gradients of leaf i its bucket waits for.
  // `on_bucket(b)` is called when the last of bucket b's has arrived. Gradients of the leaves in
  // `eager` are packed when they arrive, while they are in cache, and let go of, so that the
  // allocator hands the same warm memory to the next.
  void arm(std::shared_ptr<const BucketMembers> members, std::vector<int64_t> expected,
           std::vector<EagerSlot> eager, pybind11::object on_bucket);

  // Stops counting and lets go of the callback, which would otherwise close a reference cycle.
  void disarm();

  // Hands over the gradients of one bucket; with `keep` the leaves go on accumulating into them.
  // What arrives from now on is late.
  std::vector<std::optional<at::Tensor>> take(int64_t bucket, bool keep);

  // The same, with the gradients packed into `buffer`, in CPU memory, times `scale`: all that are not
  // there already. Gives a bound on the magnitudes of all of the bucket's, infinity if any gradient is not
  // finite. Call without the GIL.
  double pack(int64_t bucket, const at::Tensor& buffer, const BucketPacking& packing, bool keep, double scale);

  // Whether the leaf's gradient is in its bucket already.
  bool written(int64_t leaf) const;
  // Hands over one leaf's gradient; the leaf forgets it, so that nothing is added to it later.
  std::optional<at::Tensor> take_one(int64_t leaf);

  size_t arrival_count() const;
  std::vector<bool> late() const;
  std::vector<int64_t> counts() const;
  std::vector<int64_t> arrivals() const;
  std::vector<double> arrival_times() const;

 protected:
  static constexpr int64_t kNoBucket = -1;
  static constexpr int64_t kNotEager = -1;

  // A gradient of a leaf is there.
  void arrived(size_t leaf);

  // What is behind `take` where gradients must not get lost; called under the mutex.
  virtual void let_go(size_t leaf, bool keep);
  // Whether the leaf's gradient may be packed on arrival, and dropped; called under the mutex.
  virtual bool may_drop(size_t leaf) const;

  mutable std::mutex mutex_;
  std::vector<at::Tensor> leaves_;
  std::vector<bool> had_;         // by leaf: take() found a gradient
  std::vector<int64_t> counts_;   // by leaf: gradients arrived
  bool armed_ = false;

 private:
  // What is behind `take` and `pack`; called under the mutex.
  std::vector<at::Tensor> taken(int64_t bucket, bool keep);
  // Packs the leaf's gradient, and hands it over to be let go of.
  at::Tensor write(size_t leaf, int64_t bucket);
  void announce(int64_t bucket);
  void note_stream(int64_t bucket, at::Device device);
  void wait_for_streams(int64_t bucket);

  std::shared_ptr<const BucketMembers> members_;
  std::vector<int64_t> bucket_of_;                 // by leaf
  std::vector<int64_t> expected_;                  // by leaf: gradients its bucket waits for
  std::vector<int64_t> arrivals_;                  // leaves in order of arrival, repeats included
  std::vector<double> arrival_times_;              // of arrivals_: seconds, as time.perf_counter
  std::vector<int64_t> pending_;                   // by bucket: gradients still awaited
  std::vector<EagerSlot> eager_;
  std::vector<int64_t> eager_of_;                  // by leaf: position in eager_, or kNotEager
  std::vector<bool> written_;                      // by leaf: packed on arrival
  std::vector<double> peaks_;                      // by bucket: as `pack`, of what was packed on arrival
  std::vector<bool> late_;                         // by bucket: a gradient came after take()
  std::vector<bool> packed_;                       // by bucket: take() was called
  std::vector<std::vector<c10::Stream>> streams_;  // by bucket: where its gradients were made
  std::unique_ptr<pybind11::object> callback_;
};

}  // namespace fddp
