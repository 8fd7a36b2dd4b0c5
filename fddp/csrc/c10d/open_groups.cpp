#include "c10d/open_groups.h"

#include <algorithm>
#include <mutex>
#include <vector>

namespace fddp {
namespace {

struct OpenGroup {
  std::weak_ptr<shm::ShmGroup> group;
  std::weak_ptr<shm::Messages> messages;
};

struct OpenGroups {
  std::mutex mutex;
  std::vector<OpenGroup> groups;
};

// Never destroyed, because backends may outlive static objects.
OpenGroups& open_groups() {
  static auto* const groups = new OpenGroups;
  return *groups;
}

}  // namespace

void remember_open_group(
    const std::shared_ptr<shm::ShmGroup>& group, const std::shared_ptr<shm::Messages>& messages) {
  auto& [mutex, groups] = open_groups();
  const std::lock_guard lock(mutex);
  const auto is_gone = [](const OpenGroup& open) { return open.group.expired(); };
  groups.erase(std::remove_if(groups.begin(), groups.end(), is_gone), groups.end());
  groups.push_back({group, messages});
}

void leave_open_groups() {
  std::vector<OpenGroup> left;
  {
    auto& [mutex, groups] = open_groups();
    const std::lock_guard lock(mutex);
    left.swap(groups);
  }
  for (const OpenGroup& open : left) {
    if (const auto messages = open.messages.lock()) messages->close();
    if (const auto group = open.group.lock()) {
      group->drain();
      group->leave();
    }
  }
}

}  // namespace fddp
