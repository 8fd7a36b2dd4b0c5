// Messages between two members of a group, matched by sender and tag.
//
// [Note: outboxes]
// Each ordered pair of members has an outbox: a ring of bytes in the sender's arena, allocated at
// the first message. The sender writes headers and data into it, as far as there is room; the
// receiver copies them out. A message is sent once all of it is in the outbox, so two members that
// send to each other first do not block each other as long as both progress.
//
// A receiver reads an outbox only while it waits for a message from that sender. Messages that
// arrive before the one it waits for are kept in private memory until they are received.
//
// [Note: failures of messages]
// A peer that has gone, is late or wrote invalid data fails its own messages and nothing else:
// operations of the group, and messages of other members, may still complete. Later messages fail, too,
// if the peer has gone, or if a part of one was moved in the same direction, which leaves no place for
// the next. What a peer sent in whole is received. The end of the group fails all messages.

#pragma once

#include "shm_group.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace fddp::shm {

// Ring of bytes from one member to another. Positions count bytes since the beginning.
struct Outbox {
  static constexpr uint64_t kBytes = uint64_t{256} << 10;

  alignas(64) std::atomic<uint64_t> written;  // by the sender
  alignas(64) std::atomic<uint64_t> read;     // by the receiver
  alignas(64) char data[kBytes];
};

// A message to send or to receive, as requested by a caller.
struct MessageRequest {
  static constexpr size_t kAnyMember = kMaxMembers;

  size_t peer;  // kAnyMember: receive from any member
  int32_t tag;
  char* data;
  uint64_t bytes;
  std::shared_ptr<void> owner;       // keeps `data` alive
  std::function<void()> completed;   // called once, without locks, on any thread
};

class Message {
 public:
  explicit Message(MessageRequest request) : request_(std::move(request)) {}

  Status status() const {
    return status_.load(std::memory_order_acquire);
  }
  // Valid once a receive has completed.
  size_t sender() const {
    return sender_;
  }
  size_t peer() const {
    return request_.peer;
  }
  // Why it has failed, valid once it has completed.
  const Failure& failure() const {
    return failure_;
  }
  // Size of the message sent, if it differs from that of the receive.
  uint64_t sent_bytes() const {
    return sent_bytes_;
  }

 private:
  friend class Messages;

  MessageRequest request_;
  const Clock::time_point started_at_ = Clock::now();
  uint64_t moved_ = 0;  // bytes sent, including the header
  size_t sender_ = 0;
  uint64_t sent_bytes_ = 0;
  Failure failure_;
  std::atomic<Status> status_ = Status::kPending;
};

using MessagePtr = std::shared_ptr<Message>;

// Messages of one member of a group.
class Messages {
 public:
  explicit Messages(std::shared_ptr<ShmGroup> group);
  ~Messages();
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  // Start to send or receive. Never waits for peers. Throws std::invalid_argument for invalid
  // requests.
  MessagePtr send(MessageRequest request);
  MessagePtr receive(MessageRequest request);

  // Wait until the message has completed, for at most `timeout`.
  Status wait(Message& message, Nanoseconds timeout);

  // Give up a receive for which nothing has arrived yet.
  void cancel(Message& message);

  // Return true if the message has completed. Completes it if this takes no waiting.
  bool done(Message& message);

  // Complete all pending messages with kClosed. Called before the group is left.
  void close();

  bool is_forked() const {
    return group_->is_forked();
  }
  bool is_own_thread() const {
    return std::this_thread::get_id() == thread_.get_id();
  }

 private:
  struct Header {
    uint64_t bytes;
    int32_t tag;
    uint32_t zero;
  };
  // A message from a sender that has arrived in part or whole.
  struct Arrival {
    Header header;
    uint64_t moved = 0;
    MessagePtr target;          // the receive that it belongs to, if there is one
    std::vector<char> buffer;   // otherwise
  };
  using Completed = std::vector<MessagePtr>;

  // All with `mutex_` held.
  void progress(Completed& completed);
  bool can_progress() const;
  void push(size_t receiver, Completed& completed);
  void pull(size_t sender, Completed& completed);
  bool match_header(size_t sender, const Header& header);
  void finish_arrival(size_t sender, Completed& completed);
  void take_arrived(const MessagePtr& message, Completed& completed);
  bool is_awaited(size_t sender) const;
  void find_broken(const Members& gone, Clock::time_point now);
  void fail_late(Clock::time_point now, Completed& completed);
  void fail_broken(Completed& completed);
  Members peers_of(size_t peer) const;
  int own_index() const {
    return static_cast<int>(group_->index());
  }
  void fail_all(const Failure& failure, Completed& completed);
  template <class Fails>
  void fail_if(const Fails& fails, Completed& completed);
  bool is_late(const MessagePtr& message, Clock::time_point now) const;
  void complete(const MessagePtr& message, const Failure& failure, Completed& completed);
  Outbox* outbox_to(size_t receiver);
  Outbox* outbox_from(size_t sender) const;
  uint64_t readable(size_t sender) const;

  MessagePtr start(MessageRequest request, bool sends);
  void announce(Completed& completed);
  void check_peers();
  void progress_loop();
  void await_work(std::unique_lock<std::mutex>& lock);

  const std::shared_ptr<ShmGroup> group_;
  AdaptiveSpin adaptive_spin_;

  std::mutex mutex_;
  std::vector<Outbox*> outboxes_;                 // of this member, by receiver
  std::vector<uint64_t> outbox_offsets_;          // of these, in the arena
  std::vector<std::deque<MessagePtr>> sends_;     // by receiver
  std::list<MessagePtr> receives_;                // in the order of their start
  std::vector<std::optional<Arrival>> arriving_;  // by sender
  std::vector<std::list<Arrival>> arrived_;       // by sender; not yet received
  // By member: why messages to it, and from it, fail; kOk if they do not.
  std::vector<Status> broken_sends_;
  std::vector<Status> broken_receives_;
  size_t pending_ = 0;
  Clock::time_point checked_at_;
  bool closed_ = false;

  int waiting_threads_ = 0;
  uint64_t started_receives_ = 0;
  bool napping_ = false;  // the thread looks for receives without being woken
  std::condition_variable work_;
  std::thread thread_;
};

}  // namespace fddp::shm
