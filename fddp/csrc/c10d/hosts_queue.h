// Works of a group over several hosts, executed in order on one thread.

#pragma once

#include "c10d/shm_work.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace fddp {

// Work whose operation is a function on the thread of a queue.
class QueuedWork : public ShmWork {
 public:
  using ShmWork::ShmWork;

  // Complete the work, with an error unless `failure` is null. A second call does nothing.
  void complete(std::exception_ptr failure);
  // Complete the work with a DistBackendError that has this text behind the name of the operation.
  void fail(const std::string& text);

 protected:
  bool await(shm::Nanoseconds timeout) override;
  bool poll() override;
  void expedite() override {}
  std::string error() const override;
  std::string awaited() const override {
    return "";
  }

 private:
  mutable std::mutex state_mutex_;
  std::condition_variable state_changed_;
  bool done_ = false;
  std::exception_ptr failure_;
};

using QueuedWorkPtr = c10::intrusive_ptr<QueuedWork>;

struct QueuedTask {
  QueuedWorkPtr work;
  std::function<void()> body;  // the communication; throws on failure
};

// First in, first out. The thread owns the queue together with its users, so that it can outlive
// them within a call of gloo, which cannot be interrupted.
class TaskQueue {
 public:
  // `run` executes a task. `release` is called last, on the thread of the queue.
  static std::shared_ptr<TaskQueue> start(
      std::function<void(QueuedTask&)> run, std::function<void()> release);

  // Add a task, made by `make` under the lock of the queue: numbers follow the order of the queue.
  // Returns false if the queue is closed.
  bool push(const std::function<QueuedTask()>& make);
  // Return the tasks that were not started, and start no further ones.
  std::deque<QueuedTask> close();
  // The task that runs now; null if none does.
  QueuedWorkPtr current() const;
  // Wait for the end of the thread after `close`; returns false after `timeout`.
  bool join(std::chrono::milliseconds timeout);
  bool is_own_thread() const {
    return std::this_thread::get_id() == thread_id_;
  }

 private:
  void loop(const std::function<void(QueuedTask&)>& run);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<QueuedTask> tasks_;
  QueuedWorkPtr current_;
  bool closed_ = false;
  bool ended_ = false;
  std::thread::id thread_id_;
};

}  // namespace fddp
