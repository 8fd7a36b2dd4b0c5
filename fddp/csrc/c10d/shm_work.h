// Works of the "fddp" backend: operations of a shared-memory group, and messages.

#pragma once

#include "shm/messages.h"
#include "shm/shm_group.h"

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace fddp {

// Description of a work, for profiles and errors.
struct WorkDescription {
  c10d::OpType type;
  const char* title;  // such as "fddp:all_reduce"; static
  int rank;
  uint64_t sequence;  // of the works of the group
  // Longest wait unless the caller passes a time limit; none: the limit of the group, whose end
  // ends all works of the group.
  std::chrono::milliseconds timeout;
};

class ShmWork : public c10d::Work {
 public:
  ShmWork(
      const WorkDescription& description, const std::vector<at::Tensor>& inputs,
      std::vector<std::vector<at::Tensor>> outputs);

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override {
    wait();
  }
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override {
    return description_.sequence;
  }

  // Set up the work before it starts: keep a tensor alive, or do something after success.
  void keep(at::Tensor tensor) {
    kept_.push_back(std::move(tensor));
  }
  void after_success(std::function<void()> action) {
    actions_.push_back(std::move(action));
  }
  // The tensors, while others refer to the work weakly.
  void release_resources() override {
    outputs_.clear();
    kept_.clear();
    actions_.clear();
    future_.reset();
  }
  bool is_finished() const {
    return finished_;
  }
  // Wait until the work is finished, whether or not it has failed.
  void settle();

 protected:
  // Return true if all operations have completed, waiting for at most `timeout`.
  virtual bool await(shm::Nanoseconds timeout) = 0;
  virtual bool poll() = 0;
  // Complete the operations even if no thread waits.
  virtual void expedite() = 0;
  // Error of the completed operations; empty if all succeeded.
  virtual std::string error() const = 0;
  // Members for which an uncompleted operation waits, in words.
  virtual std::string awaited() const = 0;

  // Finish the work after the completion of its operations. Safe to call repeatedly.
  void finalize();
  const char* name() const;

  const WorkDescription description_;

 private:
  void settle_future();

  std::vector<std::vector<at::Tensor>> outputs_;
  std::vector<at::Tensor> kept_;
  std::vector<std::function<void()>> actions_;
  // Of the call. The actions write to its tensors, from any thread.
  const bool in_inference_mode_ = c10::InferenceMode::is_enabled();
  std::once_flag once_;
  std::atomic<bool> finished_ = false;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool future_settled_ = false;
};

// Return contiguous memory with the values of `tensor`: its own, or that of a copy. The work keeps
// it alive.
at::Tensor readable(ShmWork& work, const at::Tensor& tensor);

// Return contiguous memory whose values will be those of `tensor` after success of the work.
// `with_values`: it has those of the tensor already.
at::Tensor writable(ShmWork& work, const at::Tensor& tensor, bool with_values);

// Operations of a group, all of which must succeed.
class CollectiveWork : public ShmWork {
 public:
  CollectiveWork(
      std::shared_ptr<shm::ShmGroup> group, const WorkDescription& description,
      const std::vector<at::Tensor>& inputs, std::vector<std::vector<at::Tensor>> outputs)
      : ShmWork(description, inputs, std::move(outputs)), group_(std::move(group)) {}

  // Start an operation. A group of one rank needs none: `group` is null.
  void start(shm::Request request);
  // Mark that no further operation will be started.
  void all_started();
  const shm::OperationPtr& last() const {
    return operations_.back();
  }
  // Wait for an operation of another work as well; its outcome is ignored.
  void wait_for_earlier(shm::OperationPtr earlier) {
    earlier_ = std::move(earlier);
  }

 protected:
  bool await(shm::Nanoseconds timeout) override;
  bool poll() override;
  void expedite() override;
  std::string error() const override;
  std::string awaited() const override;

 private:
  void one_completed();

  const std::shared_ptr<shm::ShmGroup> group_;
  std::vector<shm::OperationPtr> operations_;
  shm::OperationPtr earlier_;
  std::atomic<int> outstanding_ = 1;
};

// One message.
class MessageWork : public ShmWork {
 public:
  MessageWork(
      std::shared_ptr<shm::ShmGroup> group, std::shared_ptr<shm::Messages> messages,
      const WorkDescription& description, const std::vector<at::Tensor>& inputs,
      std::vector<std::vector<at::Tensor>> outputs)
      : ShmWork(description, inputs, std::move(outputs)),
        group_(std::move(group)),
        messages_(std::move(messages)) {}

  void start(shm::MessageRequest request);
  int sourceRank() const override;

 protected:
  bool await(shm::Nanoseconds timeout) override;
  bool poll() override;
  void expedite() override {}
  std::string error() const override;
  std::string awaited() const override;

 private:
  void one_completed();

  const std::shared_ptr<shm::ShmGroup> group_;
  const std::shared_ptr<shm::Messages> messages_;
  shm::MessagePtr message_;
  uint64_t bytes_ = 0;
  std::atomic<int> outstanding_ = 2;
};

}  // namespace fddp
