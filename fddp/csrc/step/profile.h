// Ranges of a step in a profile of torch.
//
// [Note: rows of collectives]
// A viewer draws the ranges of a thread as a stack, and leaves out those that overlap without being
// nested. A collective overlaps the backward pass of the thread that starts it, and other
// collectives. Its range is therefore that of a thread without another open range: a row, which does
// nothing else. Rows are started while a profiler is active, and sleep afterwards.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>

namespace fddp {

// Range of a collective, from its start to its end, in a row of its own.
class CollectiveRange {
 public:
  // Begin the range of a collective on a tensor, which may be undefined and is not kept. Return null
  // if no profiler records this thread, or no thread can be started.
  static std::shared_ptr<CollectiveRange> begin(const std::string& title, const at::Tensor& tensor);

  CollectiveRange() = default;
  ~CollectiveRange() { end(); }
  CollectiveRange(const CollectiveRange&) = delete;
  CollectiveRange& operator=(const CollectiveRange&) = delete;

  // End the range, on any thread. Safe to call repeatedly; when it returns, the range has ended.
  void end();

 private:
  std::mutex mutex_;
  std::unique_ptr<at::RecordFunction> function_;  // null once it has ended
  // State of the profiler, on which callbacks write. Held weakly, because the profiler may stop
  // before a collective ends, and with it the memory of its events.
  std::weak_ptr<c10::ThreadLocalDebugInfo> profiler_;
  size_t row_ = 0;
};

}  // namespace fddp
