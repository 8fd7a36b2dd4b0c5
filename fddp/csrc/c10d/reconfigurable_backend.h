// The backend "fddp" of a group whose ranks may change: torch's interface for it, from torch 2.14 on.

#pragma once

#include "python_entry.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace fddp {

// Forwards its calls to the backend that it has opened last, over shared memory or gloo. Rank and size
// are those of that backend; in torch before 2.14, which never changes ranks, they stay as they were.
class ReconfigurableBackend : public c10d::Backend {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  // `open(uuid, handles, timeout_s, group_timeout_s)` of Python returns a backend of the ranks with
  // these handles, one of which is this rank's `handle`.
  ReconfigurableBackend(
      pybind11::object open, std::string handle, int rank, int size,
      std::chrono::milliseconds timeout);
  ~ReconfigurableBackend() override;

  // End the operations of the backend opened before, and open one for the ranks with these handles,
  // in this order; a call of these ranks, which pass a `uuid` that they have not used. Blocks. After
  // an error of `open` there is none until the next call.
  void reopen(
      int64_t uuid, const std::vector<std::string>& handles, std::chrono::milliseconds timeout);
  const std::string& handle() const {
    return handle_;
  }
  // The backend opened last; null before the first one, after an error and after `abort`.
  BackendPtr opened() const;

#ifdef C10D_BACKEND_HAS_RECONFIGURE
  bool supportsReconfigure() const override {
    return true;
  }
  c10d::ReconfigureHandle get_reconfigure_handle() const override {
    return handle_;
  }
  WorkPtr reconfigure(const c10d::ReconfigureOptions& options) override;
#endif

  const std::string getBackendName() const override {
    return "fddp";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options_;
  }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void abort() override {
    end();
  }
  void shutdown() override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return forward()->allocateTensor(size, std::move(options));
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return forward()->getSequenceNumberForGroup();
  }
  bool supportsSplitting() const override {
    return true;
  }
  BackendPtr split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override {
    return forward()->split(store, ranks, options);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return forward()->broadcast(tensors, options);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return forward()->allreduce(tensors, options);
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return forward()->allreduce_sparse(tensors, options);
  }
  WorkPtr allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return forward()->allreduce_coalesced(tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return forward()->reduce(tensors, options);
  }
  WorkPtr allgather(
      TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return forward()->allgather(outputs, inputs, options);
  }
  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return forward()->_allgather_base(output, input, options);
  }
  WorkPtr allgather_coalesced(
      TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return forward()->allgather_coalesced(outputs, inputs, options);
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return forward()->allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  WorkPtr gather(
      TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return forward()->gather(outputs, inputs, options);
  }
  WorkPtr scatter(
      Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    return forward()->scatter(outputs, inputs, options);
  }
  WorkPtr reduce_scatter(
      Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    return forward()->reduce_scatter(outputs, inputs, options);
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return forward()->_reduce_scatter_base(output, input, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return forward()->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    return forward()->alltoall_base(output, input, output_splits, input_splits, options);
  }
  WorkPtr alltoall(
      Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return forward()->alltoall(outputs, inputs, options);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return forward()->barrier(options);
  }
  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    return forward()->send(tensors, destination, tag);
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    return forward()->recv(tensors, source, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return forward()->recvAnysource(tensors, tag);
  }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override {
    forward()->monitoredBarrier(options, wait_all_ranks);
  }

 private:
  // The backend opened last; DistBackendError if there is none.
  BackendPtr forward() const;
  void check_handles(const std::vector<std::string>& handles) const;
  // End the operations of the backend opened last, and release it.
  void end();

  const SharedObject open_;
  const std::string handle_;
  const c10::intrusive_ptr<Options> options_;
  mutable std::mutex mutex_;
  BackendPtr opened_;  // under the mutex
};

}  // namespace fddp
