#include "c10d/hosts_runtime.h"

#include "c10d/shm_errors.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

namespace fddp {
namespace {

using std::chrono::milliseconds;

constexpr char kClosed[] = "the group was closed on this rank";
// Longest wait for the thread at the end of a group.
constexpr milliseconds kEndTime{2000};
// Time in which a rank reports that gloo over all ranks timed out, which closes its connections.
constexpr milliseconds kProbeDelay{500};

bool is_timeout(const std::string& text) {
  return text.find("imed out") != std::string::npos ||
         text.find("timeout") != std::string::npos;
}

// Return the ranks to which gloo has no connection any more. A message is sent to every rank, with
// a tag that no rank receives.
std::vector<int> disconnected_ranks(const c10::intrusive_ptr<c10d::Backend>& whole) {
  constexpr int kTag = std::numeric_limits<int>::max();
  std::vector<int> found;
  for (int rank = 0; rank < whole->getSize(); ++rank) {
    if (rank == whole->getRank()) continue;
    std::vector<at::Tensor> nothing = {at::empty({1}, at::kByte)};
    try {
      whole->send(nothing, rank, kTag);
    } catch (const std::exception&) {
      found.push_back(rank);
    }
  }
  return found;
}

// Groups of this process. Never destroyed, because threads may outlive static objects.
struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<HostsRuntime>> runtimes;

  static Registry& instance() {
    static auto* const registry = new Registry();
    return *registry;
  }
  void add(const std::shared_ptr<HostsRuntime>& runtime) {
    const std::lock_guard lock(mutex);
    std::erase_if(runtimes, [](const auto& known) { return known.expired(); });
    runtimes.push_back(runtime);
  }
};

}  // namespace

void HostsRuntime::close_all() {
  std::vector<std::weak_ptr<HostsRuntime>> runtimes;
  {
    Registry& registry = Registry::instance();
    const std::lock_guard lock(registry.mutex);
    runtimes.swap(registry.runtimes);
  }
  for (const auto& known : runtimes) {
    if (const auto runtime = known.lock()) runtime->close();
  }
}

std::shared_ptr<HostsRuntime> HostsRuntime::start(
    HostLevels levels, const c10::intrusive_ptr<c10d::Store>& store, milliseconds timeout) {
  const auto runtime = std::make_shared<HostsRuntime>(std::move(levels), store, timeout);
  Registry::instance().add(runtime);
  runtime->queue_ = TaskQueue::start(
      [runtime](QueuedTask& task) { runtime->run(task); }, [runtime] { runtime->release(); });
  return runtime;
}

HostsRuntime::HostsRuntime(
    HostLevels levels, const c10::intrusive_ptr<c10d::Store>& store, milliseconds timeout)
    : pid_(getpid()),
      within_(levels.within),
      timeout_(timeout),
      whole_(levels.whole),
      levels_(std::move(levels)),
      reports_(store, whole_->getRank(), whole_->getSize()) {}

c10::intrusive_ptr<c10d::Backend> HostsRuntime::whole() const {
  const std::lock_guard lock(mutex_);
  if (whole_ == nullptr) throw_backend_error(kClosed);
  return whole_;
}

void HostsRuntime::set_timeout(milliseconds timeout) {
  timeout_ = timeout;
  within_->setTimeout(timeout);
  whole()->setTimeout(timeout);
  // The group between hosts belongs to the thread, which sets its limit before each task.
}

void HostsRuntime::close() {
  if (getpid() != pid_ || closed_.exchange(true)) return;
  within_->shutdown();
  c10::intrusive_ptr<c10d::Backend> whole;
  {
    const std::lock_guard lock(mutex_);
    whole.swap(whole_);
  }
  for (QueuedTask& task : queue_->close()) task.work->fail(kClosed);
  if (queue_->is_own_thread()) return;
  if (const QueuedWorkPtr current = queue_->current()) current->fail(kClosed);
  queue_->join(kEndTime);
}

void HostsRuntime::release() {
  levels_ = HostLevels();
}

void HostsRuntime::communicate(
    milliseconds timeout, const std::function<void(const HostsCollective&)>& body) {
  // An operation without a limit of its own has that of the group.
  const milliseconds limit = timeout == c10d::kUnsetTimeout ? timeout_.load() : timeout;
  body(HostsCollective(levels_, limit, [this] { return reports_.exist(); }));
}

void HostsRuntime::run(QueuedTask& task) {
  if (!cause_.empty()) {
    task.work->fail(cause_);
    return;
  }
  try {
    {
      // Results are written to the tensors of callers, whether or not these require gradients.
      const c10::InferenceMode guard;
      task.body();
    }
    task.body = nullptr;  // releases tensors before others learn of the end
    task.work->complete(nullptr);
  } catch (const LevelError& error) {
    end_group(error);
    task.body = nullptr;
    task.work->fail(cause_);
  } catch (...) {
    task.work->complete(std::current_exception());  // an argument that gloo refuses
  }
}

// The report comes first, because the others fail once memory and connections are closed.
void HostsRuntime::end_group(const LevelError& error) {
  if (closed_) {
    cause_ = kClosed;
    return;
  }
  Finding finding = finding_of(error);
  if (error.level == Level::kAcross && !finding.timed_out) {
    finding.disconnected = disconnected_ranks(levels_.whole);
  }
  reports_.report(finding);
  levels_.group->fail(shm::Status::kPeerFailed, {});
  levels_.across.reset();
  cause_ = reports_.settle(
      finding, [whole = levels_.whole] { return disconnected_ranks(whole); }, timeout_);
}

std::vector<int> HostsRuntime::ranks_of(const shm::Members& members) const {
  std::vector<int> ranks;
  for (int local = 0; local < levels_.locals(); ++local) {
    if (members[static_cast<size_t>(local)]) {
      ranks.push_back(levels_.host() * levels_.locals() + local);
    }
  }
  return ranks;
}

std::vector<int> HostsRuntime::ranks_of_other_hosts() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < levels_.whole->getSize(); ++rank) {
    if (rank / levels_.locals() != levels_.host()) ranks.push_back(rank);
  }
  return ranks;
}

Finding HostsRuntime::finding_of(const LevelError& error) const {
  Finding finding;
  finding.text = error.what();
  if (error.level == Level::kReports) return finding;
  const shm::Failure failure = levels_.group->failure();
  if (failure.status == shm::Status::kLost) {
    finding.cause = text_of_lost(ranks_of(failure.blamed));
  } else if (failure.status == shm::Status::kTimeout) {
    finding.timed_out = true;
    finding.late = ranks_of(failure.blamed);
  } else if (error.level == Level::kWithin && failure.status != shm::Status::kPeerFailed) {
    finding.cause = error.what();
  }
  if (error.level == Level::kWithin || !finding.cause.empty()) return finding;
  const std::vector<bool> gone = levels_.group->gone();
  shm::Members lost;
  for (size_t local = 0; local < gone.size(); ++local) lost[local] = gone[local];
  if (lost.any()) finding.cause = text_of_lost(ranks_of(lost));
  finding.timed_out |= is_timeout(error.what());
  if (finding.timed_out) finding.suspects = ranks_of_other_hosts();
  if (error.level == Level::kWhole) finding.probe_after = kProbeDelay;
  return finding;
}

}  // namespace fddp
