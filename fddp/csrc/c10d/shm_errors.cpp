#include "c10d/shm_errors.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstdio>
#include <string_view>

namespace fddp {
namespace {

constexpr std::array<std::string_view, shm::kKindCount> kKindNames = {
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "reduce", "exchange"};
constexpr std::array<std::string_view, shm::kReductionCount> kReductionNames = {
    "sum", "average", "product", "min", "max", "bitwise and", "bitwise or", "bitwise xor"};

// A faulty member may have posted an invalid number.
template <size_t n>
std::string name_in(const std::array<std::string_view, n>& names, uint32_t number) {
  return number < n ? std::string(names[number]) : "unknown";
}

std::string text_of(const shm::Signature& signature) {
  std::string text = name_in(kKindNames, static_cast<uint32_t>(signature.kind));
  if (shm::is_reduction(signature.kind)) {
    text += " (" + name_in(kReductionNames, static_cast<uint32_t>(signature.reduction)) + ")";
  }
  if (signature.tag < static_cast<uint32_t>(at::ScalarType::NumOptions)) {
    text += std::string(" of ") + c10::toString(static_cast<at::ScalarType>(signature.tag));
  }
  if (signature.kind != shm::Kind::kExchange) {
    text += ", " + std::to_string(signature.bytes()) + " bytes";
  }
  if (signature.src != 0) text += ", root " + std::to_string(signature.src);
  return text;
}

}  // namespace

void throw_backend_error(const std::string& text) {
  C10_THROW_ERROR(DistBackendError, text);
}

std::string described(const char* name, uint64_t sequence, int rank) {
  return std::string(name) + " #" + std::to_string(sequence) + " on rank " + std::to_string(rank);
}

std::string in_words(const shm::Members& members) {
  std::string text = members.count() == 1 ? "rank " : "ranks ";
  bool first = true;
  for (size_t m = 0; m < members.size(); ++m) {
    if (!members[m]) continue;
    text += (first ? "" : ", ") + std::to_string(m);
    first = false;
  }
  return text;
}

std::string in_seconds(shm::Nanoseconds duration) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g s", shm::Seconds(duration).count());
  return text;
}

std::string text_of_failure(const shm::ShmGroup& group, const shm::Failure& failure) {
  switch (failure.status) {
    case shm::Status::kLost:
      return in_words(failure.blamed) + " left the group, or its process has ended";
    case shm::Status::kTimeout: {
      std::string text = in_words(failure.blamed) + " did not take part within the timeout of " +
                         in_seconds(group.timeout());
      if (failure.reporter != static_cast<int>(group.index())) {
        text += ", as rank " + std::to_string(failure.reporter) + " found";
      }
      return text;
    }
    case shm::Status::kCorrupt:
      return in_words(failure.blamed) + " wrote invalid data to shared memory";
    case shm::Status::kClosed:
      return "the group was closed on this rank";
    default:
      return "rank " + std::to_string(failure.reporter) + " reported a failure";
  }
}

std::string text_of_mismatch(const std::vector<shm::Signature>& signatures) {
  std::string text = "the ranks called different operations";
  for (size_t m = 1; m < signatures.size(); ++m) {
    if (signatures[m] == signatures[0]) continue;
    return text + ": rank 0 " + text_of(signatures[0]) + ", rank " + std::to_string(m) + " " +
           text_of(signatures[m]);
  }
  return "the sizes that ranks send differ from those that others receive";
}

}  // namespace fddp
