// Newest operations of a GradSync or communicator, for the flight recorder. Readable from Python at
// any time.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <vector>

#include "clock.h"

namespace fddp {

class FlightRing {
 public:
  // Times are those of time.perf_counter; 0 stands for not yet, and infinity for never.
  struct Record {
    int64_t number;    // counts the operations of the ring
    int64_t source;    // identifies the schedule of the operation, or its description
    int64_t step;
    int64_t position;  // in the schedule, or number of bytes
    double launched_s;
    double waited_s = 0.0;
    double done_s = 0.0;
  };

  explicit FlightRing(size_t size) : records_(size, Record{-1, 0, 0, 0, 0.0}) {}

  // Add an operation that is about to be started. Return its record.
  Record launch(int64_t source, int64_t step, int64_t position) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t number = count_++;
    return slot(number) = Record{number, source, step, position, perf_counter_s()};
  }
  // Set the start of the wait. Only the first call counts: Python continues a wait that takes long.
  void set_waited(int64_t number, double time_s) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Record& record = slot(number);
    if (record.number == number && record.waited_s == 0.0) record.waited_s = time_s;
  }
  void set_done(int64_t number, double time_s) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Record& record = slot(number);
    if (record.number == number) record.done_s = time_s;
  }
  // Mark all operations in flight as failed.
  void fail() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Record& record : records_) {
      if (record.done_s == 0.0) record.done_s = std::numeric_limits<double>::infinity();
    }
  }
  // Return the newest operations in order.
  std::vector<Record> records() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t kept = std::min(count_, static_cast<int64_t>(records_.size()));
    std::vector<Record> newest;
    newest.reserve(static_cast<size_t>(kept));
    for (int64_t number = count_ - kept; number < count_; ++number) newest.push_back(records_[index_of(number)]);
    return newest;
  }

 private:
  size_t index_of(int64_t number) const { return static_cast<size_t>(number) % records_.size(); }
  Record& slot(int64_t number) { return records_[index_of(number)]; }

  mutable std::mutex mutex_;
  int64_t count_ = 0;
  std::vector<Record> records_;
};

}  // namespace fddp
