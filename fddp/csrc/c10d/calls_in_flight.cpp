#include "c10d/calls_in_flight.h"

#include <utility>

namespace fddp {

void CallsInFlight::await_conflicting(const std::vector<TensorRange>& ranges) {
  std::vector<Collective> conflicting;
  {
    const std::lock_guard lock(mutex_);
    const auto is_over = [](const Call& call) {
      const Collective found = call.work.lock();
      return !found || found->is_finished();
    };
    while (!calls_.empty() && is_over(calls_.front())) calls_.pop_front();
    for (const Call& call : calls_) {
      if (!calls_conflict(call.ranges, ranges)) continue;
      if (Collective found = call.work.lock()) conflicting.push_back(std::move(found));
    }
  }
  for (const Collective& earlier : conflicting) earlier->settle();
}

void CallsInFlight::add(std::vector<TensorRange> ranges, const Collective& work) {
  const std::lock_guard lock(mutex_);
  calls_.push_back({std::move(ranges), c10::weak_intrusive_ptr<CollectiveWork>(work)});
}

}  // namespace fddp
