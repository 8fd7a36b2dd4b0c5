#include "messages.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "own_thread.h"
#include "ring.h"

namespace fddp::shm {
namespace {

constexpr auto kCheckInterval = std::chrono::milliseconds(10);
// Most callers wait right after they have started a receive. Waking the progress thread for it would
// only take a processor from them. As long as receives follow each other within this interval, the
// thread looks for them itself, once in an interval.
constexpr auto kNapInterval = std::chrono::microseconds(200);
const Failure kClosed = {Status::kClosed, {}, -1};

}  // namespace

Messages::Messages(std::shared_ptr<ShmGroup> group)
    : group_(std::move(group)),
      outboxes_(group_->members(), nullptr),
      outbox_offsets_(group_->members(), 0),
      sends_(group_->members()),
      arriving_(group_->members()),
      arrived_(group_->members()),
      broken_sends_(group_->members(), Status::kOk),
      broken_receives_(group_->members(), Status::kOk) {}

Messages::~Messages() {
  close();
  // Memory that a peer may still read is not reused.
  for (size_t m = 0; m < outboxes_.size(); ++m) {
    const Outbox* const outbox = outboxes_[m];
    if (outbox != nullptr && outbox->read.load() == outbox->written.load()) {
      group_->slot(group_->index()).outboxes[m].store(0);  // first: the peer looks there
      group_->options().arena->free(outbox_offsets_[m]);
    }
  }
}

MessagePtr Messages::send(MessageRequest request) {
  return start(std::move(request), /*sends=*/true);
}

MessagePtr Messages::receive(MessageRequest request) {
  return start(std::move(request), /*sends=*/false);
}

MessagePtr Messages::start(MessageRequest request, bool sends) {
  if (group_->is_forked()) throw std::invalid_argument(kForkedError);
  const bool any = !sends && request.peer == MessageRequest::kAnyMember;
  if (!any && (request.peer >= group_->members() || request.peer == group_->index())) {
    throw std::invalid_argument("the peer of a message must be another member of the group");
  }
  auto message = std::make_shared<Message>(std::move(request));
  Completed completed;
  {
    const std::lock_guard lock(mutex_);
    ++pending_;
    if (sends) {
      sends_[message->peer()].push_back(message);
    } else {
      ++started_receives_;
      take_arrived(message, completed);
    }
    const Failure failure = group_->failure();
    const bool has_failed = failure.status != Status::kOk;
    if (!closed_ && !(has_failed && sends)) progress(completed);
    if (closed_ || has_failed) fail_all(has_failed ? failure : kClosed, completed);
    fail_broken(completed);
    if (pending_ != 0 && waiting_threads_ == 0 && !closed_) {
      if (!thread_.joinable()) thread_ = std::thread(&Messages::progress_loop, this);
      if (sends || !napping_) work_.notify_one();
    }
  }
  announce(completed);
  return message;
}

Status Messages::wait(Message& message, Nanoseconds timeout) {
  if (message.status() != Status::kPending) return message.status();
  if (group_->is_forked()) throw std::invalid_argument(kForkedError);
  const auto until = Clock::now() + timeout;
  EventCount& event = group_->slot(group_->index()).messages;
  std::unique_lock lock(mutex_);
  ++waiting_threads_;
  while (message.status() == Status::kPending) {
    Completed completed;
    progress(completed);
    lock.unlock();
    announce(completed);
    check_peers();
    const auto now = Clock::now();
    if (message.status() != Status::kPending || now >= until) {
      lock.lock();
      break;
    }
    const auto ready = [&] {
      if (message.status() != Status::kPending) return true;
      const std::unique_lock attempt(mutex_, std::try_to_lock);
      return attempt.owns_lock() && can_progress();
    };
    if (!group_->may_spin() || !adaptive_spin_.spin(ready)) {
      const auto sleep = std::min<Nanoseconds>(kSleepInterval, until - now);
      wait_for(event, sleep, [&] {
        if (message.status() != Status::kPending) return true;
        const std::lock_guard locked(mutex_);
        return can_progress();
      });
    }
    lock.lock();
  }
  if (--waiting_threads_ == 0 && pending_ != 0) work_.notify_one();
  lock.unlock();
  return message.status();
}

void Messages::cancel(Message& message) {
  Completed completed;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(
        receives_.begin(), receives_.end(),
        [&](const MessagePtr& receive) { return receive.get() == &message; });
    if (found == receives_.end()) return;
    complete(*found, kClosed, completed);
    receives_.erase(found);
  }
  announce(completed);
}

bool Messages::done(Message& message) {
  if (message.status() != Status::kPending) return true;
  if (group_->is_forked()) return false;
  Completed completed;
  {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) progress(completed);
  }
  announce(completed);
  return message.status() != Status::kPending;
}

void Messages::close() {
  if (group_->is_forked()) return;
  Completed completed;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    fail_all(kClosed, completed);
    work_.notify_all();
  }
  wake_all(group_->slot(group_->index()).messages);
  announce(completed);
  if (thread_.joinable() && !is_own_thread()) thread_.join();
}

void Messages::announce(Completed& completed) {
  if (completed.empty()) return;
  // Threads may sleep until one of these has completed.
  wake_all(group_->slot(group_->index()).messages);
  for (const MessagePtr& message : completed) {
    if (message->request_.completed) message->request_.completed();
    message->request_.completed = nullptr;
    message->request_.owner = nullptr;
  }
}

void Messages::progress(Completed& completed) {
  for (size_t m = 0; m < sends_.size(); ++m) {
    if (!sends_[m].empty() && broken_sends_[m] == Status::kOk) push(m, completed);
    if (m != group_->index() && is_awaited(m)) pull(m, completed);
  }
}

bool Messages::can_progress() const {
  for (size_t m = 0; m < sends_.size(); ++m) {
    if (!sends_[m].empty()) {
      const Outbox* const outbox = outboxes_[m];
      if (outbox == nullptr) return true;
      const uint64_t room = Outbox::kBytes - (outbox->written.load() - outbox->read.load());
      const uint64_t least = sends_[m].front()->moved_ == 0 ? sizeof(Header) : 1;
      if (room <= Outbox::kBytes && room >= least) return true;
    }
    if (m != group_->index() && is_awaited(m) && readable(m) != 0) return true;
  }
  return closed_;
}

bool Messages::is_awaited(size_t sender) const {
  // What follows a message that was given up in part cannot be read.
  const Status broken = broken_receives_[sender];
  if (broken != Status::kOk && broken != Status::kLost) return false;
  if (arriving_[sender]) return true;
  return std::any_of(receives_.begin(), receives_.end(), [&](const MessagePtr& message) {
    return message->peer() == sender || message->peer() == MessageRequest::kAnyMember;
  });
}

Outbox* Messages::outbox_to(size_t receiver) {
  if (outboxes_[receiver] == nullptr) {
    const auto block = group_->options().arena->allocate(sizeof(Outbox));
    if (!block) return nullptr;
    char* const memory = group_->options().arena->mapping()->base() + block->begin;
    auto* const outbox = new (memory) Outbox;
    outbox->written.store(0);
    outbox->read.store(0);
    outboxes_[receiver] = outbox;
    outbox_offsets_[receiver] = block->begin;
    group_->slot(group_->index()).outboxes[receiver].store(block->begin + 1);
  }
  return outboxes_[receiver];
}

// Return the outbox of a sender for this member, or null if there is none yet.
Outbox* Messages::outbox_from(size_t sender) const {
  const uint64_t offset = group_->slot(sender).outboxes[group_->index()].load();
  const Mapping& mapping = *group_->options().mappings[sender];
  if (offset == 0 || !mapping.contains(offset - 1, sizeof(Outbox))) return nullptr;
  if ((offset - 1) % alignof(Outbox) != 0) return nullptr;
  return std::launder(reinterpret_cast<Outbox*>(mapping.base() + offset - 1));
}

uint64_t Messages::readable(size_t sender) const {
  const Outbox* const outbox = outbox_from(sender);
  if (outbox == nullptr) return 0;
  return std::min(outbox->written.load() - outbox->read.load(), Outbox::kBytes);
}

// Move as much as there is room for into the outbox of `receiver`.
void Messages::push(size_t receiver, Completed& completed) {
  Outbox* const outbox = outbox_to(receiver);
  if (outbox == nullptr) {
    while (!sends_[receiver].empty()) {
      complete(sends_[receiver].front(), {Status::kNoMemory, {}, -1}, completed);
      sends_[receiver].pop_front();
    }
    return;
  }
  bool moved = false;
  uint64_t written = outbox->written.load(std::memory_order_relaxed);
  while (!sends_[receiver].empty()) {
    const uint64_t used = std::min(written - outbox->read.load(), Outbox::kBytes);
    uint64_t room = Outbox::kBytes - used;
    const MessagePtr message = sends_[receiver].front();
    const MessageRequest& request = message->request_;
    if (message->moved_ == 0) {
      if (room < sizeof(Header)) break;
      const Header header = {request.bytes, request.tag, 0};
      copy_to_ring(outbox->data, written, reinterpret_cast<const char*>(&header), sizeof header);
      written += sizeof header;
      room -= sizeof header;
      message->moved_ = sizeof header;
    }
    const uint64_t sent = message->moved_ - sizeof(Header);
    const uint64_t bytes = std::min(room, request.bytes - sent);
    copy_to_ring(outbox->data, written, request.data + sent, bytes);
    written += bytes;
    message->moved_ += bytes;
    outbox->written.store(written);
    moved = true;
    if (message->moved_ != sizeof(Header) + request.bytes) {
      if (bytes == 0) break;
      continue;
    }
    sends_[receiver].pop_front();
    complete(message, {}, completed);
  }
  if (moved) wake_all(group_->slot(receiver).messages);
}

// Copy what has arrived from `sender`, as long as a receive may be waiting for it.
void Messages::pull(size_t sender, Completed& completed) {
  Outbox* const outbox = outbox_from(sender);
  if (outbox == nullptr) return;
  bool moved = false;
  uint64_t read = outbox->read.load(std::memory_order_relaxed);
  while (is_awaited(sender)) {
    const uint64_t available = std::min(outbox->written.load() - read, Outbox::kBytes);
    std::optional<Arrival>& arrival = arriving_[sender];
    if (!arrival) {
      if (available < sizeof(Header)) break;
      Header header;
      copy_from_ring(reinterpret_cast<char*>(&header), outbox->data, read, sizeof header);
      if (!match_header(sender, header)) {
        broken_receives_[sender] = Status::kCorrupt;
        break;
      }
      read += sizeof header;
      outbox->read.store(read);
      moved = true;
      if (header.bytes == 0) finish_arrival(sender, completed);
      continue;
    }
    const uint64_t bytes = std::min(available, arrival->header.bytes - arrival->moved);
    if (bytes == 0) break;
    if (!arrival->buffer.empty()) {
      copy_from_ring(arrival->buffer.data() + arrival->moved, outbox->data, read, bytes);
    } else if (arrival->target && arrival->target->sent_bytes_ == 0) {
      copy_from_ring(
          arrival->target->request_.data + arrival->moved, outbox->data, read, bytes);
    }
    arrival->moved += bytes;
    read += bytes;
    outbox->read.store(read);
    moved = true;
    if (arrival->moved == arrival->header.bytes) finish_arrival(sender, completed);
  }
  if (moved) wake_all(group_->slot(sender).messages);
}

// Find the receive that a message belongs to, or memory to keep it. Return false if the header is
// invalid.
bool Messages::match_header(size_t sender, const Header& header) {
  if (header.bytes > kMaxBytes || header.zero != 0) return false;
  Arrival arrival{header, 0, nullptr, {}};
  const auto found =
      std::find_if(receives_.begin(), receives_.end(), [&](const MessagePtr& message) {
        const size_t peer = message->peer();
        return (peer == sender || peer == MessageRequest::kAnyMember) &&
               message->request_.tag == header.tag;
      });
  if (found != receives_.end()) {
    arrival.target = *found;
    if (header.bytes != (*found)->request_.bytes) (*found)->sent_bytes_ = header.bytes;
    receives_.erase(found);
  } else {
    arrival.buffer.resize(header.bytes);
  }
  arriving_[sender] = std::move(arrival);
  return true;
}

void Messages::finish_arrival(size_t sender, Completed& completed) {
  Arrival arrival = std::move(*arriving_[sender]);
  arriving_[sender].reset();
  if (!arrival.target) {
    arrived_[sender].push_back(std::move(arrival));
    return;
  }
  Message& message = *arrival.target;
  message.sender_ = sender;
  const bool fits = arrival.header.bytes == message.request_.bytes;
  if (fits && !arrival.buffer.empty()) {
    std::memcpy(message.request_.data, arrival.buffer.data(), arrival.buffer.size());
  }
  if (!fits) message.sent_bytes_ = arrival.header.bytes;
  complete(arrival.target, {fits ? Status::kOk : Status::kMismatch, {}, -1}, completed);
}

// Start a receive: take a message that has arrived already, or wait for one.
void Messages::take_arrived(const MessagePtr& message, Completed& completed) {
  const size_t peer = message->peer();
  for (size_t m = 0; m < arrived_.size(); ++m) {
    if (peer != m && peer != MessageRequest::kAnyMember) continue;
    auto& kept = arrived_[m];
    const auto found = std::find_if(kept.begin(), kept.end(), [&](const Arrival& arrival) {
      return arrival.header.tag == message->request_.tag;
    });
    if (found != kept.end()) {
      // Completed as if the rest of it had arrived now.
      std::optional<Arrival> in_part = std::move(arriving_[m]);
      arriving_[m] = std::move(*found);
      arriving_[m]->target = message;
      kept.erase(found);
      finish_arrival(m, completed);
      arriving_[m] = std::move(in_part);
      return;
    }
    std::optional<Arrival>& arriving = arriving_[m];
    if (arriving && !arriving->target && arriving->header.tag == message->request_.tag) {
      arriving->target = message;
      return;
    }
  }
  receives_.push_back(message);
}

void Messages::complete(const MessagePtr& message, const Failure& failure, Completed& completed) {
  --pending_;
  completed.push_back(message);
  message->failure_ = failure;
  message->status_.store(failure.status, std::memory_order_release);
}

// Fail the pending messages for which `fails(peer, sends)` returns a failure.
template <class Fails>
void Messages::fail_if(const Fails& fails, Completed& completed) {
  const auto check = [&](const MessagePtr& message, size_t peer, bool sends) {
    const Failure failure = fails(peer, sends);
    if (failure.status != Status::kOk) complete(message, failure, completed);
    return failure.status != Status::kOk;
  };
  for (size_t m = 0; m < sends_.size(); ++m) {
    while (!sends_[m].empty() && check(sends_[m].front(), m, true)) sends_[m].pop_front();
    std::optional<Arrival>& arriving = arriving_[m];
    if (arriving && arriving->target && check(arriving->target, m, false)) arriving.reset();
  }
  receives_.remove_if(
      [&](const MessagePtr& message) { return check(message, message->peer(), false); });
}

void Messages::fail_all(const Failure& failure, Completed& completed) {
  fail_if([&](size_t, bool) { return failure; }, completed);
}

// The member that a message is for or from; all others if it may be from any.
Members Messages::peers_of(size_t peer) const {
  Members peers;
  for (size_t m = 0; m < sends_.size(); ++m) {
    peers[m] = peer == MessageRequest::kAnyMember ? m != group_->index() : m == peer;
  }
  return peers;
}

// Fail messages whose peers are all broken.
void Messages::fail_broken(Completed& completed) {
  const auto is_ok = [](Status status) { return status == Status::kOk; };
  if (std::all_of(broken_sends_.begin(), broken_sends_.end(), is_ok) &&
      std::all_of(broken_receives_.begin(), broken_receives_.end(), is_ok)) {
    return;
  }
  const auto failure_of = [&](size_t peer, bool sends) {
    const std::vector<Status>& broken = sends ? broken_sends_ : broken_receives_;
    Failure failure = {Status::kOk, peers_of(peer), own_index()};
    for (size_t m = 0; m < broken.size(); ++m) {
      if (!failure.blamed[m]) continue;
      if (broken[m] == Status::kOk) return Failure{};
      failure.status = broken[m];
    }
    return failure;
  };
  fail_if(failure_of, completed);
}

// Check whether the peers of pending messages can still progress. Called without a lock, because the
// end of the group completes operations, which calls their callers.
void Messages::check_peers() {
  const auto now = Clock::now();
  {
    const std::lock_guard lock(mutex_);
    if (pending_ == 0 || now - checked_at_ < kCheckInterval) return;
    checked_at_ = now;
  }
  group_->adopt_reported_failure();
  const Members gone = group_->gone();
  const Failure failure = group_->failure();
  Completed completed;
  {
    const std::lock_guard lock(mutex_);
    progress(completed);  // what members sent before they left counts
    find_broken(gone, now);
    fail_late(now, completed);
    if (failure.status != Status::kOk) fail_all(failure, completed);
    fail_broken(completed);
  }
  announce(completed);
}

bool Messages::is_late(const MessagePtr& message, Clock::time_point now) const {
  return now - message->started_at_ >= group_->timeout();
}

// Note the members to or from which pending messages cannot complete.
void Messages::find_broken(const Members& gone, Clock::time_point now) {
  for (size_t m = 0; m < group_->members(); ++m) {
    if (m == group_->index()) continue;
    const bool sends = !sends_[m].empty();
    const bool arrives = arriving_[m] && arriving_[m]->target;
    if (gone[m] && (sends || is_awaited(m))) {
      broken_sends_[m] = broken_receives_[m] = Status::kLost;
    }
    if (sends && sends_[m].front()->moved_ != 0 && is_late(sends_[m].front(), now)) {
      broken_sends_[m] = Status::kTimeout;
    }
    if (arrives && is_late(arriving_[m]->target, now)) broken_receives_[m] = Status::kTimeout;
  }
}

// Fail late messages of which nothing was moved. Later ones may still succeed.
void Messages::fail_late(Clock::time_point now, Completed& completed) {
  const auto fails = [&](const MessagePtr& message) {
    if (message->moved_ != 0 || !is_late(message, now)) return false;
    complete(message, {Status::kTimeout, peers_of(message->peer()), own_index()}, completed);
    return true;
  };
  receives_.remove_if(fails);
  for (auto& queue : sends_) queue.erase(std::remove_if(queue.begin(), queue.end(), fails), queue.end());
}

// Sleep until the progress thread has work.
void Messages::await_work(std::unique_lock<std::mutex>& lock) {
  const auto has_work = [&] { return closed_ || (waiting_threads_ == 0 && pending_ != 0); };
  uint64_t seen;
  do {
    seen = started_receives_;
    napping_ = true;
    work_.wait_for(lock, kNapInterval, has_work);
    napping_ = false;
  } while (!has_work() && seen != started_receives_);
  work_.wait(lock, has_work);
}

// Main function of the progress thread.
void Messages::progress_loop() {
  become_own_thread("fddp-messages");
  EventCount& event = group_->slot(group_->index()).messages;
  std::unique_lock lock(mutex_);
  while (true) {
    await_work(lock);
    if (closed_) return;
    Completed completed;
    progress(completed);
    const bool pending = pending_ != 0;
    lock.unlock();
    announce(completed);
    completed.clear();
    check_peers();
    if (pending) {
      wait_for(event, kSleepInterval, [&] {
        const std::lock_guard locked(mutex_);
        return can_progress();
      });
    }
    lock.lock();
  }
}

}  // namespace fddp::shm
