#include "c10d/shm_work.h"

#include "c10d/shm_errors.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

namespace fddp {
namespace {

// Longest wait in one piece; the group itself limits the time of operations.
constexpr auto kSlice = std::chrono::seconds(1);

c10::TypePtr type_of(const std::vector<std::vector<at::Tensor>>& outputs) {
  const c10::TypePtr tensors = c10::ListType::create(c10::TensorType::get());
  return outputs.size() > 1 ? c10::TypePtr(c10::ListType::create(tensors)) : tensors;
}

c10::IValue value_of(const std::vector<std::vector<at::Tensor>>& outputs) {
  if (outputs.empty()) return c10::IValue(std::vector<at::Tensor>());
  if (outputs.size() > 1) return c10::IValue(outputs);
  return c10::IValue(outputs[0]);
}

}  // namespace

ShmWork::ShmWork(
    const WorkDescription& description, const std::vector<at::Tensor>& inputs,
    std::vector<std::vector<at::Tensor>> outputs)
    : Work(description.rank, description.type, description.title, inputs),
      description_(description),
      outputs_(std::move(outputs)) {}

const char* ShmWork::name() const {
  return description_.title + std::strlen("fddp:");
}

bool ShmWork::isCompleted() {
  if (finished_) return true;
  if (poll()) finalize();
  return finished_;
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  if (!finished_) {
    const auto limit = timeout > kNoTimeout ? timeout : description_.timeout;
    const bool limited = limit > kNoTimeout;
    const auto until = shm::Clock::now() + limit;
    while (!await(limited ? std::min<shm::Nanoseconds>(kSlice, until - shm::Clock::now())
                          : shm::Nanoseconds(kSlice))) {
      if (limited && shm::Clock::now() >= until) {
        throw_backend_error(
            described(name(), description_.sequence, description_.rank) + ": not finished after " +
            in_seconds(limit) + awaited());
      }
    }
    finalize();
  }
  const std::exception_ptr failure = exception();
  if (failure) std::rethrow_exception(failure);
  return true;
}

void ShmWork::settle() {
  try {
    wait();
  } catch (const std::exception&) {  // which `wait` raises for its callers
  }
}

std::vector<at::Tensor> ShmWork::result() {
  TORCH_CHECK(
      isCompleted(), "the result of a work is available once it has completed; wait for it first");
  TORCH_CHECK(outputs_.size() <= 1, "the work has several lists of outputs; use get_future()");
  return outputs_.empty() ? std::vector<at::Tensor>() : outputs_[0];
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(future_mutex_);
    if (!future_) future_ = c10::make_intrusive<c10::ivalue::Future>(type_of(outputs_));
    future = future_;
  }
  if (finished_) {
    settle_future();
  } else {
    expedite();
  }
  return future;
}

void ShmWork::finalize() {
  // Released at the end: a tensor known to Python needs the GIL, whose holder may wait for the once.
  std::vector<at::Tensor> kept;
  std::vector<std::function<void()>> actions;
  std::call_once(once_, [&] {
    std::exception_ptr failure;
    try {
      const std::string text = error();
      if (!text.empty()) {
        throw_backend_error(
            described(name(), description_.sequence, description_.rank) + ": " + text);
      }
      // Results are written to the tensors of callers, whether or not these require gradients.
      const c10::InferenceMode mode(in_inference_mode_);
      const c10::NoGradGuard guard;
      for (const auto& action : actions_) action();
    } catch (...) {
      failure = std::current_exception();
    }
    actions.swap(actions_);
    kept.swap(kept_);
    finish(failure);
    finished_ = true;
  });
  settle_future();
}

// Complete the future outside of locks, because its callbacks may use this work.
void ShmWork::settle_future() {
  {
    const std::lock_guard lock(future_mutex_);
    if (!future_ || future_settled_) return;
    future_settled_ = true;
  }
  const std::exception_ptr failure = exception();
  if (failure) {
    future_->setError(failure);
  } else {
    future_->markCompleted(value_of(outputs_));
  }
}

void CollectiveWork::start(shm::Request request) {
  ++outstanding_;
  request.completed = [self = c10::intrusive_ptr<CollectiveWork>::unsafe_reclaim_from_nonowning(
                           this)] { self->one_completed(); };
  try {
    operations_.push_back(group_->start(std::move(request)));
  } catch (...) {
    --outstanding_;
    throw;
  }
}

void CollectiveWork::all_started() {
  one_completed();
}

void CollectiveWork::one_completed() {
  if (--outstanding_ == 0) finalize();
}

bool CollectiveWork::await(shm::Nanoseconds timeout) {
  const auto until = shm::Clock::now() + timeout;
  const auto complete = [&](const shm::OperationPtr& operation) {
    const auto left = until - shm::Clock::now();
    return group_->wait(*operation, left) != shm::Status::kPending;
  };
  if (group_ == nullptr) return true;
  if (group_->is_forked()) throw_backend_error(shm::kForkedError);
  if (earlier_ && !complete(earlier_)) return false;
  return std::all_of(operations_.begin(), operations_.end(), complete);
}

bool CollectiveWork::poll() {
  const auto done = [&](const shm::OperationPtr& operation) { return group_->done(*operation); };
  if (group_ == nullptr) return true;
  return (!earlier_ || done(earlier_)) &&
         std::all_of(operations_.begin(), operations_.end(), done);
}

void CollectiveWork::expedite() {
  if (!operations_.empty()) group_->expedite(*operations_.back());
}

std::string CollectiveWork::error() const {
  for (const shm::OperationPtr& operation : operations_) {
    if (operation->status() == shm::Status::kMismatch) {
      return text_of_mismatch(operation->signatures());
    }
    if (operation->status() != shm::Status::kOk) {
      return text_of_failure(*group_, group_->failure());
    }
  }
  return "";
}

std::string CollectiveWork::awaited() const {
  const shm::Members missing =
      operations_.empty() ? shm::Members() : group_->missing(*operations_.back());
  return missing.none() ? "" : "; " + in_words(missing) + " did not call it";
}

void MessageWork::start(shm::MessageRequest request) {
  request.completed = [self = c10::intrusive_ptr<MessageWork>::unsafe_reclaim_from_nonowning(
                           this)] { self->one_completed(); };
  const bool sends = description_.type == c10d::OpType::SEND;
  bytes_ = request.bytes;
  message_ = sends ? messages_->send(std::move(request)) : messages_->receive(std::move(request));
  one_completed();
}

void MessageWork::one_completed() {
  if (--outstanding_ == 0) finalize();
}

int MessageWork::sourceRank() const {
  TORCH_CHECK(
      description_.type != c10d::OpType::SEND, "a message that is sent has no source rank");
  return static_cast<int>(message_->sender());
}

bool MessageWork::await(shm::Nanoseconds timeout) {
  if (group_->is_forked()) throw_backend_error(shm::kForkedError);
  return messages_->wait(*message_, timeout) != shm::Status::kPending;
}

bool MessageWork::poll() {
  return messages_->done(*message_);
}

std::string MessageWork::error() const {
  switch (message_->status()) {
    case shm::Status::kOk:
      return "";
    case shm::Status::kMismatch:
      return "rank " + std::to_string(message_->sender()) + " sent " +
             std::to_string(message_->sent_bytes()) + " bytes, and the tensor to receive has " +
             std::to_string(bytes_);
    case shm::Status::kNoMemory:
      return "no shared memory can be reserved for messages";
    default:
      return text_of_failure(*group_, message_->failure());
  }
}

std::string MessageWork::awaited() const {
  const size_t peer = message_->peer();
  if (peer == shm::MessageRequest::kAnyMember) return "; no rank has sent it";
  return "; the peer is rank " + std::to_string(peer);
}

}  // namespace fddp
