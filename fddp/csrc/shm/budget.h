// How much memory may be asked of the system. The kernel answers a request for more by ending a
// process, not by an error.

#pragma once

#include <cstdint>
#include <string>

namespace fddp::shm {

// Bytes that can be had without swapping, and within the limits of all control groups that this
// process is in (of both versions); the largest number where nothing is told. `root` is where the
// files of the system are.
uint64_t available_bytes(const std::string& root = "");

}  // namespace fddp::shm
