// How a team's operations are carried out; see team.h.

#include "team.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace fddp::shm {
namespace {

// How often the kernel is asked which members live.
constexpr auto kPollEvery = std::chrono::milliseconds(10);
// Room in the ring of copies is asked for rarely, so that not every phase of small operations
// wakes.
constexpr uint64_t kTellEvery = 8;

// The caller's threads take the process's signals.
void block_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace

// Does all that can be done without waiting, as long as an operation up to number `until` is
// pending; what it would have to wait for, if anything.
Team::Need Team::advance(uint64_t until, bool only_copied, Ended& ended) {
  while (true) {
    const uint64_t end_of_sound = sound();
    OperationPtr front;
    OperationPtr next;
    Need need;
    {
      const std::lock_guard lock(queue_);
      if (failure_.status != Status::kOk) return {};
      if (posted_ < issued_) post_all();
      pop(ended);
      if (front_ < end_of_sound) {
        if (pending_.empty() || front_ > until) return {};
        front = pending_.front();
        if (executed_ < std::min(posted_, end_of_sound)) next = pending_[executed_ - front_];
        // Not announced for want of room, which peers make.
        else if (executed_ == posted_ && executed_ < issued_ && released_ < executed_) {
          need.phase = trail_[released_ % kRing].phase;
        }
      }
    }
    if (!front) {
      settle(told(), ended);
      return {};
    }
    if (front->number_ < executed_) {
      if (all_reached(front->target_)) {
        end(*front, Status::kOk);
        continue;
      }
      need.front_phase = front->target_;
    }
    if (next && step(*next, only_copied, need)) continue;
    if (broken_.any()) settle({Status::kBroken, broken_, static_cast<int>(me())}, ended);
    return need;
  }
}

// The next thing to do of an operation that is announced; false if it has to wait.
bool Team::step(Operation& operation, bool only_copied, Need& need) {
  if (only_copied && !is_copied(operation.request_.terms, members())) return false;
  if (!operation.moves_) {
    if (!all_posted(operation.number_ + 1)) {
      need.posted = operation.number_ + 1;
      return false;
    }
    if (!meet(operation)) return broken_.none();
  }
  return take_steps(operation, need);
}

// Reads what all members have announced; false if that was the end of the operation.
bool Team::meet(Operation& operation) {
  const Terms& own = operation.request_.terms;
  const bool copied = is_copied(own, members());
  std::vector<Moves::Place> places;
  places.reserve(members());
  bool agreed = true;
  for (size_t m = 0; m < members(); ++m) {
    const Mapping& mapping = *options_.mappings[m];
    if (m == me()) {
      // Not what the board says: that may be another's by now, and overlap the tensor.
      places.push_back({operation.where_, mapping.base() + operation.offset_});
      continue;
    }
    Descriptor told;
    std::memcpy(&told, &seat(m).ring[operation.number_ % kRing], sizeof told);
    if (told.number != operation.number_) broken_.set(m);
    if (!(told.terms == own)) {
      agreed = false;
      operation.met_.resize(members(), own);
      operation.met_[m] = told.terms;
      continue;
    }
    uint64_t bytes = 0;  // that will be touched
    if (copied) {
      bytes = copied_part(own, members(), m).bytes;
    } else if (is_shared(own, m)) {
      bytes = told.where == Where::kStaged ? 2 * kPieceBytes : own.bytes();
    }
    const bool known = copied ? told.where == Where::kCopied
                              : told.where == Where::kArena || told.where == Where::kStaged;
    const bool aligned = own.number == Number::kOpaque || told.offset % own.unit_bytes == 0;
    if (known && aligned && mapping.holds(told.offset, bytes)) {
      places.push_back({told.where, mapping.base() + told.offset});
    } else {
      broken_.set(m);
    }
  }
  if (broken_.any()) return false;
  if (!agreed) {
    count_phase(true);
    executed(operation);
    end(operation, Status::kMismatch);
    return false;
  }
  operation.moves_.emplace(own, operation.request_.data, me(), std::move(places));
  return true;
}

bool Team::take_steps(Operation& operation, Need& need) {
  const Moves& moves = *operation.moves_;
  if (is_copied(operation.request_.terms, members())) {
    moves.receive();
    count_phase(phase_ % kTellEvery == 0);
    executed(operation);
    end(operation, Status::kOk);
    return true;
  }
  if (!moves.staged()) {
    for (size_t m = 0; m < members(); ++m) {
      const Stretch part = moves.touched(m);
      const auto begin = options_.mappings[m]->offset_of(moves.memory(m), 0);
      if (begin) options_.mappings[m]->prefault(*begin + part.begin, part.bytes);
    }
    moves.work(0);
    count_phase(true);
    operation.target_ = phase_;
    executed(operation);
    return true;
  }
  // [Note: pieces of staged data]
  const bool last = operation.piece_ + 1 == moves.pieces();
  if (operation.filled_at_ == 0) {
    moves.fill(0);
    count_phase(true);
    operation.filled_at_ = phase_;
    return true;
  }
  if (!operation.filled_ && !last) {
    moves.fill(operation.piece_ + 1);
    count_phase(true);
    operation.next_filled_at_ = phase_;
    operation.filled_ = true;
    return true;
  }
  if (!operation.worked_) {
    if (!all_reached(operation.filled_at_)) {
      need.phase = operation.filled_at_;
      return false;
    }
    moves.work(operation.piece_);
    count_phase(true);
    operation.target_ = phase_;
    operation.worked_ = true;
    return true;
  }
  if (!all_reached(operation.target_)) {
    need.phase = operation.target_;
    return false;
  }
  moves.drain(operation.piece_);
  if (last) {
    executed(operation);
    end(operation, Status::kOk);
    return true;
  }
  ++operation.piece_;
  operation.filled_at_ = operation.next_filled_at_;
  operation.filled_ = operation.worked_ = false;
  return true;
}

// `awaited`: whether peers may sleep for it.
void Team::count_phase(bool awaited) {
  seat(me()).phase.store(++phase_);
  if (awaited && all_reached(phase_)) ring(board_->bell);
}

// All steps of an operation are done here, and the last one was counted.
void Team::executed(const Operation& operation) {
  const std::lock_guard lock(queue_);
  trail_[operation.number_ % kRing].phase = phase_;
  executed_ = operation.number_ + 1;
}

void Team::end(Operation& operation, Status status) {
  operation.ended_at_ = Clock::now();
  operation.status_.store(status, std::memory_order_release);
}

void Team::pop(Ended& ended) {
  while (!pending_.empty() && pending_.front()->status() != Status::kPending) {
    calm_since_ = pending_.front()->ended_at_;
    ended.push_back(std::move(pending_.front()));
    pending_.pop_front();
    ++front_;
  }
}

// Looks whether what an operation waits for can still come.
void Team::look_after(const Need& need, Ended& ended) {
  OperationPtr front;
  {
    const std::lock_guard lock(queue_);
    if (failure_.status != Status::kOk || pending_.empty()) return;
    front = pending_.front();
  }
  const auto now = Clock::now();
  Members gone;
  if (now - polled_at_ >= kPollEvery) {
    polled_at_ = now;
    const std::vector<bool> dead = watch_.dead();
    for (size_t m = 0; m < members(); ++m) gone[m] = dead[m];
  }
  for (size_t m = 0; m < members(); ++m) {
    if (seat(m).state.load() == State::kLeft) gone.set(m);
  }
  // Only now: what members did last counts, although they are gone.
  const Members awaited = missing(need);
  if ((awaited & gone).any()) {
    settle({Status::kLost, awaited & gone, static_cast<int>(me())}, ended);
  } else if (
      awaited.any() && now - std::max(calm_since_, front->started_at_) >= options_.timeout) {
    settle({Status::kTimeout, awaited, static_cast<int>(me())}, ended);
  }
}

// Ends the team, for everybody unless it is this member who leaves.
void Team::settle(const Failure& failure, Ended& ended) {
  {
    const std::lock_guard lock(queue_);
    if (failure_.status != Status::kOk || failure.status == Status::kOk) return;
    failure_ = failure;
    uint64_t finished = front_;
    for (const OperationPtr& operation : pending_) {
      if (operation->status() == Status::kPending) break;
      ++finished;
    }
    seat(me()).finished.store(finished);
    // Peers may be about to write into what is pending.
    if (!pending_.empty()) options_.arena->retire();
    for (OperationPtr& operation : pending_) {
      if (operation->status() == Status::kPending) end(*operation, failure.status);
      ended.push_back(std::move(operation));
    }
    pending_.clear();
    front_ = issued_;
  }
  Seat& own = seat(me());
  if (failure.status == Status::kClosed) {
    own.state.store(State::kLeft);
  } else {
    for (size_t word = 0; word < kMostMembers / 64; ++word) {
      const Members mask(~uint64_t{0});
      own.about[word].store(((failure.about >> (64 * word)) & mask).to_ullong());
    }
    own.status.store(failure.status);
    own.state.store(State::kFailed);
  }
  ring(board_->bell);
}

// What a member that failed has told.
Failure Team::told() const {
  for (size_t m = 0; m < members(); ++m) {
    if (m == me() || seat(m).state.load() == State::kHere) continue;
    if (seat(m).state.load() == State::kLeft) continue;
    Failure failure = {seat(m).status.load(), {}, static_cast<int>(m)};
    for (size_t word = 0; word < kMostMembers / 64; ++word) {
      failure.about |= Members(seat(m).about[word].load()) << (64 * word);
    }
    for (size_t i = members(); i < kMostMembers; ++i) failure.about.reset(i);
    const bool known = failure.status == Status::kLost || failure.status == Status::kTimeout ||
                       failure.status == Status::kBroken || failure.status == Status::kTold;
    if (known) return failure;
    failure = {Status::kBroken, {}, static_cast<int>(me())};
    failure.about.set(m);
    return failure;
  }
  return {};
}

bool Team::all_posted(uint64_t count) const {
  for (size_t m = 0; m < members(); ++m) {
    if (m != me() && seat(m).posted.load() < count) return false;
  }
  return true;
}

bool Team::all_reached(uint64_t phase) const {
  for (size_t m = 0; m < members(); ++m) {
    if (m != me() && seat(m).phase.load() < phase) return false;
  }
  return true;
}

bool Team::satisfied(const Need& need) const {
  return (need.posted && all_posted(*need.posted)) || (need.phase && all_reached(*need.phase)) ||
         (need.front_phase && all_reached(*need.front_phase));
}

// The number of the first operation that a member has given up, if one has; those before have all
// that they need. A member that comes late to one that was given up would find that all had come.
uint64_t Team::sound() const {
  uint64_t first = std::numeric_limits<uint64_t>::max();
  for (size_t m = 0; m < members(); ++m) {
    const State state = seat(m).state.load();
    if (m == me() || state == State::kHere || state == State::kLeft) continue;
    first = std::min(first, seat(m).finished.load());
  }
  return first;
}

// Who holds up the operation in front.
Members Team::missing(const Need& need) const {
  Members members_missing;
  for (size_t m = 0; m < members(); ++m) {
    if (m == me()) continue;
    if (need.front_phase) {
      members_missing[m] = seat(m).phase.load() < *need.front_phase;
    } else {
      members_missing[m] = (need.posted && seat(m).posted.load() < *need.posted) ||
                           (need.phase && seat(m).phase.load() < *need.phase);
    }
  }
  return members_missing;
}

// The progress thread.
void Team::run() {
  block_signals();
  pthread_setname_np(pthread_self(), "fddp-shm");
  std::unique_lock lock(queue_);
  while (true) {
    work_.wait(lock, [&] { return stopping_ || (waiters_ == 0 && wanted_ > front_); });
    if (stopping_) return;
    const uint64_t until = wanted_ - 1;
    lock.unlock();
    Need need;
    {
      Ended ended;
      const std::lock_guard executing(executor_);
      need = advance(until, false, ended);
      if (need.any()) look_after(need, ended);
    }
    if (need.any()) {
      sleep_on(board_->bell, kSlice, [&] { return stopping_ || satisfied(need) || until >= sound(); });
    }
    lock.lock();
    if (waiters_ > 0) {
      lock.unlock();
      ring(board_->bell);
      lock.lock();
    }
  }
}

}  // namespace fddp::shm
