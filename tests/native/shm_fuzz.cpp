// Feeds arbitrary bytes to the shared-memory core: what it must bear is that a peer writes whatever
// it likes. No torch, so that it runs under sanitizers.
//
// With clang this is a target of libFuzzer (-fsanitize=fuzzer,address,undefined); fuzz_driver.cpp
// drives it elsewhere. The first byte says what the others are for.

#include "../../fddp/csrc/shm/arena.h"
#include "../../fddp/csrc/shm/allocator.h"
#include "../../fddp/csrc/shm/half.h"
#include "../../fddp/csrc/shm/algorithms.h"
#include "../../fddp/csrc/shm/sums.h"
#include "../../fddp/csrc/shm/team.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

// The input, taken apart from its front; zeros once it is used up.
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
  // Up to 2^16, small ones as a rule.
  uint64_t size() {
    const uint64_t low = byte();
    return low < 224 ? low : low * byte();
  }
  // What goes wrong goes wrong at the ends of ranges.
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

// Blocks

void fuzz_blocks(Bytes in) {
  const uint64_t span = in.byte() % 2 == 0 ? in.size() * Blocks::kGrain : in.extreme();
  Blocks blocks(span);
  std::map<uint64_t, uint64_t> taken;
  uint64_t used = 0;
  while (!in.empty()) {
    if (in.byte() % 3 != 0) {
      const uint64_t bytes = in.byte() % 4 == 0 ? in.extreme() : in.size();
      const uint64_t alignment = uint64_t{1} << (in.byte() % 16);
      const auto block = blocks.take(bytes, alignment);
      if (!block) continue;
      require(block->begin % alignment == 0, "a block is not aligned");
      require(block->bytes >= bytes && block->bytes != 0, "a block is too small");
      require(block->end() >= block->begin && block->end() <= span, "a block lies outside");
      const auto next = taken.lower_bound(block->begin);
      require(next == taken.end() || block->end() <= next->first, "blocks overlap");
      require(
          next == taken.begin() ||
              std::prev(next)->first + std::prev(next)->second <= block->begin,
          "blocks overlap");
      taken[block->begin] = block->bytes;
      used += block->bytes;
    } else {
      const uint64_t any = in.extreme();
      const uint64_t begin =
          taken.empty() || any % 4 == 0 ? any : std::next(taken.begin(), any % taken.size())->first;
      const auto known = taken.find(begin);
      require(blocks.give(begin) == (known != taken.end()), "a block that is none was freed");
      if (known == taken.end()) continue;
      used -= known->second;
      taken.erase(known);
    }
    require(blocks.used() == used && blocks.taken() == taken.size(), "bytes in use are miscounted");
  }
  uint64_t free = 0;
  for (const Range& stretch : blocks.free()) free += stretch.bytes;
  require(free + used == span / Blocks::kGrain * Blocks::kGrain, "bytes were lost");
}

// Sums

// A buffer of exactly so many bytes, at some alignment: one byte further is seen by a sanitizer.
class Exact {
 public:
  Exact(uint64_t bytes, uint64_t shift) : memory_(new char[bytes + shift]), shift_(shift) {}

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
  Recipe recipe;
  size_t n;
};

Drawn draw_recipe(Bytes& in) {
  Drawn drawn{};
  drawn.recipe.number = static_cast<Number>(in.byte() % 8);
  drawn.recipe.average = in.byte() % 2 != 0 && drawn.recipe.number <= Number::kBF16;
  const size_t axes = in.byte() % (Order::kAxes + 1);
  drawn.n = 1;
  drawn.recipe.order.axes = static_cast<uint16_t>(axes);
  for (size_t a = 0; a < axes; ++a) {
    const uint16_t size = drawn.n < 16 ? 1 + in.byte() % 4 : 1;
    drawn.recipe.order.sizes[a] = size;
    drawn.n *= size;
  }
  if (axes == 0 || drawn.n < 2) {
    drawn.recipe.order = {};
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

// The sum of stretches of summands along the axes from `axis` on, of one number.
template <class Wide, class Read>
Wide sum_along(const Order& order, size_t axis, size_t n, size_t first, const Read& read) {
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

template <class T, class Wide, class Widen, class Narrow>
void check_sum(
    const Drawn& drawn, const std::vector<std::vector<char>>& before, const char* target,
    int64_t begin, int64_t count, const Widen& widen_, const Narrow& narrow_) {
  for (int64_t i = begin; i < begin + count; ++i) {
    Wide total = sum_along<Wide>(drawn.recipe.order, 0, drawn.n, 0, [&](size_t s) {
      return widen_(load<T>(before[s].data() + i * static_cast<int64_t>(sizeof(T))));
    });
    if constexpr (std::is_floating_point_v<Wide>) {
      if (drawn.recipe.average) total = total / static_cast<Wide>(drawn.n);
      if (std::isnan(total)) continue;  // which of its bits is left open
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
  switch (drawn.recipe.number) {
    case Number::kF64:
      return check_sum<double, double>(drawn, before, target, begin, count, same, same);
    case Number::kF32:
      return check_sum<float, float>(drawn, before, target, begin, count, same, same);
    case Number::kF16:
      return check_sum<Half, float>(drawn, before, target, begin, count, wide, half);
    case Number::kBF16:
      return check_sum<BFloat16, float>(drawn, before, target, begin, count, wide, brain);
    case Number::kU8:
    case Number::kI8:
      return check_sum<uint8_t, uint8_t>(drawn, before, target, begin, count, same, same);
    case Number::kI32:
      return check_sum<uint32_t, uint32_t>(drawn, before, target, begin, count, same, same);
    case Number::kI64:
      return check_sum<uint64_t, uint64_t>(drawn, before, target, begin, count, same, same);
    case Number::kOpaque:
      return;
  }
}

void fuzz_sums(Bytes in) {
  const Drawn drawn = draw_recipe(in);
  const uint64_t item = number_bytes(drawn.recipe.number);
  const auto numbers = static_cast<int64_t>(in.size() % 5000);
  const auto begin = static_cast<int64_t>(in.size()) % (numbers + 1);
  const int64_t count = numbers - begin;
  const uint64_t bytes = static_cast<uint64_t>(numbers) * item;
  const size_t n_targets = in.byte() % 4 == 0 ? 1 : drawn.n;
  std::vector<Exact> sources;
  std::vector<std::vector<char>> before;
  std::vector<char*> columns;
  for (size_t s = 0; s < drawn.n; ++s) {
    sources.emplace_back(bytes, in.byte() % 4 == 0 ? in.byte() % 9 : 0);
    fill(in, sources.back().data(), bytes);
    before.emplace_back(sources.back().data(), sources.back().data() + bytes);
    columns.push_back(sources.back().data());
  }
  sum(drawn.recipe, {columns.data(), drawn.n, columns.data(), n_targets}, begin, count);
  for (size_t t = 0; t < n_targets; ++t) check_sum(drawn, before, columns[t], begin, count);
  for (size_t s = 0; s < drawn.n; ++s) {
    const uint64_t kept = s < n_targets ? static_cast<uint64_t>(begin) * item : bytes;
    require(
        kept == 0 || std::memcmp(columns[s], before[s].data(), kept) == 0,
        "what is no part of the sum was written");
  }
}

// Terms that `Team::start` takes of a caller.
Terms draw_terms(Bytes& in, size_t n) {
  Terms terms{};
  terms.kind = static_cast<Kind>(in.byte() % kKinds);
  const bool sums = terms.kind == Kind::kAllReduce || terms.kind == Kind::kReduceScatter;
  terms.number = sums ? static_cast<Number>(in.byte() % 8) : Number::kOpaque;
  constexpr uint32_t kItems[] = {1, 2, 3, 4, 8, 16, 1024};
  terms.unit_bytes = sums ? static_cast<uint32_t>(number_bytes(terms.number))
                          : kItems[in.byte() % std::size(kItems)];
  terms.src = static_cast<uint32_t>(in.byte() % n);
  terms.average = sums && terms.number <= Number::kBF16 ? in.byte() % 2 : 0;
  terms.units = static_cast<int64_t>(in.size());
  if (in.byte() % 16 == 0) {
    terms.units += static_cast<int64_t>(kPieceBytes / terms.unit_bytes) + in.byte() - 128;
  }
  if (terms.kind == Kind::kReduceScatter || terms.kind == Kind::kAllGather) {
    terms.units = terms.units / static_cast<int64_t>(n) * static_cast<int64_t>(n);
  }
  if (sums && in.byte() % 4 == 0) {
    terms.order.axes = 2;
    terms.order.sizes[0] = static_cast<uint16_t>(n);
    terms.order.sizes[1] = 1;
  }
  return terms;
}

// Moves: all members' in one thread, one after the other, on memory that ends where it should.

void fuzz_moves(Bytes in) {
  const size_t n = 2 + in.byte() % 4;
  const Terms terms = draw_terms(in, n);
  const uint64_t bytes = terms.bytes();
  std::vector<Exact> own;
  std::vector<Exact> staging;
  std::vector<Moves::Place> places;
  std::vector<std::vector<char>> before;
  for (size_t m = 0; m < n; ++m) {
    own.emplace_back(bytes, 0);
    fill(in, own.back().data(), bytes);
    before.emplace_back(own.back().data(), own.back().data() + bytes);
    const bool staged = in.byte() % 2 == 0;
    staging.emplace_back(staged ? 2 * kPieceBytes : 0, 0);
    places.push_back(
        staged ? Moves::Place{Where::kStaged, staging.back().data()}
               : Moves::Place{Where::kArena, own.back().data()});
  }
  std::vector<Moves> moves;
  for (size_t m = 0; m < n; ++m) moves.emplace_back(terms, own[m].data(), m, places);
  for (int64_t piece = 0; piece < moves[0].pieces(); ++piece) {
    for (size_t m = 0; m < n; ++m) moves[m].fill(piece);
    for (size_t m = 0; m < n; ++m) {
      for (size_t other = 0; other < n; ++other) {
        const Stretch part = moves[m].touched(other);
        require(part.begin <= bytes && part.bytes <= bytes - part.begin, "a touch outside");
      }
      moves[m].work(piece);
    }
    for (size_t m = 0; m < n; ++m) moves[m].drain(piece);
  }
  if (terms.kind == Kind::kBroadcast) {
    for (size_t m = 0; m < n; ++m) {
      require(
          bytes == 0 || std::memcmp(own[m].data(), before[terms.src].data(), bytes) == 0,
          "a broadcast is wrong");
    }
  } else if (terms.kind == Kind::kAllReduce) {
    const Drawn drawn = {{terms.number, terms.average != 0, terms.order}, n};
    for (size_t m = 0; m < n; ++m) check_sum(drawn, before, own[m].data(), 0, terms.units);
  }
}

// A team whose other members write what they like

class Hostile {
 public:
  explicit Hostile(Bytes& in) : in_(in), n_(2 + in.byte() % 2), me_(in.byte() % n_) {
    // A team may retire its own arena; the others' are used again, because they take long to make.
    static const std::vector<std::shared_ptr<Arena>> kept = peers();
    arenas_ = kept;
    arenas_.resize(n_);
    arenas_[me_] = std::make_shared<Arena>(kSpan);
    const auto offset = Team::make_board(*arenas_[0], n_);
    require(offset.has_value(), "no board");
    offset_ = *offset;
    TeamOptions options{};
    options.arena = arenas_[me_];
    for (size_t m = 0; m < n_; ++m) {
      options.mappings.push_back(
          m == me_ ? arenas_[m]->mapping() : adopt(arenas_[m]->fd(), kSpan));
      options.pidfds.push_back(-1);
    }
    options.me = me_;
    options.board = *offset;
    options.timeout = std::chrono::milliseconds(2);
    options.crowd = n_ + in.byte() % 8;
    board_ = reinterpret_cast<Board*>(arenas_[0]->mapping()->base() + *offset);
    team_ = std::make_unique<Team>(std::move(options));
  }

  ~Hostile() {
    team_.reset();
    arenas_[0]->give(offset_);
  }
  Hostile(const Hostile&) = delete;
  Hostile& operator=(const Hostile&) = delete;

  void run() {
    for (int act = 0; act < kMostActs && !in_.empty(); ++act) {
      switch (in_.byte() % 8) {
        case 0:
        case 1:
          start();
          break;
        case 2:
          if (!flights_.empty()) wait(flights_[in_.byte() % flights_.size()]);
          break;
        case 3:
        case 4:
          answer();
          break;
        case 5:
          scribble();
          break;
        case 6:
          write_anywhere();
          break;
        case 7:
          if (!flights_.empty()) team_->done(*flights_.back().operation);
          break;
      }
    }
    if (in_.byte() % 8 == 0) team_->fail(Status::kTold, Members(in_.word()));
    for (Flight& flight : flights_) wait(flight);
    (void)team_->failure();
    for (size_t m = 0; m < n_; ++m) (void)team_->state(m);
    team_->leave();
  }

 private:
  static constexpr uint64_t kSpan = uint64_t{8} << 20;
  static constexpr int kMostActs = 64;

  struct Flight {
    Terms terms;
    std::shared_ptr<Exact> buffer;
    OperationPtr operation;
  };

  // With pages that are there, in which peers' tensors would be.
  static std::vector<std::shared_ptr<Arena>> peers() {
    std::vector<std::shared_ptr<Arena>> made;
    for (int m = 0; m < 3; ++m) {
      made.push_back(std::make_shared<Arena>(kSpan));
      require(made.back()->take(2 * kPieceBytes).has_value(), "no pages");
    }
    return made;
  }

  void start() {
    const Terms terms = draw_terms(in_, n_);
    auto buffer = std::make_shared<Exact>(terms.bytes(), in_.byte() % 4 == 0 ? in_.byte() % 8 : 0);
    std::memset(buffer->data(), 1, terms.bytes());
    char* data = buffer->data();
    if (in_.byte() % 2 == 0) {
      const auto block = arenas_[me_]->take(terms.bytes());
      if (block) data = arenas_[me_]->mapping()->base() + block->begin;
    }
    Request request{terms, data, in_.byte() % 2 == 0, in_.byte() % 2 == 0, buffer};
    flights_.push_back({terms, buffer, team_->start(std::move(request))});
  }

  void wait(const Flight& flight) {
    const Status status = team_->wait(*flight.operation, std::chrono::microseconds(300));
    require(static_cast<uint32_t>(status) <= 7, "an unknown status");
    if (status == Status::kMismatch) {
      require(flight.operation->met().size() == n_, "terms of another number of members");
    }
  }

  size_t peer() {
    const size_t m = in_.byte() % n_;
    return m == me_ ? (m + 1) % n_ : m;
  }

  // A peer meets an operation, as it should or nearly so.
  void answer() {
    if (flights_.empty()) return;
    const Flight& flight = flights_[in_.byte() % flights_.size()];
    Seat& seat = board_->seat(peer());
    Descriptor told{};
    told.number = flight.operation->number();
    told.terms = flight.terms;
    const uint8_t lie = in_.byte();
    told.where = static_cast<Where>(lie % 4);
    told.offset = lie % 8 == 0 ? in_.extreme() : in_.size() * 64;
    if (lie % 16 == 0) told.number += in_.word();
    if (lie % 32 == 0) told.terms.units = static_cast<int64_t>(in_.extreme());
    std::memcpy(&seat.ring[flight.operation->number() % kRing], &told, sizeof told);
    seat.posted.store(flight.operation->number() + 1);
    seat.phase.store(seat.phase.load() + in_.byte() % 8);
  }

  // One field of a seat, the own one too.
  void scribble() {
    Seat& seat = board_->seat(in_.byte() % n_);
    switch (in_.byte() % 6) {
      case 0:
        return seat.posted.store(in_.extreme());
      case 1:
        return seat.phase.store(in_.extreme());
      case 2:
        return seat.state.store(static_cast<State>(in_.byte() % 5));
      case 3:
        return seat.status.store(static_cast<Status>(in_.byte() % 10));
      case 4:
        return seat.about[in_.byte() % std::size(seat.about)].store(in_.word());
      default:
        Descriptor told;
        for (size_t i = 0; i < sizeof told; ++i) reinterpret_cast<uint8_t*>(&told)[i] = in_.byte();
        std::memcpy(&seat.ring[in_.byte() % kRing], &told, sizeof told);
    }
  }

  void write_anywhere() {
    const uint64_t value = in_.word();
    const uint64_t at = in_.word() % (Board::bytes(n_) - sizeof value);
    std::memcpy(reinterpret_cast<char*>(board_) + at, &value, sizeof value);
  }

  Bytes& in_;
  const size_t n_;
  const size_t me_;
  std::vector<std::shared_ptr<Arena>> arenas_;
  uint64_t offset_ = 0;
  Board* board_;
  std::unique_ptr<Team> team_;
  std::vector<Flight> flights_;
};

void fuzz_team(Bytes in) {
  Hostile(in).run();
}

// Files that a peer sends, and where it says its board is

void fuzz_adopt(Bytes in) {
  const uint64_t told = in.byte() % 2 == 0 ? in.size() * 4096 : in.extreme();
  const uint64_t size = in.byte() % 2 == 0 ? told : in.extreme();
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
    mapping = adopt(fd, told);
    require(sized && size == told && (seals & 7) == 7, "a file that is none was adopted");
  } catch (const std::invalid_argument&) {
  } catch (const std::system_error&) {
  }
  close(fd);
  if (!mapping) return;
  const uint64_t begin = in.extreme();
  const uint64_t bytes = in.extreme();
  const bool holds = mapping->holds(begin, bytes);
  require(holds == (begin <= told && bytes <= told - begin), "a range outside");
  if (holds && bytes <= uint64_t{1} << 22) mapping->prefault(begin, bytes);
  TeamOptions options{};
  options.arena = std::make_shared<Arena>(uint64_t{4} << 20);
  options.mappings = {mapping, options.arena->mapping()};
  options.me = 1;
  options.board = in.extreme();
  options.pidfds = {-1, -1};
  options.timeout = std::chrono::milliseconds(1);
  try {
    Team team(std::move(options));
    require(false, "a board of zeros was taken");
  } catch (const std::invalid_argument&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes in(data, size);
  switch (in.byte() % 8) {
    case 0:
      fuzz_blocks(in);
      break;
    case 1:
    case 2:
      fuzz_sums(in);
      break;
    case 3:
      fuzz_moves(in);
      break;
    case 4:
      fuzz_adopt(in);
      break;
    default:
      fuzz_team(in);
      break;
  }
  return 0;
}
