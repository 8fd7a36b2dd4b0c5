// Parallel execution of copy kernels, split into tasks.

#pragma once

#include <ATen/Parallel.h>
#include <c10/core/ScalarType.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fddp {

// Address of contiguous elements.
struct TypedPointer {
  char* data;
  c10::ScalarType dtype;  // real
};

// Contiguous elements that one kernel call handles.
template <class Kernel>
struct KernelTask {
  Kernel kernel;
  char* source;
  char* target;
  int64_t count;
  int64_t begin;  // number of elements in all tasks before this one
};

// [Note: fixed task boundaries]
// The boundaries of tasks depend on the leaves alone, and the results of tasks are combined in task
// order. Results therefore do not depend, bit for bit, on the number of threads or their timing.
template <class Kernel>
class KernelTasks {
 public:
  explicit KernelTasks(size_t expected_tasks) {
    tasks_.reserve(expected_tasks);
  }

  // Add tasks for `count` real elements.
  void add(Kernel kernel, TypedPointer source, TypedPointer target, int64_t count) {
    const auto source_bytes = static_cast<int64_t>(c10::elementSize(source.dtype));
    const auto target_bytes = static_cast<int64_t>(c10::elementSize(target.dtype));
    for (int64_t done = 0; done < count; done += kTaskNumel) {
      const int64_t size = std::min(kTaskNumel, count - done);
      tasks_.push_back(
          {kernel, source.data + done * source_bytes, target.data + done * target_bytes, size,
           numel_});
      numel_ += size;
    }
  }

  size_t size() const {
    return tasks_.size();
  }

  // Call body(task, index) once for each task, possibly from several threads.
  template <class Body>
  void run(const Body& body) const {
    if (numel_ < kParallelNumel || at::get_num_threads() == 1) {
      for (const auto i : c10::irange(size())) body(tasks_[i], i);
      return;
    }
    // Threads share elements, not tasks, because tasks differ in size. A task belongs to the thread
    // whose share contains its begin.
    at::parallel_for(0, numel_, kTaskNumel, [&](int64_t begin, int64_t end) {
      for (size_t i = first_task_from(begin); i < size() && tasks_[i].begin < end; ++i) {
        body(tasks_[i], i);
      }
    });
  }

 private:
  static constexpr int64_t kTaskNumel = 1 << 15;
  // With fewer elements, starting threads costs more than it saves.
  static constexpr int64_t kParallelNumel = 1 << 18;

  size_t first_task_from(int64_t element) const {
    const auto before = [&](const KernelTask<Kernel>& task) { return task.begin < element; };
    return std::partition_point(tasks_.begin(), tasks_.end(), before) - tasks_.begin();
  }

  std::vector<KernelTask<Kernel>> tasks_;
  int64_t numel_ = 0;
};

}  // namespace fddp
