// Error texts of the "fddp" backend.

#pragma once

#include "shm/shm_group.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace fddp {

// Throw torch.distributed.DistBackendError.
[[noreturn]] void throw_backend_error(const std::string& text);

// "all_reduce #3 on rank 1".
std::string described(const char* name, uint64_t sequence, int rank);

// "rank 1", or "ranks 1, 2".
std::string in_words(const shm::Members& members);

std::string in_seconds(shm::Nanoseconds duration);

// Cause of the end of a group, or of the failure of a message.
std::string text_of_failure(const shm::ShmGroup& group, const shm::Failure& failure);

// Difference between the operations of the members.
std::string text_of_mismatch(const std::vector<shm::Signature>& signatures);

}  // namespace fddp
