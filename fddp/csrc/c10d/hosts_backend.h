// The backend "fddp" of torch.distributed over several hosts with equal numbers of ranks.
//
// A collective is a task of one thread, which executes them in the order in which they were issued.
// Those that have no form of their own here, and messages, go to gloo over all ranks.

#pragma once

#include "c10d/hosts_collectives.h"
#include "c10d/hosts_queue.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace fddp {

class HostsRuntime;

class HostsBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  // The keys in `store` must be those of this group alone.
  HostsBackend(
      HostLevels levels, const c10::intrusive_ptr<c10d::Store>& store,
      std::chrono::milliseconds timeout);
  ~HostsBackend() override;

  const std::string getBackendName() const override {
    return "fddp";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  bool supportsTensorAlloc(c10::DeviceIndex) override {
    return true;
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  uint64_t getSequenceNumberForGroup() override {
    return sequence_;
  }
  void setSequenceNumberForGroup() override {}
  bool supportsSplitting() const override {
    return true;
  }
  // Create a backend of some ranks, over gloo.
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override;
  void abort() override {
    close();
  }
  void shutdown() override {
    close();
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(
      TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(
      TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr gather(
      TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(
      Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(
      Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(
      Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  // Description of a collective for its work.
  struct Call {
    c10d::OpType type;
    const char* title;
    const Tensors& inputs;
    TensorLists outputs;
    std::chrono::milliseconds timeout;
  };
  using Body = std::function<void(const HostsCollective&)>;
  using Start = std::function<WorkPtr(c10d::Backend&)>;

  WorkPtr submit(const Call& call, Body body);
  WorkPtr submit_exchange(const Call& call, const Tensors& inputs, const Tensors& outputs);
  // Submit an operation of gloo over all ranks.
  WorkPtr pass(const Call& call, Start start);
  void check_root(int64_t root) const;
  // Check the sizes of an operation whose `whole` has a part for each rank.
  void check_parts(const at::Tensor& whole, const at::Tensor& part) const;
  void close();

  std::shared_ptr<HostsRuntime> runtime_;
  std::atomic<uint64_t> sequence_ = 0;
  const int pid_;
};

}  // namespace fddp
