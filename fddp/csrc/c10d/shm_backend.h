// The backend "fddp" of torch.distributed: collectives and messages over a shared-memory group.

#pragma once

#include "c10d/calls_in_flight.h"
#include "c10d/shm_work.h"
#include "shm/messages.h"
#include "shm/shm_group.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fddp {

class ShmBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  // `group` is null for a group of one rank.
  ShmBackend(
      std::shared_ptr<shm::ShmGroup> group, int rank, int size, std::chrono::milliseconds timeout);
  ~ShmBackend() override;

  const std::string getBackendName() const override {
    return "fddp";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options_;
  }
  // Tensors in shared memory, which are reduced in place. DDP allocates its buckets here.
  bool supportsTensorAlloc(c10::DeviceIndex) override {
    return group_ != nullptr;
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  // Number of operations whose data has passed through this rank's staging buffer.
  uint64_t staged_operations() const {
    return group_ == nullptr ? 0 : group_->staged_operations();
  }
  // The group, null for one rank.
  const std::shared_ptr<shm::ShmGroup>& group() const {
    return group_;
  }
  void setTimeout(std::chrono::milliseconds timeout) override;
  uint64_t getSequenceNumberForGroup() override {
    return sequence_;
  }
  void setSequenceNumberForGroup() override {}
  bool supportsSplitting() const override {
    return true;
  }
  // Create a backend of some ranks of this one, in their new order, that uses the same memory; a
  // call of these ranks, which meet in `store`. Returns null on other ranks.
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override;
  // As `split`, in a part of the store that no other call has used.
  c10::intrusive_ptr<c10d::Backend> split_in_new_store(
      c10d::Store& store, const std::vector<int>& ranks, std::chrono::milliseconds timeout);
  // Leave the group at once.
  void abort() override {
    close(/*drains=*/false);
  }
  // Leave the group. Operations that all ranks have called complete on all of them.
  void shutdown() override {
    close(/*drains=*/true);
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
  using Collective = c10::intrusive_ptr<CollectiveWork>;

  // shm_backend.cpp
  Collective make_work(
      c10d::OpType type, const char* title, const Tensors& inputs, TensorLists outputs,
      std::chrono::milliseconds timeout);
  void start(CollectiveWork& work, shm::Request request);
  template <class CallOptions, class Body>
  WorkPtr run(
      c10d::OpType type, const char* title, const Tensors& inputs, TensorLists outputs,
      const CallOptions& options, const Body& body);
  Tensors only_for(int64_t root, const at::Tensor& tensor) const;
  Tensors of_root(int64_t root, const TensorLists& lists, const char* problem) const;
  std::shared_ptr<shm::ShmGroup> join_part(
      c10d::Store& store, const std::vector<size_t>& members);
  WorkPtr message(
      c10d::OpType type, const char* title, Tensors& tensors, size_t peer, int tag);
  void check_root(int64_t root) const;
  void close(bool drains);
  size_t size() const {
    return static_cast<size_t>(size_);
  }

  // shm_collectives.cpp. Each starts one operation of a work. `waits`: the caller waits next.
  void start_all_reduce(
      CollectiveWork& work, const at::Tensor& tensor, const c10d::ReduceOp& op, bool waits);
  void start_reduce(
      CollectiveWork& work, const at::Tensor& tensor, const c10d::ReduceOp& op, int64_t root,
      bool waits);
  void start_broadcast(CollectiveWork& work, const at::Tensor& tensor, int64_t root, bool waits);
  void start_all_gather(
      CollectiveWork& work, const at::Tensor& output, const at::Tensor& input, bool waits);
  void start_reduce_scatter(
      CollectiveWork& work, const at::Tensor& output, const at::Tensor& input,
      const c10d::ReduceOp& op, bool waits);
  // A tensor and the sizes of its parts along the first dimension; see part_sizes.
  struct Divided {
    const at::Tensor& tensor;
    const std::vector<int64_t>& sizes;
  };
  void start_all_to_all(
      CollectiveWork& work, const Divided& output, const Divided& input, bool waits);
  void start_exchange(
      CollectiveWork& work, const Tensors& inputs, const Tensors& outputs, int64_t root,
      bool waits);
  void start_exchange_of(
      CollectiveWork& work, std::shared_ptr<shm::ExchangeBuffers> buffers, at::ScalarType dtype,
      int64_t root, bool waits);

  // shm_sparse.cpp
  void start_sparse_all_reduce(
      CollectiveWork& work, const at::Tensor& tensor, const c10d::ReduceOp& op, bool waits);
  void start_gather_of_any_sizes(
      CollectiveWork& work, const at::Tensor& tensor, std::shared_ptr<Tensors> received,
      bool waits);

  const std::shared_ptr<shm::ShmGroup> group_;
  const std::shared_ptr<shm::Messages> messages_;
  const c10::intrusive_ptr<Options> options_;
  std::atomic<uint64_t> sequence_ = 0;
  std::map<std::vector<int>, uint64_t> parts_;  // number of `split` calls of these ranks so far
  std::atomic<uint64_t> monitored_ = 0;  // number of monitored barriers so far
  std::mutex last_mutex_;
  shm::OperationPtr last_;  // started last; a barrier waits for it
  CallsInFlight in_flight_;
};

// Checks of arguments, which throw c10::Error.
void check_same_number(size_t outputs, size_t inputs);
const at::Tensor& only_one(const std::vector<at::Tensor>& tensors);
const std::vector<at::Tensor>& only_list(
    const std::vector<std::vector<at::Tensor>>& lists, size_t size);

}  // namespace fddp
