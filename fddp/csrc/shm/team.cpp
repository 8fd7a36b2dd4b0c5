#include "team.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace fddp::shm {
namespace {

// Copies of small operations that peers may still read.
constexpr uint64_t kCopiesBytes = uint64_t{1} << 20;
constexpr uint64_t kLine = 64;

constexpr uint64_t kMostBytes = uint64_t{1} << 46;

size_t processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return static_cast<size_t>(CPU_COUNT(&set));
}

uint64_t take_or_throw(Arena& arena, uint64_t bytes, const char* what) {
  const auto block = arena.take(bytes);
  if (!block) throw std::system_error(ENOMEM, std::generic_category(), what);
  return block->begin;
}

Board* board_at(const TeamOptions& options) {
  const size_t n = options.mappings.size();
  if (n < 2 || n > kMostMembers || options.me >= n || options.pidfds.size() != n) {
    throw std::invalid_argument("a team has 2 to 256 members, and this one is among them");
  }
  const Mapping& mapping = *options.mappings[0];
  if (options.board % alignof(Board) != 0 || !mapping.holds(options.board, Board::bytes(n))) {
    throw std::invalid_argument("the board lies outside its arena");
  }
  auto* const board = std::launder(reinterpret_cast<Board*>(mapping.base() + options.board));
  if (board->magic != Board::kMagic || board->members != n) {
    throw std::invalid_argument(
        "there is no board of " + std::to_string(n) + " members at offset " +
        std::to_string(options.board));
  }
  return board;
}

bool is_sum(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduceScatter;
}

}  // namespace

std::optional<uint64_t> Team::make_board(Arena& arena, size_t members) {
  if (members < 2 || members > kMostMembers) {
    throw std::invalid_argument("a board is for 2 to 256 members");
  }
  const auto block = arena.take(Board::bytes(members));
  if (!block) return std::nullopt;
  char* const memory = arena.mapping()->base() + block->begin;
  auto* const board = new (memory) Board{};
  for (size_t m = 0; m < members; ++m) new (&board->seat(m)) Seat{};
  board->members = members;
  board->magic = Board::kMagic;
  return block->begin;
}

Team::Team(TeamOptions options)
    : options_(std::move(options)),
      watch_(options_.pidfds),
      pid_(getpid()),
      board_(board_at(options_)),
      spins_(std::max(options_.crowd, members()) <= processors()),
      calm_since_(Clock::now()) {
  Arena& arena = *options_.arena;
  copies_ = take_or_throw(arena, kCopiesBytes, "no pages for a team's copies");
  try {
    staging_ = take_or_throw(arena, 2 * kPieceBytes, "no pages for a team's staging buffer");
    thread_ = std::thread(&Team::run, this);
  } catch (...) {
    arena.give(copies_);
    if (staging_ != 0) arena.give(staging_);
    throw;
  }
}

Team::~Team() {
  leave();
  if (thread_.joinable()) thread_.join();
  // What a peer may still read is not used again.
  release();
  if (failure_.status == Status::kClosed && released_ == issued_) {
    options_.arena->give(copies_);
    options_.arena->give(staging_);
  }
}

OperationPtr Team::start(Request request) {
  check(request);
  if (is_forked()) throw std::invalid_argument("a team is its process's, not that of a fork");
  const Terms& terms = request.terms;
  const bool copied = is_copied(terms, members());
  const bool hurry = request.prompt || !(request.soon || copied);
  const auto offset = options_.mappings[me()]->offset_of(request.data, terms.bytes());
  const bool aligned = reinterpret_cast<uintptr_t>(request.data) % terms.unit_bytes == 0;

  const std::lock_guard lock(queue_);
  auto operation = std::make_shared<Operation>(std::move(request), issued_);
  operation->in_arena_ = offset.has_value() && (aligned || terms.number == Number::kOpaque);
  operation->offset_ = offset.value_or(0);
  if (failure_.status != Status::kOk) {
    end(*operation, failure_.status);
    return operation;
  }
  ++issued_;
  pending_.push_back(operation);
  post_all();
  if (hurry || posted_ < issued_) {
    wanted_ = issued_;
    if (waiters_ == 0) work_.notify_one();
  }
  return operation;
}

void Team::check(const Request& request) const {
  const Terms& terms = request.terms;
  const auto refuse = [](const char* why) { throw std::invalid_argument(why); };
  if (static_cast<uint32_t>(terms.kind) >= kKinds) refuse("no such operation");
  if (terms.unit_bytes == 0 || terms.unit_bytes > 1024) refuse("elements of 1 to 1024 bytes");
  if (terms.units < 0 || static_cast<uint64_t>(terms.units) > kMostBytes / terms.unit_bytes) {
    refuse("more than 2^46 bytes in one operation");
  }
  if (is_sum(terms.kind) && terms.number == Number::kOpaque) refuse("no sums of this dtype");
  if (terms.number != Number::kOpaque && terms.unit_bytes != number_bytes(terms.number)) {
    refuse("a number has another size");
  }
  const bool floating = terms.number <= Number::kBF16;
  if (terms.average != 0 && !(floating && is_sum(terms.kind))) refuse("no averages of this dtype");
  if (terms.src >= members()) refuse("src is no member");
  const bool chunks = terms.kind == Kind::kReduceScatter || terms.kind == Kind::kAllGather;
  if (chunks && terms.units % static_cast<int64_t>(members()) != 0) refuse("unequal chunks");
  if (terms.order.axes > Order::kAxes) refuse("too many axes in the order of a sum");
  size_t product = 1;
  for (size_t a = 0; a < terms.order.axes; ++a) product *= terms.order.sizes[a];
  if (terms.order.axes != 0 && product != members()) {
    refuse("the sizes of a sum's axes must have the number of members as their product");
  }
}

// Announces what has room on the board.
void Team::post_all() {
  const uint64_t before = posted_;
  while (posted_ < issued_ && post(*pending_[posted_ - front_])) ++posted_;
  if (posted_ == before) return;
  seat(me()).posted.store(posted_);
  // Whoever waits does so for the last one to come.
  if (all_posted(before + 1)) ring(board_->bell);
}

bool Team::post(Operation& operation) {
  const Terms& terms = operation.request_.terms;
  Descriptor descriptor{};
  descriptor.number = operation.number_;
  descriptor.terms = terms;
  const bool copied = is_copied(terms, members());
  const Stretch part = copied ? copied_part(terms, members(), me()) : Stretch{0, 0};
  const uint64_t bytes = (part.bytes + kLine - 1) / kLine * kLine;
  // No copy goes around the ring's end.
  const uint64_t left = kCopiesBytes - copies_head_ % kCopiesBytes;
  const uint64_t skipped = bytes > left ? left : 0;
  const auto fits = [&] {
    return posted_ - released_ < kRing &&
           copies_head_ + skipped + bytes - copies_tail_ <= kCopiesBytes;
  };
  if (!fits()) {
    release();
    if (!fits()) return false;
  }
  if (copied) {
    copies_head_ += skipped;
    descriptor.where = Where::kCopied;
    descriptor.offset = copies_ + copies_head_ % kCopiesBytes;
    copies_head_ += bytes;
    char* const to = options_.mappings[me()]->base() + descriptor.offset;
    if (part.bytes != 0) std::memcpy(to, operation.request_.data + part.begin, part.bytes);
  } else {
    descriptor.where = operation.in_arena_ ? Where::kArena : Where::kStaged;
    descriptor.offset = operation.in_arena_ ? operation.offset_ : staging_;
  }
  operation.where_ = descriptor.where;
  operation.offset_ = descriptor.offset;
  trail_[operation.number_ % kRing].copies = copies_head_;
  std::memcpy(&seat(me()).ring[operation.number_ % kRing], &descriptor, sizeof descriptor);
  return true;
}

// Takes note of operations that all members are through with: their room can be used again.
void Team::release() {
  while (released_ < executed_ && all_reached(trail_[released_ % kRing].phase)) {
    copies_tail_ = trail_[released_ % kRing].copies;
    ++released_;
  }
}

Status Team::wait(Operation& operation, Nanoseconds longest) {
  if (operation.status() != Status::kPending) return operation.status();
  const auto until = Clock::now() + longest;
  const auto doomed = [&] { return operation.number() >= sound(); };
  {
    const std::lock_guard lock(queue_);
    ++waiters_;
  }
  while (true) {
    Ended ended;
    Need need;
    const auto ready = [&] {
      return operation.status() != Status::kPending || satisfied(need) || doomed();
    };
    {
      const std::lock_guard lock(executor_);
      need = advance(operation.number_, false, ended);
    }
    if (operation.status() != Status::kPending) break;
    if (spins_ && patience_.spin(ready) && !doomed()) continue;
    {
      const std::lock_guard lock(executor_);
      need = advance(operation.number_, false, ended);
      look_after(need, ended);
    }
    const auto now = Clock::now();
    if (operation.status() != Status::kPending || now >= until) break;
    sleep_on(board_->bell, std::min<Nanoseconds>(kSlice, until - now), ready);
  }
  bool others;
  {
    const std::lock_guard lock(queue_);
    others = --waiters_ > 0;
    if (!others && wanted_ > front_) work_.notify_one();
  }
  if (others) ring(board_->bell);
  return operation.status();
}

bool Team::done(Operation& operation) {
  if (operation.status() != Status::kPending) return true;
  Ended ended;
  const std::unique_lock lock(executor_, std::try_to_lock);
  if (lock.owns_lock()) advance(operation.number_, true, ended);
  return operation.status() != Status::kPending;
}

void Team::fail(Status status, Members about) {
  if (is_forked()) return;
  Ended ended;
  const std::lock_guard lock(executor_);
  settle({status, about, static_cast<int>(me())}, ended);
}

void Team::leave() {
  if (is_forked()) return;
  {
    const std::lock_guard lock(queue_);
    if (left_) return;
    left_ = true;
    stopping_ = true;
  }
  work_.notify_all();
  ring(board_->bell);
  // A tensor that the thread lets go of may lead here by way of the interpreter.
  if (!is_own_thread()) thread_.join();
  Ended ended;
  const std::lock_guard lock(executor_);
  settle({Status::kClosed, {}, static_cast<int>(me())}, ended);
}

bool Team::is_own_thread() const {
  return std::this_thread::get_id() == thread_.get_id();
}

bool Team::is_forked() const {
  return getpid() != pid_;
}

Failure Team::failure() const {
  const std::lock_guard lock(queue_);
  return failure_;
}

State Team::state(size_t member) const {
  return seat(member).state.load();
}

}  // namespace fddp::shm
