// A team: the ranks of one host that carry out collectives with each other, seen from one of them.
//
// Operations are announced on the board in the order in which they were started, and carried out in
// that order by whichever thread holds the executor's lock: one that waits, or else the progress
// thread.
//
// [Note: phases]
// Members count the steps of operations that they have done. What steps an operation has follows
// from its terms alone, so that the counts mean the same everywhere: "all have reached phase p" is
// the only barrier there is.

#pragma once

#include "arena.h"
#include "futex.h"
#include "board.h"
#include "algorithms.h"
#include "process_watch.h"

#include <atomic>
#include <bitset>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace fddp::shm {

using Members = std::bitset<kMostMembers>;
using Nanoseconds = std::chrono::nanoseconds;

// How long a thread sleeps before it looks after its peers.
inline constexpr auto kSlice = std::chrono::milliseconds(20);

// Why a team has ended.
struct Failure {
  Status status = Status::kOk;
  Members about;
  int teller = -1;  // the member that noticed
};

// What a caller wants done.
struct Request {
  Terms terms;
  char* data;
  bool soon;    // the caller is about to wait: others need not hurry
  bool prompt;  // to be finished as soon as it can be, even where nobody needs it
  std::shared_ptr<void> keep;  // what holds `data`
};

class Operation {
 public:
  Operation(Request request, uint64_t number) : request_(std::move(request)), number_(number) {}

  Status status() const {
    return status_.load(std::memory_order_acquire);
  }
  uint64_t number() const {
    return number_;
  }
  // After it has ended.
  Clock::time_point ended_at() const {
    return ended_at_;
  }
  // All members' terms, where they did not agree.
  const std::vector<Terms>& met() const {
    return met_;
  }

 private:
  friend class Team;

  const Request request_;
  const uint64_t number_;
  const Clock::time_point started_at_ = Clock::now();
  // Of its data, where that lies in the arena; once it is announced, of what was announced.
  uint64_t offset_ = 0;
  Where where_ = Where::kArena;
  bool in_arena_ = false;

  // Guarded by the executor's lock.
  std::optional<Moves> moves_;
  int64_t piece_ = 0;
  bool filled_ = false;     // whether the piece after this one is in the staging buffer
  bool worked_ = false;     // whether this member has worked on the piece
  uint64_t filled_at_ = 0;  // phase that says so of the piece
  uint64_t next_filled_at_ = 0;
  uint64_t target_ = 0;  // phase that all must reach

  std::vector<Terms> met_;
  Clock::time_point ended_at_;
  std::atomic<Status> status_ = Status::kPending;
};

using OperationPtr = std::shared_ptr<Operation>;

struct TeamOptions {
  std::shared_ptr<Arena> arena;
  std::vector<std::shared_ptr<Mapping>> mappings;  // by member, the own one too
  size_t me;
  uint64_t board;  // offset in the first member's arena
  std::vector<int> pidfds;
  Nanoseconds timeout;
  size_t crowd;  // ranks on this host
};

class Team {
 public:
  // Makes an empty board for so many members; none if there are no pages for it.
  static std::optional<uint64_t> make_board(Arena& arena, size_t members);

  // Throws std::invalid_argument if the board is another one's, std::system_error if there are no
  // pages, or no thread.
  explicit Team(TeamOptions options);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Never blocks for others. Throws std::invalid_argument for what can't be done.
  OperationPtr start(Request request);

  // Waits until it has ended, for at most `longest`.
  Status wait(Operation& operation, Nanoseconds longest);

  // Whether it has ended; finishes it if that takes next to nothing.
  bool done(Operation& operation);

  // Ends all that is pending and says so on the board; the first failure counts.
  void fail(Status status, Members about);

  // Says that this member comes no more.
  void leave();

  Failure failure() const;
  State state(size_t member) const;
  size_t members() const {
    return options_.mappings.size();
  }
  size_t me() const {
    return options_.me;
  }
  bool is_forked() const;

  // Whether the progress thread asks.
  bool is_own_thread() const;

 private:
  // What an executor waits for: any of these.
  struct Need {
    std::optional<uint64_t> posted;
    std::optional<uint64_t> phase;
    std::optional<uint64_t> front_phase;

    bool any() const {
      return posted || phase || front_phase;
    }
  };
  using Ended = std::vector<OperationPtr>;  // to be let go of without a lock

  // team.cpp
  Seat& seat(size_t member) const {
    return board_->seat(member);
  }
  void check(const Request& request) const;
  void post_all();
  bool post(Operation& operation);
  void release();

  // executor.cpp; all but `run` and the questions are called with the executor's lock.
  Need advance(uint64_t until, bool only_copied, Ended& ended);
  bool step(Operation& operation, bool only_copied, Need& need);
  bool meet(Operation& operation);
  bool take_steps(Operation& operation, Need& need);
  void count_phase(bool awaited);
  void executed(const Operation& operation);
  void end(Operation& operation, Status status);
  void pop(Ended& ended);
  void look_after(const Need& need, Ended& ended);
  void settle(const Failure& failure, Ended& ended);
  Failure told() const;
  bool all_posted(uint64_t count) const;
  bool all_reached(uint64_t phase) const;
  bool satisfied(const Need& need) const;
  uint64_t sound() const;
  Members missing(const Need& need) const;
  void run();

  const TeamOptions options_;
  const Watch watch_;
  const int pid_;  // a process that is forked off has neither the thread nor the say
  Board* board_;
  const bool spins_;  // whether each rank has a processor, so that looking may replace sleeping
  Patience patience_;
  uint64_t copies_ = 0;   // offset in the own arena of the ring of copies
  uint64_t staging_ = 0;  // and of the staging buffer

  // [Note: locks of a team] `executor_` comes before `queue_`. Under `queue_` nobody waits, and
  // under neither is a caller's tensor let go of: that may need the interpreter's lock.
  std::mutex executor_;
  uint64_t phase_ = 0;            // own; as on the board
  Clock::time_point calm_since_;  // when the operation in front came to be there
  Clock::time_point polled_at_;
  Members broken_;                // who announced nonsense

  mutable std::mutex queue_;
  std::deque<OperationPtr> pending_;  // from number `front_` on
  uint64_t front_ = 0;
  uint64_t issued_ = 0;
  uint64_t posted_ = 0;
  uint64_t executed_ = 0;  // whose own steps are all done
  uint64_t released_ = 0;  // that all members are through with
  uint64_t wanted_ = 0;    // the progress thread finishes operations below this number
  uint64_t copies_head_ = 0;  // bytes ever put into the ring of copies
  uint64_t copies_tail_ = 0;
  struct Trail {
    uint64_t phase;   // that ends the operation
    uint64_t copies;  // the ring's head after it
  };
  Trail trail_[kRing] = {};
  int waiters_ = 0;
  bool left_ = false;
  Failure failure_;

  std::atomic<bool> stopping_ = false;
  std::condition_variable work_;
  std::thread thread_;
};

}  // namespace fddp::shm
