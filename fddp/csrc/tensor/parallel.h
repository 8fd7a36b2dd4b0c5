// Copies cut into pieces, and run on as many threads as are worth it.

#pragma once

#include <ATen/Parallel.h>
#include <c10/core/ScalarType.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fddp {

// The first of some elements, which lie one after the other.
struct Memory {
  char* data;
  c10::ScalarType dtype;  // real
};

// A stretch of elements that goes through one kernel in one go.
template <class Kernel>
struct Piece {
  Kernel kernel;
  char* source;
  char* target;
  int64_t count;
  int64_t begin;  // elements in all pieces before this one
};

// [Note: pieces]
// The cuts depend on the leaves alone, and what pieces find out is put together in their order: so
// neither the number of threads nor their timing shows in a result's bits.
template <class Kernel>
class Work {
 public:
  explicit Work(size_t expected_pieces) {
    pieces_.reserve(expected_pieces);
  }

  // `count` real elements are to go from one memory to the other.
  void add(Kernel kernel, Memory source, Memory target, int64_t count) {
    const auto source_bytes = static_cast<int64_t>(c10::elementSize(source.dtype));
    const auto target_bytes = static_cast<int64_t>(c10::elementSize(target.dtype));
    for (int64_t done = 0; done < count; done += kPieceNumel) {
      const int64_t size = std::min(kPieceNumel, count - done);
      pieces_.push_back(
          {kernel, source.data + done * source_bytes, target.data + done * target_bytes, size,
           numel_});
      numel_ += size;
    }
  }

  size_t size() const {
    return pieces_.size();
  }

  // Calls body(piece, its number) once for each piece, possibly from several threads.
  template <class Body>
  void run(const Body& body) const {
    if (numel_ < kParallelNumel || at::get_num_threads() == 1) {
      for (const auto i : c10::irange(size())) body(pieces_[i], i);
      return;
    }
    // Threads share out elements, because pieces differ in size. A piece belongs to the thread in
    // whose share it begins.
    at::parallel_for(0, numel_, kPieceNumel, [&](int64_t begin, int64_t end) {
      for (size_t i = first_from(begin); i < size() && pieces_[i].begin < end; ++i) {
        body(pieces_[i], i);
      }
    });
  }

 private:
  static constexpr int64_t kPieceNumel = 1 << 15;
  // With fewer elements, starting threads costs more than it saves.
  static constexpr int64_t kParallelNumel = 1 << 18;

  size_t first_from(int64_t element) const {
    const auto before = [&](const Piece<Kernel>& piece) { return piece.begin < element; };
    return std::partition_point(pieces_.begin(), pieces_.end(), before) - pieces_.begin();
  }

  std::vector<Piece<Kernel>> pieces_;
  int64_t numel_ = 0;
};

}  // namespace fddp
