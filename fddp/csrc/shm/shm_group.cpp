#include "shm_group.h"

#include <linux/futex.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace fddp::shm {
namespace {

// Size of the ring of copies, which peers may still read.
constexpr uint64_t kCopyRingBytes = uint64_t{1} << 20;
// Longest wait for members that do not execute what they have started.
constexpr auto kDrainLimit = std::chrono::seconds(5);

size_t processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return static_cast<size_t>(CPU_COUNT(&set));
}

uint64_t allocate_or_throw(Arena& arena, uint64_t bytes, const char* what) {
  const auto block = arena.allocate(bytes);
  if (!block) throw std::system_error(ENOMEM, std::generic_category(), what);
  return block->begin;
}

ControlBlock* control_block_at(const ShmGroupOptions& options) {
  const size_t n = options.mappings.size();
  if (n < 2 || n > kMaxMembers || options.index >= n) {
    throw std::invalid_argument(
        "a group has 2 to 256 members, got " + std::to_string(n) + " mappings and the index " +
        std::to_string(options.index));
  }
  const Mapping& mapping = *options.mappings[0];
  const uint64_t offset = options.control_block;
  if (offset % alignof(ControlBlock) != 0 || !mapping.contains(offset, ControlBlock::bytes(n))) {
    throw std::invalid_argument(
        "offset " + std::to_string(offset) + " of the control block is misaligned or outside of "
        "the arena of " + std::to_string(mapping.span()) + " bytes");
  }
  auto* const control_block =
      std::launder(reinterpret_cast<ControlBlock*>(mapping.base() + offset));
  if (control_block->magic != ControlBlock::kMagic || control_block->members != n) {
    throw std::invalid_argument(
        "there is no control block of " + std::to_string(n) + " members at offset " +
        std::to_string(offset));
  }
  return control_block;
}

}  // namespace

std::optional<uint64_t> ShmGroup::make_control_block(Arena& arena, size_t members) {
  if (members < 2 || members > kMaxMembers) {
    throw std::invalid_argument(
        "a control block is for 2 to 256 members, got " + std::to_string(members));
  }
  const auto block = arena.allocate(ControlBlock::bytes(members));
  if (!block) return std::nullopt;
  char* const memory = arena.mapping()->base() + block->begin;
  auto* const control_block = new (memory) ControlBlock{};
  for (size_t m = 0; m < members; ++m) new (&control_block->slot(m)) MemberSlot{};
  control_block->members = members;
  control_block->magic = ControlBlock::kMagic;
  return block->begin;
}

ShmGroup::ShmGroup(ShmGroupOptions options)
    : options_(std::move(options)),
      timeout_(options_.timeout),
      pid_(getpid()),
      control_block_(control_block_at(options_)),
      may_spin_(std::max(options_.waiters_on_host, members()) <= processors()),
      front_since_(Clock::now()) {
  Arena& arena = *options_.arena;
  copy_ring_ = allocate_or_throw(
      arena, kCopyRingBytes, "no pages are available for the copies of a group");
  try {
    staging_ = allocate_or_throw(
        arena, 2 * kSegmentBytes, "no pages are available for the staging buffer of a group");
    life_.emplace(slot(index()).life);
    threads_.add();
  } catch (...) {
    arena.free(copy_ring_);
    if (staging_ != 0) arena.free(staging_);
    throw;
  }
}

ShmGroup::~ShmGroup() {
  leave();
  threads_.remove(*this);
  // Memory that a peer may still read is not reused.
  reclaim_slots();
  if (failure_.status == Status::kClosed && released_ == issued_) {
    options_.arena->free(copy_ring_);
    options_.arena->free(staging_);
  }
}

OperationPtr ShmGroup::start(Request request) {
  check(request);
  if (is_forked()) throw std::invalid_argument(kForkedError);
  const Signature& signature = request.signature;
  const bool copied = is_copied(signature, members());
  const bool exchange = signature.kind == Kind::kExchange;
  const bool needs_thread = request.prompt || !(request.wait_soon || copied);
  const auto offset = options_.mappings[index()]->offset_of(request.data, signature.bytes());
  const bool aligned = reinterpret_cast<uintptr_t>(request.data) % signature.unit_bytes == 0;

  OperationList completed_at_once;
  std::unique_lock lock(queue_);
  auto operation = std::make_shared<Operation>(std::move(request), issued_);
  operation->in_arena_ =
      !exchange && offset.has_value() && (aligned || signature.number_type == NumberType::kOpaque);
  operation->offset_ = offset.value_or(0);
  if (failure_.status != Status::kOk) {
    complete(*operation, failure_.status);
    completed_at_once.operations.push_back(operation);
    return operation;
  }
  ++issued_;
  pending_.push_back(operation);
  post_pending();
  if (needs_thread || posted_ < issued_) {
    progress_target_ = issued_;
    const bool requests = needs_progress();
    lock.unlock();
    if (requests) threads_.request(*this);
  }
  return operation;
}

void ShmGroup::check(const Request& request) const {
  const Signature& signature = request.signature;
  const auto refuse = [](const char* why) { throw std::invalid_argument(why); };
  const Kind kind = signature.kind;
  const uint32_t unit_bytes = signature.unit_bytes;
  const bool opaque = signature.number_type == NumberType::kOpaque;
  const Reduction reduction = signature.reduction;
  if (static_cast<uint32_t>(kind) >= kKindCount) refuse("unknown operation");
  if (unit_bytes == 0 || unit_bytes > 1024) refuse("an element must have 1 to 1024 bytes");
  if (signature.units < 0 || static_cast<uint64_t>(signature.units) > kMaxBytes / unit_bytes) {
    refuse("an operation can have at most 2^46 bytes");
  }
  if (static_cast<uint32_t>(reduction) >= kReductionCount) refuse("unknown reduction");
  if (is_reduction(kind) && opaque) refuse("cannot sum this dtype");
  if (!opaque && unit_bytes != number_bytes(signature.number_type)) {
    refuse("the element size does not match the number type");
  }
  if (is_reduction(kind) && !is_defined(reduction, signature.number_type)) {
    refuse(
        reduction == Reduction::kAverage ? "cannot average this dtype"
                                         : "cannot combine the bits of this dtype");
  }
  if (!is_reduction(kind) && reduction != Reduction::kSum) refuse("this operation has no reduction");
  if ((kind == Kind::kExchange) != (request.exchange != nullptr)) {
    refuse("an exchange needs its buffers, and no other operation has them");
  }
  if (request.exchange != nullptr && (request.exchange->sources.size() != members() ||
                                      request.exchange->targets.size() != members())) {
    refuse("an exchange has one source and one target for each member");
  }
  if (signature.src >= members()) refuse("src is not a member of the group");
  if (has_chunks(kind) && signature.units % static_cast<int64_t>(members()) != 0) {
    refuse("the tensor cannot be divided into one chunk of equal size for each member");
  }
  if (request.tree != nullptr || signature.tree != 0) check_tree(request);
}

void ShmGroup::check_tree(const Request& request) const {
  const Signature& signature = request.signature;
  const auto refuse = [](const char* problem) { throw std::invalid_argument(problem); };
  if (request.tree == nullptr || signature.tree != request.tree->digest()) {
    refuse("a sum along a tree needs the tree and its digest");
  }
  if (signature.kind != Kind::kReduceScatter || signature.reduction != Reduction::kSum) {
    refuse("only a sum of a reduce-scatter is associated along a tree");
  }
  if (!request.tree->is_valid(members())) refuse("the tree is not a sum over all members");
  if (signature.units / static_cast<int64_t>(members()) % request.tree->rows() != 0) {
    refuse("a chunk cannot be divided into the rows of the tree");
  }
}

// Post operations as long as the control block has space.
void ShmGroup::post_pending() {
  const uint64_t before = posted_;
  while (posted_ < issued_ && post(*pending_[posted_ - front_])) ++posted_;
  if (posted_ == before) return;
  slot(index()).posted.store(posted_);
  // Peers wait for the last member to post.
  if (all_posted(before + 1)) wake_all(control_block_->event);
}

// Reserve space in the ring of copies and return its offset in the arena. Return nullopt if there is
// no space now.
std::optional<uint64_t> ShmGroup::reserve_copy(uint64_t bytes) {
  const uint64_t rounded = (bytes + kCacheLineBytes - 1) / kCacheLineBytes * kCacheLineBytes;
  // A copy does not wrap around the end of the ring.
  const uint64_t left = kCopyRingBytes - copy_ring_head_ % kCopyRingBytes;
  const uint64_t skipped = rounded > left ? left : 0;
  const auto fits = [&] {
    return posted_ - released_ < kRingSlots &&
           copy_ring_head_ + skipped + rounded - copy_ring_tail_ <= kCopyRingBytes;
  };
  if (!fits()) {
    reclaim_slots();
    if (!fits()) return std::nullopt;
  }
  copy_ring_head_ += skipped;
  const uint64_t offset = copy_ring_ + copy_ring_head_ % kCopyRingBytes;
  copy_ring_head_ += rounded;
  return offset;
}

bool ShmGroup::post(Operation& operation) {
  const Signature& signature = operation.request_.signature;
  Descriptor descriptor{};
  descriptor.number = operation.number_;
  descriptor.signature = signature;
  const bool posted = signature.kind == Kind::kExchange ? post_exchange(operation, descriptor)
                                                        : post_copy(operation, descriptor);
  if (!posted) return false;
  operation.location_ = descriptor.location;
  operation.offset_ = descriptor.offset;
  if (descriptor.location == DataLocation::kStaged && is_shared(signature, index())) {
    ++staged_operations_;
  }
  ring_use_[operation.number_ % kRingSlots].copies = copy_ring_head_;
  std::memcpy(&slot(index()).ring[operation.number_ % kRingSlots], &descriptor, sizeof descriptor);
  return true;
}

// Fill in the location of the data, and copy small data.
bool ShmGroup::post_copy(Operation& operation, Descriptor& descriptor) {
  const Signature& signature = operation.request_.signature;
  const bool copied = is_copied(signature, members());
  const ByteRange part = copied ? copied_part(signature, members(), index()) : ByteRange{0, 0};
  const auto copy = reserve_copy(part.bytes);
  if (!copy) return false;
  if (copied) {
    descriptor.location = DataLocation::kCopied;
    descriptor.offset = *copy;
    char* const to = options_.mappings[index()]->base() + *copy;
    if (part.bytes != 0) std::memcpy(to, operation.request_.data + part.begin, part.bytes);
  } else {
    descriptor.location = operation.in_arena_ ? DataLocation::kArena : DataLocation::kStaged;
    descriptor.offset = operation.in_arena_ ? operation.offset_ : staging_;
  }
  return true;
}

// See [Note: tables of exchanges].
bool ShmGroup::post_exchange(Operation& operation, Descriptor& descriptor) {
  const ExchangeBuffers& buffers = *operation.request_.exchange;
  const Mapping& own = *options_.mappings[index()];
  ExchangeTable table;
  uint64_t used = fill_table(buffers, index(), /*offsets=*/true, table);
  const bool copied = used <= max_copied_bytes(members());
  // Data in the arena is read from there.
  bool in_arena = !copied;
  for (size_t m = 0; m < members() && in_arena; ++m) {
    const auto& source = buffers.sources[m];
    if (m == index() || source.bytes == 0) continue;
    const auto offset = own.offset_of(source.data, source.bytes);
    in_arena = offset.has_value();
    table[m].begin = offset.value_or(0);
  }
  if (!copied) {
    used = 0;
    if (!in_arena) fill_table(buffers, index(), /*offsets=*/false, table);
  }
  const auto copy = reserve_copy(table_bytes(members()) + used);
  if (!copy) return false;
  const uint64_t copied_data = *copy + table_bytes(members());
  write_table(own.base() + *copy, copied ? copied_data : in_arena ? 0 : staging_, table);
  descriptor.offset = *copy;
  descriptor.location = copied     ? DataLocation::kCopied
                        : in_arena ? DataLocation::kArena
                                   : DataLocation::kStaged;
  for (size_t m = 0; m < members() && copied; ++m) {
    const auto& source = buffers.sources[m];
    if (m == index() || source.bytes == 0) continue;
    std::memcpy(own.base() + copied_data + table[m].begin, source.data, source.bytes);
  }
  return true;
}

// Reclaim the space of operations that all members have executed.
void ShmGroup::reclaim_slots() {
  while (released_ < executed_ && all_reached(ring_use_[released_ % kRingSlots].phase)) {
    copy_ring_tail_ = ring_use_[released_ % kRingSlots].copies;
    ++released_;
  }
}

Status ShmGroup::wait(Operation& operation, Nanoseconds timeout) {
  if (operation.status() != Status::kPending) return operation.status();
  const auto until = Clock::now() + timeout;
  const auto is_abandoned = [&] { return operation.number() >= first_abandoned(); };
  {
    const std::lock_guard lock(queue_);
    ++waiting_threads_;
  }
  while (true) {
    OperationList to_release;
    WaitCondition condition;
    const auto ready = [&] {
      return operation.status() != Status::kPending || satisfied(condition) || is_abandoned();
    };
    {
      const std::lock_guard lock(executor_);
      condition = advance(operation.number_, false, to_release);
    }
    if (operation.status() != Status::kPending) break;
    if (may_spin_ && adaptive_spin_.spin(ready) && !is_abandoned()) continue;
    {
      const std::lock_guard lock(executor_);
      condition = advance(operation.number_, false, to_release);
      check_peers(condition, to_release);
    }
    const auto now = Clock::now();
    if (operation.status() != Status::kPending || now >= until) break;
    wait_for(control_block_->event, std::min<Nanoseconds>(kSleepInterval, until - now), ready);
  }
  bool others;
  bool requests;
  {
    const std::lock_guard lock(queue_);
    others = --waiting_threads_ > 0;
    requests = needs_progress();
  }
  if (requests) threads_.request(*this);
  if (others) wake_all(control_block_->event);
  return operation.status();
}

bool ShmGroup::done(Operation& operation) {
  if (operation.status() != Status::kPending) return true;
  OperationList to_release;
  const std::unique_lock lock(executor_, std::try_to_lock);
  if (lock.owns_lock()) advance(operation.number_, true, to_release);
  return operation.status() != Status::kPending;
}

void ShmGroup::expedite(const Operation& operation) {
  {
    const std::lock_guard lock(queue_);
    if (operation.status() != Status::kPending) return;
    progress_target_ = std::max(progress_target_, operation.number() + 1);
    if (!needs_progress()) return;
  }
  threads_.request(*this);
}

void ShmGroup::when_completed(Operation& operation, std::function<void()> action) {
  {
    const std::lock_guard lock(queue_);
    // Others remove it from the pending ones with the lock held, before they call its function.
    if (failure_.status == Status::kOk && operation.number_ >= front_) {
      operation.request_.completed = std::move(action);
      return;
    }
  }
  action();
}

ShmGroupOptions ShmGroup::options_of_part(
    const std::vector<size_t>& members, uint64_t control_block) const {
  ShmGroupOptions part = {
      options_.arena, {}, 0, control_block, timeout(), options_.waiters_on_host};
  for (const size_t member : members) {
    if (member == index()) part.index = part.mappings.size();
    part.mappings.push_back(options_.mappings.at(member));
  }
  return part;
}

Members ShmGroup::missing(const Operation& operation) const {
  Members missing;
  for (size_t m = 0; m < members(); ++m) missing[m] = slot(m).posted.load() <= operation.number();
  return missing;
}

Members ShmGroup::gone() const {
  Members gone;
  for (size_t m = 0; m < members(); ++m) {
    gone[m] = (slot(m).life.load() & FUTEX_OWNER_DIED) != 0 ||
              slot(m).state.load() == MemberState::kLeft;
  }
  return gone;
}

void ShmGroup::adopt_reported_failure() {
  constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();
  if (is_forked() || first_abandoned() == kAll) return;
  OperationList to_release;
  const std::lock_guard lock(executor_);
  const WaitCondition condition = advance(kAll, false, to_release);
  if (condition.any()) {
    check_peers(condition, to_release);  // for operations before, which may still complete
  } else {
    end_group(reported_failure(), to_release);
  }
}

void ShmGroup::OperationList::clear() {
  for (OperationPtr& operation : operations) {
    if (operation->request_.completed) operation->request_.completed();
    // What it refers to may refer to the operation.
    operation->request_.completed = nullptr;
    operation->request_.owner = nullptr;
  }
  operations.clear();
}

bool ShmGroup::OperationList::calls_back() const {
  return std::any_of(operations.begin(), operations.end(), [](const OperationPtr& operation) {
    return operation->request_.completed != nullptr;
  });
}

void ShmGroup::fail(Status status, Members blamed) {
  if (is_forked()) return;
  OperationList to_release;
  const std::lock_guard lock(executor_);
  end_group({status, blamed, static_cast<int>(index())}, to_release);
}

void ShmGroup::drain() {
  if (is_forked() || is_own_thread()) return;
  const auto until = Clock::now() + kDrainLimit;
  while (Clock::now() < until) {
    OperationPtr front;
    {
      const std::lock_guard lock(queue_);
      if (left_ || pending_.empty()) return;
      front = pending_.front();
    }
    if (!all_posted(front->number() + 1)) return;
    wait(*front, until - Clock::now());
  }
}

void ShmGroup::leave() {
  if (is_forked()) return;
  {
    const std::lock_guard lock(queue_);
    if (left_) return;
    left_ = true;
    stopping_ = true;
  }
  wake_all(control_block_->event);
  // A progress thread can get here by releasing a tensor, which runs Python.
  threads_.remove(*this);
  OperationList to_release;
  const std::lock_guard lock(executor_);
  end_group({Status::kClosed, {}, static_cast<int>(index())}, to_release);
}

bool ShmGroup::is_own_thread() const {
  return threads_.is_serving(*this);
}

bool ShmGroup::is_forked() const {
  return getpid() != pid_;
}

Failure ShmGroup::failure() const {
  const std::lock_guard lock(queue_);
  return failure_;
}

MemberState ShmGroup::state(size_t member) const {
  return slot(member).state.load();
}

}  // namespace fddp::shm
