// Fuzzing of a group whose other members write arbitrary data.

#include "shm_fuzz.h"

#include "../../fddp/csrc/shm/arena.h"
#include "../../fddp/csrc/shm/shm_group.h"

#include <chrono>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace shm_fuzz {

using namespace fddp::shm;

namespace {

class HostileGroup {
 public:
  explicit HostileGroup(Bytes& in) : in_(in), n_(2 + in.byte() % 2), index_(in.byte() % n_) {
    // A group may retire its own arena. Other arenas are reused, because creating them is slow.
    static const std::vector<std::shared_ptr<Arena>> kept = peers();
    arenas_ = kept;
    arenas_.resize(n_);
    arenas_[index_] = std::make_shared<Arena>(kSpan);
    const auto offset = ShmGroup::make_control_block(*arenas_[0], n_);
    require(offset.has_value(), "no control block");
    offset_ = *offset;
    ShmGroupOptions options{};
    options.arena = arenas_[index_];
    for (size_t m = 0; m < n_; ++m) {
      options.mappings.push_back(
          m == index_ ? arenas_[m]->mapping() : map_peer_arena(arenas_[m]->fd(), kSpan));
    }
    options.index = index_;
    options.control_block = *offset;
    options.timeout = std::chrono::milliseconds(2);
    options.waiters_on_host = n_ + in.byte() % 8;
    control_block_ = reinterpret_cast<ControlBlock*>(arenas_[0]->mapping()->base() + *offset);
    group_ = std::make_unique<ShmGroup>(std::move(options));
  }

  ~HostileGroup() {
    group_.reset();
    arenas_[0]->free(offset_);
  }
  HostileGroup(const HostileGroup&) = delete;
  HostileGroup& operator=(const HostileGroup&) = delete;

  void run() {
    for (int action = 0; action < kMaxActions && !in_.empty(); ++action) {
      switch (in_.byte() % 8) {
        case 0:
        case 1:
          start();
          break;
        case 2:
          if (!in_flight_.empty()) wait(in_flight_[in_.byte() % in_flight_.size()]);
          break;
        case 3:
        case 4:
          post_as_peer();
          break;
        case 5:
          overwrite_field();
          break;
        case 6:
          write_anywhere();
          break;
        case 7:
          if (!in_flight_.empty()) group_->done(*in_flight_.back().operation);
          break;
      }
    }
    if (in_.byte() % 8 == 0) group_->fail(Status::kPeerFailed, Members(in_.word()));
    for (InFlight& in_flight : in_flight_) wait(in_flight);
    (void)group_->failure();
    for (size_t m = 0; m < n_; ++m) (void)group_->state(m);
    group_->leave();
  }

 private:
  static constexpr uint64_t kSpan = uint64_t{8} << 20;
  static constexpr int kMaxActions = 64;

  struct InFlight {
    Signature signature;
    std::shared_ptr<ExactBuffer> buffer;
    OperationPtr operation;
  };

  // Arenas with reserved pages for the tensors of peers.
  static std::vector<std::shared_ptr<Arena>> peers() {
    std::vector<std::shared_ptr<Arena>> made;
    for (int m = 0; m < 3; ++m) {
      made.push_back(std::make_shared<Arena>(kSpan));
      require(made.back()->allocate(2 * kSegmentBytes).has_value(), "no pages");
    }
    return made;
  }

  void start() {
    const Signature signature = draw_signature(in_, n_);
    const uint64_t shift = in_.byte() % 4 == 0 ? in_.byte() % 8 : 0;
    auto buffer = std::make_shared<ExactBuffer>(signature.bytes(), shift);
    std::memset(buffer->data(), 1, signature.bytes());
    char* data = buffer->data();
    if (in_.byte() % 2 == 0) {
      const auto block = arenas_[index_]->allocate(signature.bytes());
      if (block) data = arenas_[index_]->mapping()->base() + block->begin;
    }
    Request request{signature, data, in_.byte() % 2 == 0, in_.byte() % 2 == 0, buffer};
    in_flight_.push_back({signature, buffer, group_->start(std::move(request))});
  }

  void wait(const InFlight& in_flight) {
    const Status status = group_->wait(*in_flight.operation, std::chrono::microseconds(300));
    require(static_cast<uint32_t>(status) <= 7, "an unknown status");
    if (status == Status::kMismatch) {
      require(in_flight.operation->signatures().size() == n_, "wrong number of signatures");
    }
  }

  size_t peer() {
    const size_t m = in_.byte() % n_;
    return m == index_ ? (m + 1) % n_ : m;
  }

  // Post an operation as a peer, correctly or nearly so.
  void post_as_peer() {
    if (in_flight_.empty()) return;
    const InFlight& in_flight = in_flight_[in_.byte() % in_flight_.size()];
    MemberSlot& slot = control_block_->slot(peer());
    Descriptor descriptor{};
    descriptor.number = in_flight.operation->number();
    descriptor.signature = in_flight.signature;
    const uint8_t corruption = in_.byte();
    descriptor.location = static_cast<DataLocation>(corruption % 4);
    descriptor.offset = corruption % 8 == 0 ? in_.extreme() : in_.size() * 64;
    if (corruption % 16 == 0) descriptor.number += in_.word();
    if (corruption % 32 == 0) descriptor.signature.units = static_cast<int64_t>(in_.extreme());
    const uint64_t number = in_flight.operation->number();
    std::memcpy(&slot.ring[number % kRingSlots], &descriptor, sizeof descriptor);
    slot.posted.store(number + 1);
    slot.phase.store(slot.phase.load() + in_.byte() % 8);
  }

  // Overwrite one field of any slot, including the own one.
  void overwrite_field() {
    MemberSlot& slot = control_block_->slot(in_.byte() % n_);
    switch (in_.byte() % 6) {
      case 0:
        return slot.posted.store(in_.extreme());
      case 1:
        return slot.phase.store(in_.extreme());
      case 2:
        return slot.state.store(static_cast<MemberState>(in_.byte() % 5));
      case 3:
        return slot.status.store(static_cast<Status>(in_.byte() % 10));
      case 4:
        return slot.blamed[in_.byte() % std::size(slot.blamed)].store(in_.word());
      default:
        Descriptor descriptor;
        for (size_t i = 0; i < sizeof descriptor; ++i) {
          reinterpret_cast<uint8_t*>(&descriptor)[i] = in_.byte();
        }
        std::memcpy(&slot.ring[in_.byte() % kRingSlots], &descriptor, sizeof descriptor);
    }
  }

  void write_anywhere() {
    const uint64_t value = in_.word();
    const uint64_t at = in_.word() % (ControlBlock::bytes(n_) - sizeof value);
    std::memcpy(reinterpret_cast<char*>(control_block_) + at, &value, sizeof value);
  }

  Bytes& in_;
  const size_t n_;
  const size_t index_;
  std::vector<std::shared_ptr<Arena>> arenas_;
  uint64_t offset_ = 0;
  ControlBlock* control_block_;
  std::unique_ptr<ShmGroup> group_;
  std::vector<InFlight> in_flight_;
};

}  // namespace

void fuzz_group(Bytes in) {
  HostileGroup(in).run();
}

}  // namespace shm_fuzz
