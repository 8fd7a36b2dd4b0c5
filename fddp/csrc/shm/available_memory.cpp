#include "available_memory.h"

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

// Return the number at the beginning of a file. Return nullopt if there is no such file, or no
// number in it.
std::optional<uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  uint64_t number;
  if (file >> number) return number;
  return std::nullopt;
}

// Return the number after `name`, at the beginning of a line.
std::optional<uint64_t> read_field(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(name, 0) != 0) continue;
    return std::strtoull(line.c_str() + name.size(), nullptr, 10);
  }
  return std::nullopt;
}

struct FileNames {
  const char* limit;
  const char* usage;
  const char* cache;  // field of memory.stat: page cache that the kernel can drop
};
constexpr FileNames kVersion1 = {
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "};
constexpr FileNames kVersion2 = {"memory.max", "memory.current", "inactive_file "};

// Return the bytes that remain in a control group and all of its ancestors.
uint64_t remaining_in_group(const std::string& mount, std::string group, const FileNames& names) {
  uint64_t remaining = kUnlimited;
  while (true) {
    const std::string directory = mount + group + "/";
    const auto limit = read_number(directory + names.limit);
    const auto usage = read_number(directory + names.usage);
    if (limit && usage) {
      const uint64_t cache = read_field(directory + "memory.stat", names.cache).value_or(0);
      const uint64_t needed = *usage - std::min(*usage, cache);
      remaining = std::min(remaining, *limit - std::min(*limit, needed));
    }
    const size_t slash = group.rfind('/');
    if (slash == std::string::npos) return remaining;
    group.resize(slash);
  }
}

// Each line is "number:controllers:path". Lines of v2 have no controllers.
uint64_t remaining_in_groups(const std::string& root) {
  const std::string mount = root + "/sys/fs/cgroup";
  uint64_t remaining = kUnlimited;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string group = line.substr(second + 1);
    if (controllers == ",,") {
      remaining = std::min(remaining, remaining_in_group(mount, group, kVersion2));
    }
    if (controllers.find(",memory,") != std::string::npos) {
      remaining = std::min(remaining, remaining_in_group(mount + "/memory", group, kVersion1));
    }
  }
  return remaining;
}

}  // namespace

uint64_t available_bytes(const std::string& root) {
  const auto kib = read_field(root + "/proc/meminfo", "MemAvailable:");
  return std::min(kib ? *kib * 1024 : kUnlimited, remaining_in_groups(root));
}

}  // namespace fddp::shm
