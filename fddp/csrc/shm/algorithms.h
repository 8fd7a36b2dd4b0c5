// What one member of a team does with memory in an operation, once all members' is known.
//
// [Note: who writes where]
// In a sum each member makes one part of it, from everybody's memory, in place, and writes it to
// everybody's memory: between the moment at which the last member has come and the one at which all
// have written, nobody but the part's maker reads or writes that part. So one barrier at the end is
// enough, and a summand is read once, straight from where it was packed. In a gather each member
// reads others' own chunks, which nobody writes, and writes its own memory.
//
// [Note: pieces of staged data]
// Memory outside the arenas goes through a buffer of its owner's arena, in pieces, with two halves
// in turn: one is filled (`fill`), all do what they do in place with others' memory (`work`), what
// came is taken out (`drain`). While peers work on one piece the next one is filled.

#pragma once

#include "board.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fddp::shm {

// Bytes of one half of a staging buffer.
inline constexpr uint64_t kPieceBytes = uint64_t{512} << 10;

// Whether what members send is copied when it is announced: they need nothing else of each other
// then. So it is for small operations, where waiting costs more than one more copy.
bool is_copied(const Terms& terms, size_t members);

// What `member` sends of its tensor in an operation that is copied.
struct Stretch {
  uint64_t begin;
  uint64_t bytes;
};
Stretch copied_part(const Terms& terms, size_t members, size_t member);

// Whether others read or write `member`'s tensor in an operation that is not copied.
bool is_shared(const Terms& terms, size_t member);

// Where all members' memory for an operation is.
class Moves {
 public:
  struct Place {
    Where where;
    char* memory;  // the tensor, the copy or the staging buffer
  };

  // `own` is this member's tensor, `places` one for each member.
  Moves(const Terms& terms, char* own, size_t me, std::vector<Place> places);

  // In one go, where all is copied.
  void receive() const;

  // Piece by piece; one piece where nobody's memory is staged.
  int64_t pieces() const {
    return pieces_;
  }
  bool staged() const {
    return staged_;
  }
  void fill(int64_t piece) const;
  void work(int64_t piece) const;
  void drain(int64_t piece) const;

  // `member`'s memory; what `work` touches of its tensor.
  char* memory(size_t member) const {
    return places_[member].memory;
  }
  // What `work` touches of `member`'s tensor.
  Stretch touched(size_t member) const;

 private:
  struct Span {
    int64_t begin;  // units
    int64_t count;
  };

  size_t members() const {
    return places_.size();
  }
  bool is_staged(size_t member) const;
  Span span_of(int64_t piece) const;
  char* at(size_t member, int64_t piece, int64_t unit, int64_t staged_unit) const;
  void sum_into(const std::vector<char*>& columns, char* const* targets, size_t n, Span span) const;
  int64_t bytes(int64_t units) const {
    return units * terms_.unit_bytes;
  }
  int64_t chunk() const {
    return terms_.units / static_cast<int64_t>(members());
  }

  Terms terms_;
  char* own_;
  size_t me_;
  std::vector<Place> places_;
  bool staged_;
  int64_t piece_units_;
  int64_t pieces_;
};

}  // namespace fddp::shm
