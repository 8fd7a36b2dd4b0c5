#include "algorithms.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fddp::shm {
namespace {

// Each member reads all copies, so that the traffic grows with the square of their number. Two
// ranks that wait on processors of their own are faster in place from 8 KiB on (1 against 5 us at
// 32 KiB). But a copy spares the progress thread's waking, and the second of two sleeps where ranks
// outnumber processors (31 against 60 us at 32 KiB for 4 ranks on 2), so that it is taken further.
constexpr uint64_t kCopiedBytes = uint64_t{64} << 10;
constexpr int64_t kLineBytes = 64;

void copy(char* to, const char* from, int64_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

// Parts end where lines of the cache do, so that no two members write the same one.
int64_t cut(int64_t units, uint32_t unit_bytes, size_t members, size_t member) {
  if (member == members) return units;
  const int64_t grain = std::max<int64_t>(1, kLineBytes / unit_bytes);
  const int64_t even = units / static_cast<int64_t>(members) * static_cast<int64_t>(member) +
                       units % static_cast<int64_t>(members) * static_cast<int64_t>(member) /
                           static_cast<int64_t>(members);
  return even / grain * grain;
}

}  // namespace

bool is_copied(const Terms& terms, size_t members) {
  return terms.bytes() <= kCopiedBytes / members;
}

Stretch copied_part(const Terms& terms, size_t members, size_t member) {
  const uint64_t chunk = terms.bytes() / members;
  switch (terms.kind) {
    case Kind::kAllGather:
      return {chunk * member, chunk};
    case Kind::kBroadcast:
      return {0, member == terms.src ? terms.bytes() : 0};
    case Kind::kAllReduce:
    case Kind::kReduceScatter:
      break;
  }
  return {0, terms.bytes()};
}

bool is_shared(const Terms& terms, size_t member) {
  return terms.kind != Kind::kBroadcast || member == terms.src;
}

Moves::Moves(const Terms& terms, char* own, size_t me, std::vector<Place> places)
    : terms_(terms), own_(own), me_(me), places_(std::move(places)), staged_(false) {
  for (size_t m = 0; m < members(); ++m) staged_ = staged_ || is_staged(m);
  const bool chunks = terms.kind == Kind::kReduceScatter || terms.kind == Kind::kAllGather;
  const int64_t whole = chunks ? chunk() : terms.units;
  const auto room = static_cast<int64_t>(kPieceBytes / terms.unit_bytes);
  // In a reduce-scatter a piece has a stretch of every chunk.
  const int64_t most =
      terms.kind == Kind::kReduceScatter ? room / static_cast<int64_t>(members()) : room;
  piece_units_ = staged_ ? most : std::max<int64_t>(whole, 1);
  pieces_ = std::max<int64_t>(1, (whole + piece_units_ - 1) / piece_units_);
}

bool Moves::is_staged(size_t member) const {
  return is_shared(terms_, member) && places_[member].where == Where::kStaged;
}

Moves::Span Moves::span_of(int64_t piece) const {
  const bool chunks = terms_.kind == Kind::kReduceScatter || terms_.kind == Kind::kAllGather;
  const int64_t whole = chunks ? chunk() : terms_.units;
  const int64_t begin = piece * piece_units_;
  return {begin, std::min(piece_units_, whole - begin)};
}

// A unit of a member's memory: counted in its tensor, or in its staging buffer's half.
char* Moves::at(size_t member, int64_t piece, int64_t unit, int64_t staged_unit) const {
  char* const memory = places_[member].memory;
  if (!is_staged(member)) return memory + bytes(unit);
  return memory + (piece % 2 == 0 ? 0 : kPieceBytes) + bytes(staged_unit);
}

void Moves::receive() const {
  const auto n = static_cast<int64_t>(members());
  if (terms_.kind == Kind::kAllGather) {
    for (int64_t r = 0; r < n; ++r) {
      if (static_cast<size_t>(r) == me_) continue;
      copy(own_ + bytes(r * chunk()), places_[static_cast<size_t>(r)].memory, bytes(chunk()));
    }
    return;
  }
  if (terms_.kind == Kind::kBroadcast) {
    if (me_ != terms_.src) copy(own_, places_[terms_.src].memory, bytes(terms_.units));
    return;
  }
  const bool scatter = terms_.kind == Kind::kReduceScatter;
  const int64_t begin = scatter ? static_cast<int64_t>(me_) * chunk() : 0;
  std::vector<char*> columns;
  columns.reserve(members());
  for (const Place& place : places_) columns.push_back(place.memory + bytes(begin));
  char* target = own_ + bytes(begin);
  sum_into(columns, &target, 1, {0, scatter ? chunk() : terms_.units});
}

void Moves::fill(int64_t piece) const {
  if (!is_staged(me_)) return;
  const Span span = span_of(piece);
  const auto own_chunk = static_cast<int64_t>(me_) * chunk();
  switch (terms_.kind) {
    case Kind::kAllReduce:
    case Kind::kBroadcast:
      copy(at(me_, piece, 0, 0), own_ + bytes(span.begin), bytes(span.count));
      return;
    case Kind::kAllGather:
      copy(at(me_, piece, 0, 0), own_ + bytes(own_chunk + span.begin), bytes(span.count));
      return;
    case Kind::kReduceScatter:
      for (int64_t c = 0; c < static_cast<int64_t>(members()); ++c) {
        copy(
            at(me_, piece, 0, c * piece_units_), own_ + bytes(c * chunk() + span.begin),
            bytes(span.count));
      }
      return;
  }
}

// [Note: who writes where]
void Moves::work(int64_t piece) const {
  const Span span = span_of(piece);
  const auto own_chunk = static_cast<int64_t>(me_) * chunk();
  std::vector<char*> columns;
  columns.reserve(members());
  switch (terms_.kind) {
    case Kind::kAllReduce: {
      const int64_t begin = cut(span.count, terms_.unit_bytes, members(), me_);
      const int64_t end = cut(span.count, terms_.unit_bytes, members(), me_ + 1);
      for (size_t m = 0; m < members(); ++m) {
        columns.push_back(at(m, piece, span.begin + begin, begin));
      }
      sum_into(columns, columns.data(), members(), {0, end - begin});
      return;
    }
    case Kind::kReduceScatter: {
      const int64_t begin = own_chunk + span.begin;
      for (size_t m = 0; m < members(); ++m) {
        columns.push_back(at(m, piece, begin, static_cast<int64_t>(me_) * piece_units_));
      }
      char* target = own_ + bytes(begin);
      sum_into(columns, &target, 1, {0, span.count});
      return;
    }
    case Kind::kAllGather:
      // Each begins with its neighbour, so that not all read from one.
      for (size_t step = 1; step < members(); ++step) {
        const size_t m = (me_ + step) % members();
        const int64_t begin = static_cast<int64_t>(m) * chunk() + span.begin;
        copy(own_ + bytes(begin), at(m, piece, begin, 0), bytes(span.count));
      }
      return;
    case Kind::kBroadcast:
      if (me_ == terms_.src) return;
      copy(own_ + bytes(span.begin), at(terms_.src, piece, span.begin, 0), bytes(span.count));
      return;
  }
}

void Moves::drain(int64_t piece) const {
  if (terms_.kind != Kind::kAllReduce || !is_staged(me_)) return;
  const Span span = span_of(piece);
  copy(own_ + bytes(span.begin), at(me_, piece, 0, 0), bytes(span.count));
}

Stretch Moves::touched(size_t member) const {
  if (is_staged(member) || !is_shared(terms_, member)) return {0, 0};
  const auto chunk_bytes = static_cast<uint64_t>(bytes(chunk()));
  switch (terms_.kind) {
    case Kind::kAllReduce: {
      const int64_t begin = cut(terms_.units, terms_.unit_bytes, members(), me_);
      const int64_t end = cut(terms_.units, terms_.unit_bytes, members(), me_ + 1);
      return {static_cast<uint64_t>(bytes(begin)), static_cast<uint64_t>(bytes(end - begin))};
    }
    case Kind::kReduceScatter:
      return {chunk_bytes * me_, chunk_bytes};
    case Kind::kAllGather:
      return {chunk_bytes * member, chunk_bytes};
    case Kind::kBroadcast:
      break;
  }
  return {0, terms_.bytes()};
}

void Moves::sum_into(
    const std::vector<char*>& columns, char* const* targets, size_t n, Span span) const {
  const Recipe recipe = {terms_.number, terms_.average != 0, terms_.order};
  sum(recipe, {columns.data(), columns.size(), targets, n}, span.begin, span.count);
}

}  // namespace fddp::shm
