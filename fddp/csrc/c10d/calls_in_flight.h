// Collectives of a rank that share memory.
//
// [Note: shared memory of calls]
// Each call sees what earlier calls of this rank wrote. A call waits for those in flight that write its
// tensors, or use what it writes, before it reads anything. Tensors of one coalesced call that share
// memory are copied, so that all are read before any is written.

#pragma once

#include "c10d/shm_work.h"
#include "c10d/tensor_ranges.h"

#include <deque>
#include <mutex>
#include <vector>

namespace fddp {

class CallsInFlight {
 public:
  using Collective = c10::intrusive_ptr<CollectiveWork>;

  // Wait for the calls that conflict with one that is to start.
  void await_conflicting(const std::vector<TensorRange>& ranges);

  // Add a call whose operations have all started.
  void add(std::vector<TensorRange> ranges, const Collective& work);

 private:
  struct Call {
    std::vector<TensorRange> ranges;
    c10::weak_intrusive_ptr<CollectiveWork> work;
  };

  std::mutex mutex_;
  std::deque<Call> calls_;  // in the order in which they complete
};

}  // namespace fddp
