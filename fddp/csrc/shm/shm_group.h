// Group of ranks on one host that run collectives over shared memory, as seen by one of them.
//
// Operations are posted to the control block in the order in which they were started. They are
// executed in that order by the thread that holds the executor lock: a thread in `wait`, or else
// a progress thread.
//
// [Note: phases]
// Each member counts the steps of operations that it has executed; this count is its phase. The
// steps of an operation follow from its signature alone, so a phase means the same on all members.
// "All members have reached phase p" is the only barrier.

#pragma once

#include "algorithms.h"
#include "arena.h"
#include "control_block.h"
#include "exchange.h"
#include "futex.h"
#include "life_mark.h"
#include "progress_threads.h"

#include <atomic>
#include <bitset>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace fddp::shm {

using Members = std::bitset<kMaxMembers>;
using Nanoseconds = std::chrono::nanoseconds;

inline constexpr char kForkedError[] = "a group cannot be used in a forked process";

// Maximum size of the tensor of an operation.
inline constexpr uint64_t kMaxBytes = uint64_t{1} << 46;

// Maximum sleep between two liveness checks of peers.
inline constexpr auto kSleepInterval = std::chrono::milliseconds(5);

// Cause of the end of a group.
struct Failure {
  Status status = Status::kOk;
  Members blamed;
  int reporter = -1;  // the member that detected the failure
};

// Operation requested by a caller.
struct Request {
  Signature signature;
  char* data;
  bool wait_soon;  // the caller will wait soon, so no progress thread is needed
  bool prompt;      // complete as early as possible, even if no thread waits
  std::shared_ptr<void> owner;  // keeps `data` alive
  char* result = nullptr;       // of a reduce-scatter: this member's chunk; null: in place
  std::shared_ptr<const ExchangeBuffers> exchange = nullptr;  // of an exchange, without `data`
  // Called once the operation has completed, in issue order, without locks; on any thread.
  std::function<void()> completed = nullptr;
  std::shared_ptr<const SumTree> tree = nullptr;  // association of a reduce-scatter
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
  // Valid once the operation has completed.
  Clock::time_point completed_at() const {
    return completed_at_;
  }
  // Signatures of all members if they did not match, else empty.
  const std::vector<Signature>& signatures() const {
    return signatures_;
  }

 private:
  friend class ShmGroup;

  Request request_;
  const uint64_t number_;
  const Clock::time_point started_at_ = Clock::now();
  // Offset of the tensor if it lies in the arena. Once posted: offset and location as posted.
  uint64_t offset_ = 0;
  DataLocation location_ = DataLocation::kArena;
  bool in_arena_ = false;

  // Guarded by the executor lock.
  std::unique_ptr<const Algorithm> algorithm_;
  int64_t segment_ = 0;
  bool next_copied_in_ = false;        // the next segment is in the staging buffer
  bool segment_run_ = false;           // this member has run the current segment
  uint64_t copied_in_phase_ = 0;       // phase at which the current segment is copied in
  uint64_t next_copied_in_phase_ = 0;  // and the next segment
  uint64_t end_phase_ = 0;             // phase that all members must reach

  std::vector<Signature> signatures_;
  Clock::time_point completed_at_;
  std::atomic<Status> status_ = Status::kPending;
};

using OperationPtr = std::shared_ptr<Operation>;

struct ShmGroupOptions {
  std::shared_ptr<Arena> arena;
  std::vector<std::shared_ptr<Mapping>> mappings;  // by member, including this one
  size_t index;
  uint64_t control_block;  // offset in the first member's arena
  Nanoseconds timeout;
  size_t waiters_on_host;  // ranks on this host that may wait at the same time
};

class ShmGroup final : private Progressing {
 public:
  // Allocate and initialize a control block. Return nullopt if no pages are available.
  static std::optional<uint64_t> make_control_block(Arena& arena, size_t members);

  // Throws std::invalid_argument if there is no control block of this group at the offset, and
  // std::system_error if no pages or no thread are available.
  explicit ShmGroup(ShmGroupOptions options);
  ~ShmGroup() override;
  ShmGroup(const ShmGroup&) = delete;
  ShmGroup& operator=(const ShmGroup&) = delete;

  // Start an operation. Never waits for peers. Throws std::invalid_argument for invalid requests.
  OperationPtr start(Request request);

  // Wait until the operation has completed, for at most `timeout`.
  Status wait(Operation& operation, Nanoseconds timeout);

  // Return true if the operation has completed. Completes it if this takes negligible time.
  bool done(Operation& operation);

  // Complete the operation as early as possible, even if no thread waits.
  void expedite(const Operation& operation);

  // Call `action` once the operation has completed, as `Request::completed`, which it replaces; at
  // once, on this thread, if that has happened.
  void when_completed(Operation& operation, std::function<void()> action);

  // Members that have not posted the operation yet.
  Members missing(const Operation& operation) const;

  // Set the time limit of operations.
  void set_timeout(Nanoseconds timeout) {
    timeout_ = timeout;
  }
  Nanoseconds timeout() const {
    return timeout_;
  }

  // End all pending operations and report the failure to the peers. No-op after the first failure.
  void fail(Status status, Members blamed);

  // Complete the operations that all members have started, as long as the others take part.
  void drain();

  // Leave the group.
  void leave();

  // Number of operations whose data has passed through this member's staging buffer.
  uint64_t staged_operations() const {
    return staged_operations_;
  }

  Failure failure() const;
  MemberState state(size_t member) const;
  size_t members() const {
    return options_.mappings.size();
  }
  size_t index() const {
    return options_.index;
  }
  bool is_forked() const;

  // Return true on a progress thread that executes operations of this group.
  bool is_own_thread() const;

  // State that messages share with the group; see messages.h.
  const ShmGroupOptions& options() const {
    return options_;
  }
  MemberSlot& slot(size_t member) const {
    return control_block_->slot(member);
  }
  // Options of a group of some of these members, in their new order, of which this is one.
  ShmGroupOptions options_of_part(const std::vector<size_t>& members, uint64_t control_block) const;
  // Members that can make no more progress: they have left or their process has ended.
  Members gone() const;
  bool may_spin() const {
    return may_spin_;
  }
  // End the group if a peer has reported a failure.
  void adopt_reported_failure();

 private:
  // Condition for further progress: any of these.
  struct WaitCondition {
    std::optional<uint64_t> posted;
    std::optional<uint64_t> phase;
    std::optional<uint64_t> front_phase;

    bool any() const {
      return posted || phase || front_phase;
    }
  };
  // Completed operations, to be released and announced without a lock held.
  struct OperationList {
    OperationList() = default;
    OperationList(const OperationList&) = delete;
    OperationList& operator=(const OperationList&) = delete;
    ~OperationList() {
      clear();
    }

    // Release the operations, and call their functions.
    void clear();
    // Return true if they have functions to be called.
    bool calls_back() const;

    std::vector<OperationPtr> operations;
  };

  // shm_group.cpp
  void check(const Request& request) const;
  void check_tree(const Request& request) const;
  void post_pending();
  bool post(Operation& operation);
  bool post_copy(Operation& operation, Descriptor& descriptor);
  bool post_exchange(Operation& operation, Descriptor& descriptor);
  std::optional<uint64_t> reserve_copy(uint64_t bytes);
  void reclaim_slots();

  // progress.cpp. Non-const functions except `progress` are called with the executor lock.
  WaitCondition advance(uint64_t until, bool only_copied, OperationList& to_release);
  bool step(Operation& operation, bool only_copied, WaitCondition& condition);
  bool match_signatures(Operation& operation);
  bool check_location(const Descriptor& descriptor, const Signature& signature, size_t member);
  std::optional<uint64_t> read_exchange(
      const Descriptor& descriptor, size_t member, ExchangeTable& table);
  bool run_steps(Operation& operation, WaitCondition& condition);
  void advance_phase(bool awaited);
  void mark_executed(const Operation& operation);
  void complete(Operation& operation, Status status);
  void pop_completed(OperationList& to_release);
  void check_peers(const WaitCondition& condition, OperationList& to_release);
  void end_group(const Failure& failure, OperationList& to_release);
  Failure reported_failure() const;
  bool has_failed(size_t member) const;
  bool all_posted(uint64_t count) const;
  bool all_reached(uint64_t phase) const;
  bool satisfied(const WaitCondition& condition) const;
  uint64_t first_abandoned() const;
  Members blocking_members(const WaitCondition& condition) const;
  bool progress(Nanoseconds sleep) override;
  bool needs_progress() const;  // by a progress thread; called with `queue_` held

  const ShmGroupOptions options_;
  std::atomic<Nanoseconds> timeout_;
  const int pid_;  // a forked process has no progress threads and is not a member
  ControlBlock* control_block_;
  const bool may_spin_;  // each rank has a processor of its own
  AdaptiveSpin adaptive_spin_;
  uint64_t copy_ring_ = 0;  // offset of the ring of copies in this member's arena
  uint64_t staging_ = 0;    // offset of the staging buffer

  // [Note: lock order of a group] `executor_` is acquired before `queue_`. No thread waits with
  // `queue_` held. Tensors of callers are released with neither held, because that may acquire the
  // GIL.
  std::mutex executor_;
  uint64_t phase_ = 0;             // of this member, as in the control block
  Clock::time_point front_since_;  // time at which the first pending operation became the first
  Members corrupt_;  // members that posted invalid descriptors

  mutable std::mutex queue_;
  std::deque<OperationPtr> pending_;  // from number `front_` on
  uint64_t front_ = 0;
  uint64_t issued_ = 0;
  uint64_t posted_ = 0;
  uint64_t executed_ = 0;         // operations whose steps this member has executed
  uint64_t released_ = 0;         // operations that all members have executed
  uint64_t progress_target_ = 0;  // progress threads complete operations below this number
  uint64_t copy_ring_head_ = 0;   // total bytes put into the ring of copies
  uint64_t copy_ring_tail_ = 0;
  struct RingUse {
    uint64_t phase;   // phase at which the operation ends
    uint64_t copies;  // head of the ring of copies after the operation
  };
  RingUse ring_use_[kRingSlots] = {};
  int waiting_threads_ = 0;
  bool left_ = false;
  Failure failure_;

  std::atomic<uint64_t> staged_operations_ = 0;
  std::atomic<bool> stopping_ = false;
  ProgressThreads& threads_ = ProgressThreads::of_process();
  std::optional<LifeMark> life_;
};

}  // namespace fddp::shm
