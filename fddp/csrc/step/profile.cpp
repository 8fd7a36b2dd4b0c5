#include "step/profile.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <iterator>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "shm/own_thread.h"
#include "shm/per_process.h"

namespace py = pybind11;

namespace fddp {
namespace {

using DebugInfo = c10::ThreadLocalDebugInfo;

// Within, the profiler of the calling thread is another one, or none.
class ProfilerGuard {
 public:
  explicit ProfilerGuard(std::shared_ptr<DebugInfo> profiler) : own_(DebugInfo::current()) {
    DebugInfo::_forceCurrentDebugInfo(std::move(profiler));
  }
  ~ProfilerGuard() { DebugInfo::_forceCurrentDebugInfo(std::move(own_)); }
  ProfilerGuard(const ProfilerGuard&) = delete;
  ProfilerGuard& operator=(const ProfilerGuard&) = delete;

 private:
  std::shared_ptr<DebugInfo> own_;
};

// See [Note: rows of collectives].
class Rows {
 public:
  // Call a function on the first row without an open range. Return the number of the row. Throws
  // std::system_error if no thread can be started.
  size_t open(const std::function<void()>& begin) {
    std::unique_lock lock(mutex_);
    const auto found = std::find_if(rows_.begin(), rows_.end(), [](const Row& row) { return !row.is_open; });
    const auto number = static_cast<size_t>(std::distance(rows_.begin(), found));
    if (found == rows_.end()) {
      std::thread(&Rows::serve, this, number).detach();
      rows_.emplace_back();
    }
    rows_[number] = {true, &begin};
    changed_.notify_all();
    changed_.wait(lock, [&] { return rows_[number].begin == nullptr; });
    return number;
  }
  void close(size_t number) {
    const std::lock_guard lock(mutex_);
    if (number < rows_.size()) rows_[number].is_open = false;  // else of the process that was forked
  }

 private:
  struct Row {
    bool is_open = false;
    const std::function<void()>* begin = nullptr;  // to be called by the row
  };

  void serve(size_t number) {
    shm::become_own_thread("fddp-collective");
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return number < rows_.size() && rows_[number].begin != nullptr; });
      (*rows_[number].begin)();
      rows_[number].begin = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Row> rows_;
};

}  // namespace

std::shared_ptr<CollectiveRange> CollectiveRange::begin(const std::string& title, const at::Tensor& tensor) {
  auto function = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  if (!function->isActive()) return nullptr;
  function->_setAsync();
  const std::shared_ptr<DebugInfo> profiler = DebugInfo::current();
  std::vector<c10::IValue> inputs;
  if (tensor.defined()) inputs.emplace_back(tensor);
  auto range = std::make_shared<CollectiveRange>();
  try {
    range->row_ = shm::of_process<Rows>().open([&] {
      const ProfilerGuard guard(profiler);
      function->before(std::string_view(title), &inputs);
    });
  } catch (const std::system_error&) {  // a profile is no reason to fail a step
    return nullptr;
  }
  range->function_ = std::move(function);
  range->profiler_ = profiler;
  return range;
}

void CollectiveRange::end() {
  const std::lock_guard lock(mutex_);
  if (!function_) return;
  {
    const ProfilerGuard guard(profiler_.lock());
    function_.reset();
  }
  shm::of_process<Rows>().close(row_);
}

}  // namespace fddp

void bind_profile(py::module_& m) {
  using namespace fddp;
  m.def("is_profiled", &at::hasCallbacks);
  py::class_<CollectiveRange, std::shared_ptr<CollectiveRange>>(m, "CollectiveRange");
}
