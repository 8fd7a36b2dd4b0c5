// Collectives over several hosts: shared memory within each host, gloo between them.
//
// All hosts have the same number of ranks, which follow each other: rank = host * locals + local.
// Between hosts, ranks of equal `local` communicate, so that each of them sends its part alone.

#pragma once

#include "c10d/shm_backend.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace fddp {

struct HostLevels {
  c10::intrusive_ptr<ShmBackend> within;     // ranks of this host
  std::shared_ptr<shm::ShmGroup> group;      // the same ranks
  c10::intrusive_ptr<c10d::Backend> across;  // gloo, ranks of equal number on their hosts
  c10::intrusive_ptr<c10d::Backend> whole;   // gloo, all ranks

  int local() const {
    return within->getRank();
  }
  int locals() const {
    return within->getSize();
  }
  int host() const {
    return whole->getRank() / locals();
  }
  int hosts() const {
    return whole->getSize() / locals();
  }
};

// kReports: another rank has reported the end of the group.
enum class Level { kWithin, kAcross, kWhole, kReports };

// Failure of the communication on one level, after which the group cannot be used.
class LevelError : public std::runtime_error {
 public:
  LevelError(Level level, const std::string& text) : std::runtime_error(text), level(level) {}

  const Level level;
};

// One collective of a group. Its methods block.
class HostsCollective {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // `timeout` is that of the operation; unset: that of the group. `interrupted` returns true if
  // another rank has reported the end of the group.
  HostsCollective(
      const HostLevels& levels, std::chrono::milliseconds timeout,
      std::function<bool()> interrupted)
      : levels_(levels), timeout_(timeout), interrupted_(std::move(interrupted)) {}

  void all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op) const;
  void reduce(const at::Tensor& tensor, const c10d::ReduceOp& op, int root) const;
  void broadcast(const at::Tensor& tensor, int root) const;
  // `outputs` are tensors by rank, whose sizes may differ.
  void all_gather(const Tensors& outputs, const at::Tensor& input) const;
  void all_gather_into(const at::Tensor& output, const at::Tensor& input) const;
  void reduce_scatter(
      const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op) const;
  // Send `inputs` to the ranks and receive `outputs` from them. Undefined tensors stand for nothing
  // to send or to receive.
  void exchange(const Tensors& inputs, const Tensors& outputs) const;
  void barrier() const;
  // Start and finish an operation of gloo over all ranks; null: it is finished already.
  void finish_whole(const std::function<WorkPtr(c10d::Backend&)>& start) const {
    const WorkPtr work = start(*levels_.whole);
    if (work != nullptr) finish(work, Level::kWhole);
  }

 private:
  void reduce_whole(const at::Tensor& dense, const c10d::ReduceOp& op) const;
  void reduce_pieces(const at::Tensor& flat, const c10d::ReduceOp& op) const;
  WorkPtr start_across(const at::Tensor& dense, const c10d::ReduceOp& op) const;
  at::Tensor gathered_across(const at::Tensor& input) const;
  bool is_near(size_t rank) const {
    return static_cast<int>(rank) / levels_.locals() == levels_.host();
  }
  // At most one operation between hosts may be pending at a time: gloo closes the connections of a
  // group only after its operations, and others wait for them to be closed after a failure.
  void finish(const WorkPtr& work, Level level) const;
  void finish_within(const WorkPtr& work) const;

  const HostLevels& levels_;
  const std::chrono::milliseconds timeout_;
  const std::function<bool()> interrupted_;
};

// Check that numbers of this dtype can be reduced by the operation.
void check_reduction(const at::Tensor& tensor, const c10d::ReduceOp& op);

}  // namespace fddp
