// Feeds arbitrary bytes to the shared-memory core, which must survive arbitrary writes of a peer.
// No torch, so that it runs under sanitizers.
//
// With clang this is a libFuzzer target (-fsanitize=fuzzer,address,undefined). With gcc,
// fuzz_driver.cpp drives it. The first byte selects the function under test.

#include "../../fddp/csrc/shm/arena.h"
#include "../../fddp/csrc/shm/allocator.h"
#include "../../fddp/csrc/shm/half.h"
#include "../../fddp/csrc/shm/algorithms.h"
#include "../../fddp/csrc/shm/sums.h"
#include "../../fddp/csrc/shm/shm_group.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

using namespace fddp::shm;

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "shm_fuzz: %s\n", what);
  std::abort();
}

// Reader of the input from its front. Returns zeros once the input is used up.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  bool empty() const {
    return size_ == 0;
  }
  uint8_t byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  uint64_t word() {
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value |= uint64_t{byte()} << (8 * i);
    return value;
  }
  // Up to 2^16, mostly small.
  uint64_t size() {
    const uint64_t low = byte();
    return low < 224 ? low : low * byte();
  }
  // Values at the ends of ranges, where errors are likely.
  uint64_t extreme() {
    constexpr uint64_t kEnds[] = {0, 1, 63, 64, 65, 4096, uint64_t{1} << 20, uint64_t{1} << 21,
                                  uint64_t{1} << 31, uint64_t{1} << 46, uint64_t{1} << 62};
    const uint8_t choice = byte();
    if (choice >= 128) return word();
    if (choice >= 64) return ~uint64_t{0} - choice % 8;
    return kEnds[choice % std::size(kEnds)] + choice % 2;
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

// Allocator

void fuzz_allocator(Bytes in) {
  const uint64_t span = in.byte() % 2 == 0 ? in.size() * BlockAllocator::kAlignment : in.extreme();
  BlockAllocator allocator(span);
  std::map<uint64_t, uint64_t> allocated;
  uint64_t used = 0;
  while (!in.empty()) {
    if (in.byte() % 3 != 0) {
      const uint64_t bytes = in.byte() % 4 == 0 ? in.extreme() : in.size();
      const uint64_t alignment = uint64_t{1} << (in.byte() % 16);
      const auto block = allocator.allocate(bytes, alignment);
      if (!block) continue;
      require(block->begin % alignment == 0, "a block is not aligned");
      require(block->bytes >= bytes && block->bytes != 0, "a block is too small");
      require(block->end() >= block->begin && block->end() <= span, "a block lies outside");
      const auto next = allocated.lower_bound(block->begin);
      require(next == allocated.end() || block->end() <= next->first, "allocator overlap");
      require(
          next == allocated.begin() ||
              std::prev(next)->first + std::prev(next)->second <= block->begin,
          "allocator overlap");
      allocated[block->begin] = block->bytes;
      used += block->bytes;
    } else {
      const uint64_t any = in.extreme();
      const uint64_t begin =
          allocated.empty() || any % 4 == 0
              ? any
              : std::next(allocated.begin(), any % allocated.size())->first;
      const auto known = allocated.find(begin);
      require(
          allocator.free(begin) == (known != allocated.end()),
          "free() is wrong about the existence of a block");
      if (known == allocated.end()) continue;
      used -= known->second;
      allocated.erase(known);
    }
    require(
        allocator.used() == used && allocator.allocated_blocks() == allocated.size(),
        "used() or allocated_blocks() is wrong");
  }
  uint64_t free = 0;
  for (const ByteRange& range : allocator.free_ranges()) free += range.bytes;
  constexpr uint64_t kAlignment = BlockAllocator::kAlignment;
  require(free + used == span / kAlignment * kAlignment, "bytes were leaked");
}

// Sums

// Buffer of exactly this size, at some alignment. Sanitizers detect accesses past its end.
class ExactBuffer {
 public:
  ExactBuffer(uint64_t bytes, uint64_t shift) : memory_(new char[bytes + shift]), shift_(shift) {}

  char* data() const {
    return memory_.get() + shift_;
  }

 private:
  std::unique_ptr<char[]> memory_;
  uint64_t shift_;
};

void fill(Bytes& in, char* data, uint64_t bytes) {
  uint32_t state = static_cast<uint32_t>(in.word()) | 1u;
  for (uint64_t i = 0; i < bytes; ++i) {
    state = state * 1664525u + 1013904223u;
    data[i] = static_cast<char>(state >> 24);
  }
}

struct Drawn {
  SumOptions options;
  size_t n;
  size_t place = 0;  // of the sum to check, among those that a tree leaves
};

Drawn draw_recipe(Bytes& in) {
  Drawn drawn{};
  drawn.options.number_type = static_cast<NumberType>(in.byte() % 8);
  drawn.options.average = in.byte() % 2 != 0 && drawn.options.number_type <= NumberType::kBF16;
  const size_t axes = in.byte() % (SumOrder::kAxes + 1);
  drawn.n = 1;
  drawn.options.order.axes = static_cast<uint16_t>(axes);
  for (size_t a = 0; a < axes; ++a) {
    const uint16_t size = drawn.n < 16 ? 1 + in.byte() % 4 : 1;
    drawn.options.order.sizes[a] = size;
    drawn.n *= size;
  }
  if (axes == 0 || drawn.n < 2) {
    drawn.options.order = {};
    drawn.n = 2 + in.byte() % 6;
  }
  return drawn;
}

template <class T>
T load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Sum of one number over the summands from `first` on, along the axes from `axis` on.
template <class Wide, class Read>
Wide sum_along(const SumOrder& order, size_t axis, size_t n, size_t first, const Read& read) {
  if (order.axes == 0) {
    Wide total = read(first);
    for (size_t s = 1; s < n; ++s) total = static_cast<Wide>(total + read(first + s));
    return total;
  }
  if (axis == order.axes) return read(first);
  size_t inner = 1;
  for (size_t a = axis + 1; a < order.axes; ++a) inner *= order.sizes[a];
  Wide total = sum_along<Wide>(order, axis + 1, n, first, read);
  for (size_t i = 1; i < order.sizes[axis]; ++i) {
    const Wide part = sum_along<Wide>(order, axis + 1, n, first + i * inner, read);
    total = static_cast<Wide>(total + part);
  }
  return total;
}

// One of the sums of one number over the summands that a tree leaves.
template <class Wide, class Read>
Wide sum_along(const SumTree& tree, size_t place, const Read& read) {
  std::vector<Wide> stack;
  for (size_t s = 0; s < tree.additions.size(); ++s) {
    stack.push_back(read(s));
    for (uint32_t a = 0; a < tree.additions[s]; ++a) {
      const Wide right = stack.back();
      stack.pop_back();
      stack.back() = static_cast<Wide>(stack.back() + right);
    }
  }
  require(tree.sums() == stack.size(), "a tree leaves another number of sums");
  return stack[place];
}

template <class T, class Wide, class Widen, class Narrow>
void check_sum(
    const Drawn& drawn, const std::vector<std::vector<char>>& before, const char* target,
    int64_t begin, int64_t count, const Widen& widen_, const Narrow& narrow_) {
  for (int64_t i = begin; i < begin + count; ++i) {
    const auto read = [&](size_t s) -> Wide {
      return widen_(load<T>(before[s].data() + i * static_cast<int64_t>(sizeof(T))));
    };
    Wide total = drawn.options.tree == nullptr
                     ? sum_along<Wide>(drawn.options.order, 0, drawn.n, 0, read)
                     : sum_along<Wide>(*drawn.options.tree, drawn.place, read);
    if constexpr (std::is_floating_point_v<Wide>) {
      if (drawn.options.average) total = total / static_cast<Wide>(drawn.n);
      if (std::isnan(total)) continue;  // the bits of a NaN are unspecified
    }
    const T due = narrow_(total);
    const char* const is = target + i * static_cast<int64_t>(sizeof(T));
    require(std::memcmp(is, &due, sizeof due) == 0, "a sum is wrong");
  }
}

void check_sum(
    const Drawn& drawn, const std::vector<std::vector<char>>& before, const char* target,
    int64_t begin, int64_t count) {
  const auto same = [](auto value) { return value; };
  const auto half = [](float value) {
    Half narrowed;
    narrow(value, narrowed);
    return narrowed;
  };
  const auto brain = [](float value) {
    BFloat16 narrowed;
    narrow(value, narrowed);
    return narrowed;
  };
  const auto wide = [](auto value) { return widen(value); };
  switch (drawn.options.number_type) {
    case NumberType::kF64:
      return check_sum<double, double>(drawn, before, target, begin, count, same, same);
    case NumberType::kF32:
      return check_sum<float, float>(drawn, before, target, begin, count, same, same);
    case NumberType::kF16:
      return check_sum<Half, float>(drawn, before, target, begin, count, wide, half);
    case NumberType::kBF16:
      return check_sum<BFloat16, float>(drawn, before, target, begin, count, wide, brain);
    case NumberType::kU8:
    case NumberType::kI8:
      return check_sum<uint8_t, uint8_t>(drawn, before, target, begin, count, same, same);
    case NumberType::kI32:
      return check_sum<uint32_t, uint32_t>(drawn, before, target, begin, count, same, same);
    case NumberType::kI64:
      return check_sum<uint64_t, uint64_t>(drawn, before, target, begin, count, same, same);
    case NumberType::kOpaque:
      return;
  }
}

void fuzz_sums(Bytes in) {
  const Drawn drawn = draw_recipe(in);
  const uint64_t item = number_bytes(drawn.options.number_type);
  const auto numbers = static_cast<int64_t>(in.size() % 5000);
  const auto begin = static_cast<int64_t>(in.size()) % (numbers + 1);
  const int64_t count = numbers - begin;
  const uint64_t bytes = static_cast<uint64_t>(numbers) * item;
  const size_t n_targets = in.byte() % 4 == 0 ? 1 : drawn.n;
  std::vector<ExactBuffer> sources;
  std::vector<std::vector<char>> before;
  std::vector<char*> pointers;
  for (size_t s = 0; s < drawn.n; ++s) {
    sources.emplace_back(bytes, in.byte() % 4 == 0 ? in.byte() % 9 : 0);
    fill(in, sources.back().data(), bytes);
    before.emplace_back(sources.back().data(), sources.back().data() + bytes);
    pointers.push_back(sources.back().data());
  }
  sum(drawn.options, {pointers.data(), drawn.n, pointers.data(), n_targets}, begin, count);
  for (size_t t = 0; t < n_targets; ++t) check_sum(drawn, before, pointers[t], begin, count);
  for (size_t s = 0; s < drawn.n; ++s) {
    const uint64_t kept = s < n_targets ? static_cast<uint64_t>(begin) * item : bytes;
    require(
        kept == 0 || std::memcmp(pointers[s], before[s].data(), kept) == 0,
        "memory outside of the sum was written");
  }
}

// Random signature that `ShmGroup::start` accepts.
Signature draw_signature(Bytes& in, size_t n) {
  Signature signature{};
  signature.kind = static_cast<Kind>(in.byte() % (kKindCount - 1));  // all but exchanges
  const bool sums = is_reduction(signature.kind);
  signature.number_type = sums ? static_cast<NumberType>(in.byte() % 8) : NumberType::kOpaque;
  constexpr uint32_t kItems[] = {1, 2, 3, 4, 8, 16, 1024};
  signature.unit_bytes = sums ? static_cast<uint32_t>(number_bytes(signature.number_type))
                          : kItems[in.byte() % std::size(kItems)];
  signature.src = static_cast<uint32_t>(in.byte() % n);
  const bool averages = sums && signature.number_type <= NumberType::kBF16 && in.byte() % 2 != 0;
  signature.reduction = averages ? Reduction::kAverage : Reduction::kSum;
  signature.units = static_cast<int64_t>(in.size());
  if (in.byte() % 16 == 0) {
    signature.units += static_cast<int64_t>(kSegmentBytes / signature.unit_bytes) + in.byte() - 128;
  }
  if (has_chunks(signature.kind)) {
    signature.units = signature.units / static_cast<int64_t>(n) * static_cast<int64_t>(n);
  }
  if (sums && in.byte() % 4 == 0) {
    signature.order.axes = 2;
    signature.order.sizes[0] = static_cast<uint16_t>(n);
    signature.order.sizes[1] = 1;
  }
  return signature;
}

// Random tree over summands of `n` members, which leaves one sum or several.
std::shared_ptr<const SumTree> draw_tree(Bytes& in, size_t n) {
  SumTree tree;
  uint32_t height = 0;
  for (size_t m = 0; m < n; ++m) {
    tree.summands.push_back(1 + in.byte() % 3);
    for (uint32_t r = 0; r < tree.summands.back(); ++r) {
      const uint32_t times = in.byte() % (height + 1);
      tree.additions.push_back(times);
      height += 1 - times;
    }
  }
  if (in.byte() % 2 == 0) tree.additions.back() += height - 1;
  require(tree.is_valid(n), "a valid tree is refused");
  return std::make_shared<const SumTree>(tree);
}

// Algorithms: all members run in one thread, one after the other, on buffers of exact size.

void fuzz_algorithms(Bytes in) {
  const size_t n = 2 + in.byte() % 4;
  Signature signature = draw_signature(in, n);
  std::shared_ptr<const SumTree> tree;
  if (signature.kind == Kind::kReduceScatter && signature.reduction == Reduction::kSum && in.byte() % 2 == 0) {
    tree = draw_tree(in, n);
    const auto pieces = static_cast<int64_t>(n * tree->rows());
    signature.units = signature.units / pieces * pieces;
    signature.order = {};
    signature.order.axes = SumOrder::kTree;
  }
  const uint64_t bytes = signature.bytes();
  std::vector<ExactBuffer> own;
  std::vector<ExactBuffer> staging;
  std::vector<MemberData> member_data;
  std::vector<std::vector<char>> before;
  for (size_t m = 0; m < n; ++m) {
    own.emplace_back(bytes, 0);
    fill(in, own.back().data(), bytes);
    before.emplace_back(own.back().data(), own.back().data() + bytes);
    const bool staged = in.byte() % 2 == 0;
    staging.emplace_back(staged ? 2 * kSegmentBytes : 0, 0);
    member_data.push_back(
        staged ? MemberData{DataLocation::kStaged, staging.back().data()}
               : MemberData{DataLocation::kArena, own.back().data()});
  }
  std::deque<TensorAlgorithm> algorithms;
  for (size_t m = 0; m < n; ++m) {
    algorithms.emplace_back(signature, own[m].data(), nullptr, m, member_data, tree);
  }
  for (int64_t segment = 0; segment < algorithms[0].segments(); ++segment) {
    for (size_t m = 0; m < n; ++m) algorithms[m].copy_in(segment);
    for (size_t m = 0; m < n; ++m) {
      for (size_t other = 0; other < n; ++other) {
        const ByteRange part = algorithms[m].accessed_range(other);
        require(part.begin <= bytes && part.bytes <= bytes - part.begin, "an access out of bounds");
      }
      algorithms[m].run(segment);
    }
    for (size_t m = 0; m < n; ++m) algorithms[m].copy_out(segment);
  }
  if (signature.kind == Kind::kBroadcast) {
    for (size_t m = 0; m < n; ++m) {
      require(
          bytes == 0 || std::memcmp(own[m].data(), before[signature.src].data(), bytes) == 0,
          "a broadcast is wrong");
    }
  } else if (signature.kind == Kind::kAllReduce) {
    const Drawn drawn = {{signature.number_type, signature.reduction == Reduction::kAverage, signature.order}, n};
    for (size_t m = 0; m < n; ++m) check_sum(drawn, before, own[m].data(), 0, signature.units);
  } else if (tree != nullptr) {
    const size_t rows = tree->rows();
    const size_t row_bytes = bytes / n / rows;
    Drawn drawn = {{signature.number_type, false, {}, tree.get()}, tree->additions.size()};
    for (size_t m = 0; m < n; ++m) {
      std::vector<std::vector<char>> summands;
      for (size_t other = 0; other < n; ++other) {
        for (size_t r = 0; r < tree->summands[other]; ++r) {
          const char* const row = before[other].data() + (m * rows + r) * row_bytes;
          summands.emplace_back(row, row + row_bytes);
        }
      }
      const auto count = static_cast<int64_t>(row_bytes / signature.unit_bytes);
      for (drawn.place = 0; drawn.place < tree->sums(); ++drawn.place) {
        const char* const sum = own[m].data() + (m * rows + drawn.place) * row_bytes;
        check_sum(drawn, summands, sum, 0, count);
      }
    }
  } else if (signature.kind == Kind::kAllToAll) {
    const uint64_t chunk = bytes / n;
    for (size_t m = 0; m < n; ++m) {
      for (size_t other = 0; other < n; ++other) {
        require(
            std::equal(
                own[m].data() + other * chunk, own[m].data() + (other + 1) * chunk,
                before[other].data() + m * chunk),
            "an all-to-all is wrong");
      }
    }
  }
}

// A group whose other members write arbitrary data

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
      options.pidfds.push_back(-1);
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

void fuzz_group(Bytes in) {
  HostileGroup(in).run();
}

// Files and offsets of control blocks from a peer

void fuzz_map_peer_arena(Bytes in) {
  const uint64_t announced = in.byte() % 2 == 0 ? in.size() * 4096 : in.extreme();
  const uint64_t size = in.byte() % 2 == 0 ? announced : in.extreme();
  const int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  require(fd >= 0, "memfd_create");
  const bool sized = size <= (uint64_t{1} << 62) && ftruncate(fd, static_cast<off_t>(size)) == 0;
  constexpr int kSeals[] = {F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_WRITE};
  int seals = 0;
  const uint8_t mask = in.byte();
  for (int s = 0; s < 4; ++s) seals |= (mask >> s & 1) != 0 ? kSeals[s] : 0;
  fcntl(fd, F_ADD_SEALS, seals);
  std::shared_ptr<Mapping> mapping;
  try {
    mapping = map_peer_arena(fd, announced);
    require(sized && size == announced && (seals & 7) == 7, "an invalid file was mapped");
  } catch (const std::invalid_argument&) {
  } catch (const std::system_error&) {
  }
  close(fd);
  if (!mapping) return;
  const uint64_t begin = in.extreme();
  const uint64_t bytes = in.extreme();
  const bool holds = mapping->contains(begin, bytes);
  require(holds == (begin <= announced && bytes <= announced - begin), "a range outside");
  if (holds && bytes <= uint64_t{1} << 22) mapping->prefault(begin, bytes);
  ShmGroupOptions options{};
  options.arena = std::make_shared<Arena>(uint64_t{4} << 20);
  options.mappings = {mapping, options.arena->mapping()};
  options.index = 1;
  options.control_block = in.extreme();
  options.pidfds = {-1, -1};
  options.timeout = std::chrono::milliseconds(1);
  try {
    ShmGroup group(std::move(options));
    require(false, "an all-zero control block was accepted");
  } catch (const std::invalid_argument&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes in(data, size);
  switch (in.byte() % 8) {
    case 0:
      fuzz_allocator(in);
      break;
    case 1:
    case 2:
      fuzz_sums(in);
      break;
    case 3:
      fuzz_algorithms(in);
      break;
    case 4:
      fuzz_map_peer_arena(in);
      break;
    default:
      fuzz_group(in);
      break;
  }
  return 0;
}
