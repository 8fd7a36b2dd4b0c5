// Threads that execute operations for which no thread of a caller waits: one set for all groups of a
// process.
//
// [Note: shared progress threads]
// A thread serves the group at the head of a queue for one round, which executes what needs no
// waiting and may then sleep for a short time, and puts it at the tail if it has more to do. A group
// whose peers are late thus holds no thread. Threads are started while groups wait for one, up to a
// limit; at the limit they sleep for a millisecond only. So each group with work is served again and
// again, whatever the others wait for, and groups may be used in different orders on different ranks.
//
// A function that is called at the completion of an operation may wait for another group. A thread that
// is about to call one gives up its place, and another thread may take it.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <thread>

namespace fddp::shm {

class ProgressThreads;

// A group, for the threads. Its fields belong to them.
class Progressing {
 public:
  virtual ~Progressing() = default;

  // Serve the group for one round, which sleeps for at most `sleep`. Return true if there is more to
  // do.
  virtual bool progress(std::chrono::nanoseconds sleep) = 0;

 private:
  friend class ProgressThreads;

  bool queued_ = false;
  bool again_ = false;  // has something to do that its thread may not have seen
  bool removed_ = false;
  std::thread::id server_;  // thread that serves it, if one does
};

class ProgressThreads {
 public:
  static ProgressThreads& of_process();

  // Serve a group from now on. There is a thread as long as there are groups; throws
  // std::system_error if it can't be started.
  void add();
  // Serve a group no more. Waits until no thread serves it, other than the calling one. The group has
  // been asked to return.
  void remove(Progressing& group);
  // Return true on the thread that serves a group.
  bool is_serving(const Progressing& group);

  // Serve a group soon, which has something to do. Call it without locks that `progress` takes: the
  // thread that wakes would wait for them.
  void request(Progressing& group);

  // The calling thread, one of these, does something that may wait for other groups.
  class Away {
   public:
    explicit Away(ProgressThreads& threads);
    ~Away();
    Away(const Away&) = delete;
    Away& operator=(const Away&) = delete;

   private:
    ProgressThreads& threads_;
  };

 private:
  // All but `run` with the lock.
  void enqueue(Progressing& group);
  void start_if_needed();
  void start_thread();
  void run();

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable served_;
  std::deque<Progressing*> queue_;
  size_t groups_ = 0;
  size_t threads_ = 0;  // that are not away
  size_t idle_ = 0;
};

}  // namespace fddp::shm
