#include "budget.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

namespace fddp::shm {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// The number that a file begins with; none where there is no such file, or a word.
std::optional<uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t number;
  if (file >> number) return number;
  return std::nullopt;
}

// The number behind a name at the beginning of a line.
std::optional<uint64_t> number_of(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(name, 0) != 0) continue;
    return std::strtoull(line.c_str() + name.size(), nullptr, 10);
  }
  return std::nullopt;
}

struct Names {
  const char* limit;
  const char* usage;
  const char* cache;  // in memory.stat: pages of files, which the kernel drops when it needs them
};
constexpr Names kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "};
constexpr Names kVersion2 = {"memory.max", "memory.current", "inactive_file "};

// What is left in a group and in all that it is part of.
uint64_t left_in(const std::string& mount, std::string group, const Names& names) {
  uint64_t left = kUnlimited;
  while (true) {
    const std::string folder = mount + group + "/";
    const auto limit = number_in(folder + names.limit);
    const auto usage = number_in(folder + names.usage);
    if (limit && usage) {
      const uint64_t cache = number_of(folder + "memory.stat", names.cache).value_or(0);
      const uint64_t needed = *usage - std::min(*usage, cache);
      left = std::min(left, *limit - std::min(*limit, needed));
    }
    const size_t slash = group.rfind('/');
    if (slash == std::string::npos) return left;
    group.resize(slash);
  }
}

// Lines are "number:controllers:path"; the second version's have no controllers.
uint64_t left_in_groups(const std::string& root) {
  const std::string mount = root + "/sys/fs/cgroup";
  uint64_t left = kUnlimited;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string group = line.substr(second + 1);
    if (controllers == ",,") left = std::min(left, left_in(mount, group, kVersion2));
    if (controllers.find(",memory,") != std::string::npos) {
      left = std::min(left, left_in(mount + "/memory", group, kVersion1));
    }
  }
  return left;
}

}  // namespace

uint64_t available_bytes(const std::string& root) {
  const auto kib = number_of(root + "/proc/meminfo", "MemAvailable:");
  return std::min(kib ? *kib * 1024 : kUnlimited, left_in_groups(root));
}

}  // namespace fddp::shm
