// Copies into and out of the ring of an outbox.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "messages.h"

namespace fddp::shm {

// Copy between memory and a ring, whose end a copy wraps around.
inline void copy_to_ring(char* ring, uint64_t position, const char* from, uint64_t bytes) {
  const uint64_t begin = position % Outbox::kBytes;
  const uint64_t first = std::min(bytes, Outbox::kBytes - begin);
  if (first != 0) std::memcpy(ring + begin, from, first);
  if (bytes != first) std::memcpy(ring, from + first, bytes - first);
}

inline void copy_from_ring(char* to, const char* ring, uint64_t position, uint64_t bytes) {
  const uint64_t begin = position % Outbox::kBytes;
  const uint64_t first = std::min(bytes, Outbox::kBytes - begin);
  if (first != 0) std::memcpy(to, ring + begin, first);
  if (bytes != first) std::memcpy(to + first, ring, bytes - first);
}

}  // namespace fddp::shm
