// State of a group over several hosts that its thread shares with the backend.

#pragma once

#include "c10d/hosts_collectives.h"
#include "c10d/hosts_faults.h"
#include "c10d/hosts_queue.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fddp {

class HostsRuntime {
 public:
  static std::shared_ptr<HostsRuntime> start(
      HostLevels levels, const c10::intrusive_ptr<c10d::Store>& store,
      std::chrono::milliseconds timeout);

  HostsRuntime(
      HostLevels levels, const c10::intrusive_ptr<c10d::Store>& store,
      std::chrono::milliseconds timeout);

  TaskQueue& queue() const {
    return *queue_;
  }
  // Gloo over all ranks. Throws once the group is closed.
  c10::intrusive_ptr<c10d::Backend> whole() const;
  ShmBackend& within() const {
    return *within_;
  }
  std::chrono::milliseconds timeout() const {
    return timeout_;
  }
  void set_timeout(std::chrono::milliseconds timeout);
  // Leave the group and end all works. Waits for the thread unless a call of gloo occupies it.
  void close();
  // Close all groups of this process, before the interpreter ends: a thread that releases a tensor
  // after that, which needs the GIL, would end the process with SIGABRT.
  static void close_all();
  // Run the communication of a task, on the thread of the queue.
  void communicate(
      std::chrono::milliseconds timeout,
      const std::function<void(const HostsCollective&)>& body);

 private:
  void run(QueuedTask& task);
  void release();
  void end_group(const LevelError& error);
  Finding finding_of(const LevelError& error) const;
  std::vector<int> ranks_of(const shm::Members& members) const;
  std::vector<int> ranks_of_other_hosts() const;

  const int pid_;  // a forked process has no thread of the group
  const c10::intrusive_ptr<ShmBackend> within_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<bool> closed_ = false;
  mutable std::mutex mutex_;
  c10::intrusive_ptr<c10d::Backend> whole_;  // guarded by the mutex; null once closed
  std::shared_ptr<TaskQueue> queue_;

  // Used by the thread alone.
  HostLevels levels_;
  FaultReports reports_;
  std::string cause_;  // of the end of the group
};

}  // namespace fddp
