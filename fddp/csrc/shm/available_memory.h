// Memory available to this process. Linux answers an allocation beyond it by killing a process,
// not by an error.

#pragma once

#include <cstdint>
#include <string>

namespace fddp::shm {

// Return the number of bytes that can be allocated without swapping, within the limits of all
// control groups (v1 and v2) of this process. Return the largest uint64_t if the system reports no
// limit. `root` is prefixed to the paths of system files.
uint64_t available_bytes(const std::string& root = "");

}  // namespace fddp::shm
