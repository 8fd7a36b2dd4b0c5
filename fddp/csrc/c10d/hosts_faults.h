// Agreement of the ranks of a group over several hosts on the cause of its end.
//
// A rank that loses a connection knows the address of the peer at best, and the peer may have
// closed it because of a third rank. So the ranks report through the store of the group. The first
// cause in the store is that of all ranks:
// - a rank of the same host has ended, or called another operation: seen in shared memory;
// - the connections of a rank over all ranks are closed: seen by a probe;
// - a rank did not call the operation, and has reported nothing itself.

#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace fddp {

// Observation of one rank.
struct Finding {
  std::string cause;      // certain; empty if unknown
  std::vector<int> late;  // ranks that have not called the operation
  // Ranks of which one has not called the operation; used if the store is gone.
  std::vector<int> suspects;
  bool timed_out = false;
  // Time until connections are probed. Gloo closes those of a rank that timed out before the rank
  // can report it.
  std::chrono::milliseconds probe_after{0};
  std::vector<int> disconnected;  // ranks found by a first probe; used if the store is gone
  std::string text;               // used if no cause is found
};

class FaultReports {
 public:
  // Return the ranks whose connections are closed.
  using Probe = std::function<std::vector<int>()>;

  // The keys in `store` must be those of this group alone.
  FaultReports(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);

  // Return true if a rank has reported the end of the group.
  bool exist();

  // Report a finding, before connections are closed because of it.
  void report(const Finding& finding);

  // Return the cause on which all ranks agree. Takes a few seconds if no rank knows it with
  // certainty. `timeout` is that of the group, for texts.
  std::string settle(
      const Finding& finding, const Probe& probe, std::chrono::milliseconds timeout);

 private:
  const c10::intrusive_ptr<c10d::Store> store_;  // with a connection of its own
  const int rank_;
  const int size_;
  bool answers_ = true;  // the store has answered in time so far
};

// "rank 1 left the group, or its process has ended".
std::string text_of_lost(const std::vector<int>& ranks);

}  // namespace fddp
