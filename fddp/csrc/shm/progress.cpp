// Execution of a group's operations; see shm_group.h.

#include "shm_group.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace fddp::shm {
namespace {

// Peers rarely wait for space in the ring of copies. They are woken at every 8th phase of small
// operations only.
constexpr uint64_t kWakeInterval = 8;

}  // namespace

// Execute all steps that need no waiting, as long as an operation up to number `until` is pending.
// Return the condition for further progress, if any.
ShmGroup::WaitCondition ShmGroup::advance(
    uint64_t until, bool only_copied, OperationList& to_release) {
  while (true) {
    const uint64_t abandoned = first_abandoned();
    OperationPtr front;
    OperationPtr next;
    WaitCondition condition;
    {
      const std::lock_guard lock(queue_);
      if (failure_.status != Status::kOk) return {};
      if (posted_ < issued_) post_pending();
      pop_completed(to_release);
      if (front_ < abandoned) {
        if (pending_.empty() || front_ > until) return {};
        front = pending_.front();
        if (executed_ < std::min(posted_, abandoned)) next = pending_[executed_ - front_];
        // Not posted for lack of space, which peers free.
        else if (executed_ == posted_ && executed_ < issued_ && released_ < executed_) {
          condition.phase = ring_use_[released_ % kRingSlots].phase;
        }
      }
    }
    if (!front) {
      end_group(reported_failure(), to_release);
      return {};
    }
    if (front->number_ < executed_) {
      if (all_reached(front->end_phase_)) {
        complete(*front, Status::kOk);
        continue;
      }
      condition.front_phase = front->end_phase_;
    }
    if (next && step(*next, only_copied, condition)) continue;
    if (corrupt_.any()) {
      end_group({Status::kCorrupt, corrupt_, static_cast<int>(index())}, to_release);
    }
    return condition;
  }
}

// Execute the next step of a posted operation. Return false if it has to wait.
bool ShmGroup::step(Operation& operation, bool only_copied, WaitCondition& condition) {
  if (only_copied && !is_copied(operation.request_.signature, members())) return false;
  if (!operation.algorithm_) {
    if (!all_posted(operation.number_ + 1)) {
      condition.posted = operation.number_ + 1;
      return false;
    }
    if (!match_signatures(operation)) return corrupt_.none();
  }
  return run_steps(operation, condition);
}

// Read and validate the descriptors of all members. Return false if the operation has completed or
// a descriptor is corrupt.
bool ShmGroup::match_signatures(Operation& operation) {
  const Signature& own = operation.request_.signature;
  const bool exchange = own.kind == Kind::kExchange;
  std::vector<MemberData> member_data;
  member_data.reserve(members());
  std::vector<ExchangeTable> tables(exchange ? members() : 0);
  bool agreed = true;
  for (size_t m = 0; m < members(); ++m) {
    const Mapping& mapping = *options_.mappings[m];
    Descriptor descriptor;
    std::memcpy(&descriptor, &slot(m).ring[operation.number_ % kRingSlots], sizeof descriptor);
    if (m == index()) {
      // Not read from the control block, where it may have been overwritten with a range that
      // overlaps the tensor.
      descriptor.location = operation.location_;
      descriptor.offset = operation.offset_;
    } else {
      if (descriptor.number != operation.number_) corrupt_.set(m);
      if (!(descriptor.signature == own)) {
        agreed = false;
        operation.signatures_.resize(members(), own);
        operation.signatures_[m] = descriptor.signature;
        continue;
      }
    }
    std::optional<uint64_t> offset = descriptor.offset;
    if (exchange) {
      offset = read_exchange(descriptor, m, tables[m]);
    } else if (m != index() && !check_location(descriptor, own, m)) {
      offset = std::nullopt;
    }
    if (!offset) corrupt_.set(m);
    member_data.push_back({descriptor.location, mapping.base() + offset.value_or(0)});
  }
  if (corrupt_.any()) return false;
  if (agreed && exchange && !sizes_match(tables)) {
    agreed = false;
    operation.signatures_.resize(members(), own);
  }
  if (!agreed) {
    advance_phase(true);
    mark_executed(operation);
    complete(operation, Status::kMismatch);
    return false;
  }
  const Request& request = operation.request_;
  if (exchange) {
    operation.algorithm_ = std::make_unique<Exchange>(
        *request.exchange, index(), std::move(member_data), std::move(tables));
  } else {
    operation.algorithm_ = std::make_unique<TensorAlgorithm>(
        own, request.data, request.result, index(), std::move(member_data), request.tree);
  }
  return true;
}

// Return true if the data of an operation on tensors lies within the arena of `member`.
bool ShmGroup::check_location(
    const Descriptor& descriptor, const Signature& signature, size_t member) {
  const bool copied = is_copied(signature, members());
  uint64_t bytes = 0;  // size of the range that is accessed
  if (copied) {
    bytes = copied_part(signature, members(), member).bytes;
  } else if (is_shared(signature, member)) {
    bytes =
        descriptor.location == DataLocation::kStaged ? 2 * kSegmentBytes : signature.bytes();
  }
  const bool valid_location = copied ? descriptor.location == DataLocation::kCopied
                                     : descriptor.location == DataLocation::kArena ||
                                           descriptor.location == DataLocation::kStaged;
  const bool aligned = signature.number_type == NumberType::kOpaque ||
                       descriptor.offset % signature.unit_bytes == 0;
  return valid_location && aligned &&
         options_.mappings[member]->contains(descriptor.offset, bytes);
}

// Read the table of an exchange and return the offset of the data. Return nullopt if any of it lies
// outside of the arena.
std::optional<uint64_t> ShmGroup::read_exchange(
    const Descriptor& descriptor, size_t member, ExchangeTable& table) {
  const Mapping& mapping = *options_.mappings[member];
  if (!mapping.contains(descriptor.offset, table_bytes(members()))) return std::nullopt;
  table.resize(members());
  const uint64_t data = read_table(mapping.base() + descriptor.offset, table);
  const bool staged = descriptor.location == DataLocation::kStaged;
  const bool known = staged || descriptor.location == DataLocation::kCopied ||
                     descriptor.location == DataLocation::kArena;
  if (!known || !mapping.contains(data, staged ? 2 * kSegmentBytes : 0)) return std::nullopt;
  for (size_t m = 0; m < members(); ++m) {
    const ExchangeEntry& entry = table[m];
    if (m == member || entry.bytes == 0) continue;
    if (entry.bytes > kMaxBytes || entry.begin > kMaxBytes) return std::nullopt;
    const bool inside = staged ? entry.begin < members()
                               : mapping.contains(data + entry.begin, entry.bytes);
    if (!inside) return std::nullopt;
  }
  return data;
}

bool ShmGroup::run_steps(Operation& operation, WaitCondition& condition) {
  const Algorithm& algorithm = *operation.algorithm_;
  if (algorithm.copied()) {
    algorithm.run_copied();
    advance_phase(phase_ % kWakeInterval == 0);
    mark_executed(operation);
    complete(operation, Status::kOk);
    return true;
  }
  if (!algorithm.staged()) {
    for (size_t m = 0; m < members(); ++m) {
      const ByteRange part = algorithm.accessed_range(m);
      const auto begin = options_.mappings[m]->offset_of(algorithm.memory(m), 0);
      if (begin) options_.mappings[m]->prefault(*begin + part.begin, part.bytes);
    }
    algorithm.run(0);
    advance_phase(true);
    operation.end_phase_ = phase_;
    mark_executed(operation);
    return true;
  }
  // See [Note: segmented staging].
  const bool last = operation.segment_ + 1 == algorithm.segments();
  if (operation.copied_in_phase_ == 0) {
    algorithm.copy_in(0);
    advance_phase(true);
    operation.copied_in_phase_ = phase_;
    return true;
  }
  if (!operation.next_copied_in_ && !last) {
    algorithm.copy_in(operation.segment_ + 1);
    advance_phase(true);
    operation.next_copied_in_phase_ = phase_;
    operation.next_copied_in_ = true;
    return true;
  }
  if (!operation.segment_run_) {
    if (!all_reached(operation.copied_in_phase_)) {
      condition.phase = operation.copied_in_phase_;
      return false;
    }
    algorithm.run(operation.segment_);
    advance_phase(true);
    operation.end_phase_ = phase_;
    operation.segment_run_ = true;
    return true;
  }
  if (!all_reached(operation.end_phase_)) {
    condition.phase = operation.end_phase_;
    return false;
  }
  algorithm.copy_out(operation.segment_);
  if (last) {
    mark_executed(operation);
    complete(operation, Status::kOk);
    return true;
  }
  ++operation.segment_;
  operation.copied_in_phase_ = operation.next_copied_in_phase_;
  operation.next_copied_in_ = operation.segment_run_ = false;
  return true;
}

// Increment the phase of this member. `awaited`: peers may sleep until this phase.
void ShmGroup::advance_phase(bool awaited) {
  slot(index()).phase.store(++phase_);
  if (awaited && all_reached(phase_)) wake_all(control_block_->event);
}

// Record that this member has executed all steps of an operation. The last step has been counted.
void ShmGroup::mark_executed(const Operation& operation) {
  const std::lock_guard lock(queue_);
  ring_use_[operation.number_ % kRingSlots].phase = phase_;
  executed_ = operation.number_ + 1;
}

void ShmGroup::complete(Operation& operation, Status status) {
  operation.completed_at_ = Clock::now();
  operation.status_.store(status, std::memory_order_release);
}

void ShmGroup::pop_completed(OperationList& to_release) {
  while (!pending_.empty() && pending_.front()->status() != Status::kPending) {
    front_since_ = pending_.front()->completed_at_;
    to_release.operations.push_back(std::move(pending_.front()));
    pending_.pop_front();
    ++front_;
  }
}

// Check whether members that block progress can still make progress.
void ShmGroup::check_peers(const WaitCondition& condition, OperationList& to_release) {
  OperationPtr front;
  {
    const std::lock_guard lock(queue_);
    if (failure_.status != Status::kOk || pending_.empty()) return;
    front = pending_.front();
  }
  const auto now = Clock::now();
  const Members gone = this->gone();
  // Computed last, so that the final progress of exited members counts.
  const Members awaited = blocking_members(condition);
  if ((awaited & gone).any()) {
    end_group({Status::kLost, awaited & gone, static_cast<int>(index())}, to_release);
  } else if (
      awaited.any() && now - std::max(front_since_, front->started_at_) >= timeout()) {
    end_group({Status::kTimeout, awaited, static_cast<int>(index())}, to_release);
  }
}

// End the group: on all members, or on this member alone if it leaves.
void ShmGroup::end_group(const Failure& failure, OperationList& to_release) {
  {
    const std::lock_guard lock(queue_);
    if (failure_.status != Status::kOk || failure.status == Status::kOk) return;
    failure_ = failure;
    uint64_t completed = front_;
    for (const OperationPtr& operation : pending_) {
      if (operation->status() == Status::kPending) break;
      ++completed;
    }
    slot(index()).completed.store(completed);
    // Peers may still write into the memory of pending operations.
    if (!pending_.empty()) options_.arena->retire();
    for (OperationPtr& operation : pending_) {
      if (operation->status() == Status::kPending) complete(*operation, failure.status);
      to_release.operations.push_back(std::move(operation));
    }
    pending_.clear();
    front_ = issued_;
  }
  MemberSlot& own = slot(index());
  if (failure.status == Status::kClosed) {
    own.state.store(MemberState::kLeft);
  } else {
    for (size_t word = 0; word < kMaxMembers / 64; ++word) {
      const Members mask(~uint64_t{0});
      own.blamed[word].store(((failure.blamed >> (64 * word)) & mask).to_ullong());
    }
    own.status.store(failure.status);
    own.state.store(MemberState::kFailed);
  }
  wake_all(control_block_->event);
}

// Return the failure that a peer has reported, if any.
Failure ShmGroup::reported_failure() const {
  for (size_t m = 0; m < members(); ++m) {
    if (!has_failed(m)) continue;
    Failure failure = {slot(m).status.load(), {}, static_cast<int>(m)};
    for (size_t word = 0; word < kMaxMembers / 64; ++word) {
      failure.blamed |= Members(slot(m).blamed[word].load()) << (64 * word);
    }
    for (size_t i = members(); i < kMaxMembers; ++i) failure.blamed.reset(i);
    if (is_failure(failure.status)) return failure;
    failure = {Status::kCorrupt, {}, static_cast<int>(index())};
    failure.blamed.set(m);
    return failure;
  }
  return {};
}

// Corrupt states count as failed.
bool ShmGroup::has_failed(size_t member) const {
  if (member == index()) return false;
  const MemberState state = slot(member).state.load();
  return state != MemberState::kActive && state != MemberState::kLeft;
}

bool ShmGroup::all_posted(uint64_t count) const {
  for (size_t m = 0; m < members(); ++m) {
    if (m != index() && slot(m).posted.load() < count) return false;
  }
  return true;
}

bool ShmGroup::all_reached(uint64_t phase) const {
  for (size_t m = 0; m < members(); ++m) {
    if (m != index() && slot(m).phase.load() < phase) return false;
  }
  return true;
}

bool ShmGroup::satisfied(const WaitCondition& condition) const {
  return (condition.posted && all_posted(*condition.posted)) ||
         (condition.phase && all_reached(*condition.phase)) ||
         (condition.front_phase && all_reached(*condition.front_phase));
}

// Return the number of the first operation that a member has abandoned; the maximum if there is
// none. Operations before it can still complete. Without this check, a member that reaches an
// abandoned operation late would find that all members had posted it, and write into tensors that
// their owners use again. Only a member that is stopped while it writes can end that write late.
uint64_t ShmGroup::first_abandoned() const {
  uint64_t first = std::numeric_limits<uint64_t>::max();
  for (size_t m = 0; m < members(); ++m) {
    if (!has_failed(m)) continue;
    first = std::min(first, slot(m).completed.load());
  }
  return first;
}

// Return the members that block the first pending operation.
Members ShmGroup::blocking_members(const WaitCondition& condition) const {
  Members blocking;
  for (size_t m = 0; m < members(); ++m) {
    if (m == index()) continue;
    if (condition.front_phase) {
      blocking[m] = slot(m).phase.load() < *condition.front_phase;
    } else {
      blocking[m] = (condition.posted && slot(m).posted.load() < *condition.posted) ||
                           (condition.phase && slot(m).phase.load() < *condition.phase);
    }
  }
  return blocking;
}

bool ShmGroup::needs_progress() const {
  return !stopping_ && waiting_threads_ == 0 && progress_target_ > front_;
}

// One round of a progress thread.
bool ShmGroup::progress(Nanoseconds sleep) {
  uint64_t until;
  {
    const std::lock_guard lock(queue_);
    if (!needs_progress()) return false;
    until = progress_target_ - 1;
  }
  WaitCondition condition;
  {
    OperationList to_release;
    {
      const std::lock_guard lock(executor_);
      condition = advance(until, false, to_release);
      if (condition.any()) check_peers(condition, to_release);
    }
    std::optional<ProgressThreads::Away> away;
    if (to_release.calls_back()) away.emplace(threads_);
    to_release.clear();
  }
  if (condition.any()) {
    wait_for(control_block_->event, sleep, [&] {
      return stopping_ || satisfied(condition) || until >= first_abandoned();
    });
  }
  bool awaited;
  bool more;
  {
    const std::lock_guard lock(queue_);
    awaited = waiting_threads_ > 0;
    more = needs_progress();
  }
  if (awaited) wake_all(control_block_->event);
  return more;
}

}  // namespace fddp::shm
