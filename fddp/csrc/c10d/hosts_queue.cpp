#include "c10d/hosts_queue.h"

#include "c10d/shm_errors.h"

#include <string>
#include <thread>

namespace fddp {

void QueuedWork::complete(std::exception_ptr failure) {
  {
    const std::lock_guard lock(state_mutex_);
    if (done_) return;
    done_ = true;
    failure_ = std::move(failure);
  }
  state_changed_.notify_all();
  finalize();
}

void QueuedWork::fail(const std::string& text) {
  try {
    throw_backend_error(
        described(name(), description_.sequence, description_.rank) + ": " + text);
  } catch (...) {
    complete(std::current_exception());
  }
}

bool QueuedWork::await(shm::Nanoseconds timeout) {
  std::unique_lock lock(state_mutex_);
  return state_changed_.wait_for(lock, timeout, [&] { return done_; });
}

bool QueuedWork::poll() {
  const std::lock_guard lock(state_mutex_);
  return done_;
}

std::string QueuedWork::error() const {
  const std::lock_guard lock(state_mutex_);
  if (failure_) std::rethrow_exception(failure_);
  return "";
}

std::shared_ptr<TaskQueue> TaskQueue::start(
    std::function<void(QueuedTask&)> run, std::function<void()> release) {
  const auto queue = std::make_shared<TaskQueue>();
  const std::lock_guard lock(queue->mutex_);
  std::thread thread([queue, run = std::move(run), release = std::move(release)]() mutable {
    queue->loop(run);
    release();
    run = nullptr;
    release = nullptr;
    {
      const std::lock_guard end(queue->mutex_);
      queue->ended_ = true;
    }
    queue->changed_.notify_all();
  });
  queue->thread_id_ = thread.get_id();
  thread.detach();
  return queue;
}

bool TaskQueue::push(const std::function<QueuedTask()>& make) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return false;
    tasks_.push_back(make());
  }
  changed_.notify_all();
  return true;
}

std::deque<QueuedTask> TaskQueue::close() {
  std::deque<QueuedTask> left;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    left.swap(tasks_);
  }
  changed_.notify_all();
  return left;
}

QueuedWorkPtr TaskQueue::current() const {
  const std::lock_guard lock(mutex_);
  return current_;
}

bool TaskQueue::join(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [&] { return ended_; });
}

void TaskQueue::loop(const std::function<void(QueuedTask&)>& run) {
  for (;;) {
    QueuedTask task;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closed_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
      current_ = task.work;
    }
    run(task);
    QueuedWorkPtr finished;  // released without the lock: that of a tensor may need the GIL
    const std::lock_guard lock(mutex_);
    finished.swap(current_);
  }
}

}  // namespace fddp
