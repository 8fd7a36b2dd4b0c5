// Times of the collectives of one step, for the flight recorder. Readable from Python at any time.

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <vector>

#include "clock.h"

namespace fddp {

class StepLog {
 public:
  // Times are those of time.perf_counter; 0 stands for not yet, and infinity for never.
  struct Record {
    int64_t position;  // in the schedule
    double launched_s;
    double waited_s = 0.0;
    double done_s = 0.0;
  };

  // Add a collective that is about to be started. Return its number in this log.
  size_t launch(int64_t position) {
    const std::lock_guard<std::mutex> lock(mutex_);
    records_.push_back({position, perf_counter_s()});
    return records_.size() - 1;
  }
  // Set the start of the wait. Only the first call counts: Python continues a wait that takes long.
  void set_waited(size_t number, double time_s) {
    const std::lock_guard<std::mutex> lock(mutex_);
    double& waited_s = records_.at(number).waited_s;
    if (waited_s == 0.0) waited_s = time_s;
  }
  void set_done(size_t number, double time_s) {
    const std::lock_guard<std::mutex> lock(mutex_);
    records_.at(number).done_s = time_s;
  }
  // Mark all collectives in flight as failed.
  void fail() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Record& record : records_) {
      if (record.done_s == 0.0) record.done_s = std::numeric_limits<double>::infinity();
    }
  }
  std::vector<Record> records() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return records_;
  }
  size_t size() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return records_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Record> records_;
};

}  // namespace fddp
