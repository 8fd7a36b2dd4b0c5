#include "progress_threads.h"

#include "own_thread.h"
#include "per_process.h"

#include <algorithm>
#include <system_error>

namespace fddp::shm {
namespace {

constexpr size_t kMaxThreads = 16;
constexpr auto kLongSleep = std::chrono::milliseconds(20);
constexpr auto kShortSleep = std::chrono::milliseconds(1);
// Time without work after which all threads but one end.
constexpr auto kIdle = std::chrono::seconds(1);

}  // namespace

ProgressThreads& ProgressThreads::of_process() {
  return shm::of_process<ProgressThreads>();
}

void ProgressThreads::add() {
  const std::lock_guard lock(mutex_);
  if (threads_ == 0) start_thread();
  ++groups_;
}

void ProgressThreads::remove(Progressing& group) {
  std::unique_lock lock(mutex_);
  if (!group.removed_) {
    group.removed_ = true;
    if (group.queued_) queue_.erase(std::find(queue_.begin(), queue_.end(), &group));
    if (--groups_ == 0) work_.notify_all();
  }
  served_.wait(lock, [&] {
    return group.server_ == std::thread::id() || group.server_ == std::this_thread::get_id();
  });
}

bool ProgressThreads::is_serving(const Progressing& group) {
  const std::lock_guard lock(mutex_);
  return group.server_ == std::this_thread::get_id();
}

void ProgressThreads::request(Progressing& group) {
  {
    const std::lock_guard lock(mutex_);
    if (group.server_ != std::thread::id()) {
      group.again_ = true;  // that thread puts it into the queue
      return;
    }
    if (group.queued_ || group.removed_) return;
    enqueue(group);
    start_if_needed();
  }
  work_.notify_one();  // without the lock, which the thread that wakes takes
}

void ProgressThreads::enqueue(Progressing& group) {
  group.queued_ = true;
  queue_.push_back(&group);
}

void ProgressThreads::start_if_needed() {
  if (queue_.size() <= idle_ || threads_ >= kMaxThreads) return;
  try {
    start_thread();
  } catch (const std::system_error&) {
    // Those that there are serve all groups.
  }
}

void ProgressThreads::start_thread() {
  std::thread(&ProgressThreads::run, this).detach();
  ++threads_;
}

void ProgressThreads::run() {
  become_own_thread("fddp-shm");
  std::unique_lock lock(mutex_);
  while (groups_ > 0 && threads_ <= kMaxThreads) {
    if (queue_.empty()) {
      const auto has_work = [&] { return !queue_.empty() || groups_ == 0; };
      ++idle_;
      bool worked = true;
      if (threads_ == 1) {
        work_.wait(lock, has_work);
      } else {
        worked = work_.wait_for(lock, kIdle, has_work);
      }
      --idle_;
      if (!worked && threads_ > 1) break;
      continue;
    }
    Progressing& group = *queue_.front();
    queue_.pop_front();
    group.queued_ = group.again_ = false;
    group.server_ = std::this_thread::get_id();
    const bool others_may = idle_ > 0 || threads_ < kMaxThreads;
    lock.unlock();
    const bool more = group.progress(others_may ? kLongSleep : kShortSleep);
    lock.lock();
    group.server_ = std::thread::id();
    // This thread goes on with the head of the queue, so that no other one has to wake.
    if ((more || group.again_) && !group.removed_) enqueue(group);
    served_.notify_all();  // after which the group may be destroyed
  }
  --threads_;
  if (!queue_.empty()) work_.notify_one();
}

ProgressThreads::Away::Away(ProgressThreads& threads) : threads_(threads) {
  const std::lock_guard lock(threads_.mutex_);
  --threads_.threads_;
  threads_.start_if_needed();
}

ProgressThreads::Away::~Away() {
  const std::lock_guard lock(threads_.mutex_);
  ++threads_.threads_;
}

}  // namespace fddp::shm
