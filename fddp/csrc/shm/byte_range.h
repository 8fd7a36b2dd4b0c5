#pragma once

#include <cstdint>

namespace fddp::shm {

// Bytes [begin, begin + bytes) of an arena or of a tensor.
struct ByteRange {
  uint64_t begin;
  uint64_t bytes;

  uint64_t end() const {
    return begin + bytes;
  }
};

}  // namespace fddp::shm
