// Functions that feed arbitrary bytes to parts of the shared-memory core, and what they share.

#pragma once

#include "../../fddp/csrc/shm/control_block.h"
#include "../../fddp/csrc/shm/sums.h"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <vector>

namespace shm_fuzz {

using namespace fddp::shm;

inline void require(bool holds, const char* what) {
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

// Fill with bytes that follow from one word of the input.
void fill(Bytes& in, char* data, uint64_t bytes);

// Random signature that `ShmGroup::start` accepts.
Signature draw_signature(Bytes& in, size_t n);

struct Drawn {
  SumOptions options;
  size_t n;
  size_t place = 0;  // of the sum to check, among those that a tree leaves
};

// Compare a range of numbers with the sum of those of all summands before it.
void check_sum(
    const Drawn& drawn, const std::vector<std::vector<char>>& before, const char* target,
    int64_t begin, int64_t count);

void fuzz_allocator(Bytes in);
void fuzz_sums(Bytes in);
void fuzz_algorithms(Bytes in);
void fuzz_group(Bytes in);
void fuzz_map_peer_arena(Bytes in);

}  // namespace shm_fuzz
