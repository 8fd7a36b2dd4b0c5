#include "c10d/hosts_backend.h"

#include "c10d/hosts_runtime.h"
#include "c10d/shm_errors.h"
#include "shm_ownership.h"

#include <ATen/ops/cat.h>
#include <c10/util/Exception.h>

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace fddp {
namespace {

using c10d::OpType;

void check_dense_on_cpu(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_cpu(), "expected a tensor on the CPU, got one on ", tensor.device());
  TORCH_CHECK(tensor.layout() == at::kStrided, "expected a dense tensor, got a ", tensor.layout());
}

void check_reducible(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  check_dense_on_cpu(tensor);
  check_reduction(tensor, op);
}

// Check what a rank sends to others and receives from them; see HostsCollective::exchange.
void check_exchange(
    const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs, int rank) {
  const auto own = static_cast<size_t>(rank);
  const at::Tensor& sent = inputs[own];
  const at::Tensor& received = outputs[own];
  for (const auto* const list : {&inputs, &outputs}) {
    for (const at::Tensor& tensor : *list) {
      if (!tensor.defined()) continue;
      check_dense_on_cpu(tensor);
      const at::Tensor& first = sent.defined() ? sent : received;
      TORCH_CHECK(
          !first.defined() || tensor.scalar_type() == first.scalar_type(),
          "the dtypes of output and input differ: ", first.scalar_type(), " and ",
          tensor.scalar_type());
    }
  }
  const int64_t sent_size = sent.defined() ? sent.numel() : 0;
  const int64_t received_size = received.defined() ? received.numel() : 0;
  TORCH_CHECK(
      sent_size == received_size, "rank ", rank, " sends ", sent_size,
      " elements to itself and receives ", received_size);
}

}  // namespace

HostsBackend::HostsBackend(
    HostLevels levels, const c10::intrusive_ptr<c10d::Store>& store,
    std::chrono::milliseconds timeout)
    : Backend(levels.whole->getRank(), levels.whole->getSize()), pid_(getpid()) {
  init();
  runtime_ = HostsRuntime::start(std::move(levels), store, timeout);
}

HostsBackend::~HostsBackend() {
  if (getpid() != pid_) {
    // A forked process has none of the threads for which destructors wait.
    new std::shared_ptr<HostsRuntime>(std::move(runtime_));
    return;
  }
  without_gil([&] {
    runtime_->close();
    runtime_.reset();
  });
}

void HostsBackend::close() {
  without_gil([&] { runtime_->close(); });
}

c10::intrusive_ptr<c10d::Backend::Options> HostsBackend::getBackendOptions() {
  return runtime_->whole()->getBackendOptions();
}

at::Tensor HostsBackend::allocateTensor(long size, at::TensorOptions options) {
  return runtime_->within().allocateTensor(size, options);
}

void HostsBackend::setTimeout(std::chrono::milliseconds timeout) {
  runtime_->set_timeout(timeout);
}

c10::intrusive_ptr<c10d::Backend> HostsBackend::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& options) {
  return runtime_->whole()->split(store, ranks, options);
}

void HostsBackend::check_root(int64_t root) const {
  TORCH_CHECK(root >= 0 && root < size_, "rank ", root, " is not in the group of ", size_);
}

void HostsBackend::check_parts(const at::Tensor& whole, const at::Tensor& part) const {
  check_dense_on_cpu(whole);
  check_dense_on_cpu(part);
  TORCH_CHECK(
      whole.scalar_type() == part.scalar_type(), "the dtypes of output and input differ: ",
      whole.scalar_type(), " and ", part.scalar_type());
  TORCH_CHECK(
      whole.numel() == part.numel() * size_, "expected ", part.numel() * size_, " elements, ",
      size_, " times as many as those of one rank, got ", whole.numel());
}

HostsBackend::WorkPtr HostsBackend::submit(const Call& call, Body body) {
  if (getpid() != pid_) throw std::invalid_argument(shm::kForkedError);
  QueuedWorkPtr work;
  const bool accepted = runtime_->queue().push([&] {
    const WorkDescription description = {
        call.type, call.title, rank_, sequence_++, call.timeout};
    work = c10::make_intrusive<QueuedWork>(description, call.inputs, call.outputs);
    // The runtime outlives its thread, which runs the task.
    HostsRuntime* const runtime = runtime_.get();
    return QueuedTask{
        work, [runtime, timeout = call.timeout, body = std::move(body)] {
          runtime->communicate(timeout, body);
        }};
  });
  if (!accepted) throw_backend_error("the group was closed on this rank");
  return work;
}

HostsBackend::WorkPtr HostsBackend::pass(const Call& call, Start start) {
  return submit(call, [start = std::move(start)](const HostsCollective& collective) {
    collective.finish_whole(start);
  });
}

HostsBackend::WorkPtr HostsBackend::broadcast(
    Tensors& tensors, const c10d::BroadcastOptions& options) {
  check_root(options.rootRank);
  const at::Tensor tensor = only_one(tensors);
  check_dense_on_cpu(tensor);
  return submit(
      {OpType::BROADCAST, "fddp:broadcast", tensors, {tensors}, options.timeout},
      [=, root = static_cast<int>(options.rootRank)](const HostsCollective& collective) {
        collective.broadcast(tensor, root);
      });
}

HostsBackend::WorkPtr HostsBackend::allreduce(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor tensor = only_one(tensors);
  if (tensor.is_sparse()) return allreduce_sparse(tensors, options);
  check_reducible(tensor, options.reduceOp);
  return submit(
      {OpType::ALLREDUCE, "fddp:all_reduce", tensors, {tensors}, options.timeout},
      [=, op = options.reduceOp](const HostsCollective& collective) {
        collective.all_reduce(tensor, op);
      });
}

HostsBackend::WorkPtr HostsBackend::allreduce_sparse(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  return pass(
      {OpType::_ALLREDUCE_SPARSE, "fddp:all_reduce", tensors, {tensors}, options.timeout},
      [=](c10d::Backend& gloo) mutable { return gloo.allreduce(tensors, options); });
}

HostsBackend::WorkPtr HostsBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  for (const at::Tensor& tensor : tensors) check_reducible(tensor, options.reduceOp);
  return submit(
      {OpType::ALLREDUCE_COALESCED, "fddp:all_reduce", tensors, {tensors}, options.timeout},
      [=, op = options.reduceOp](const HostsCollective& collective) {
        for (const at::Tensor& tensor : tensors) collective.all_reduce(tensor, op);
      });
}

HostsBackend::WorkPtr HostsBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  check_root(options.rootRank);
  const at::Tensor tensor = only_one(tensors);
  check_reducible(tensor, options.reduceOp);
  return submit(
      {OpType::REDUCE, "fddp:reduce", tensors, {tensors}, options.timeout},
      [=, op = options.reduceOp,
       root = static_cast<int>(options.rootRank)](const HostsCollective& collective) {
        collective.reduce(tensor, op, root);
      });
}

HostsBackend::WorkPtr HostsBackend::allgather(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const Tensors list = only_list(outputs, static_cast<size_t>(size_));
  const at::Tensor input = only_one(inputs);
  check_exchange(Tensors(list.size(), input), list, rank_);
  return submit(
      {OpType::ALLGATHER, "fddp:all_gather", inputs, outputs, options.timeout},
      [=](const HostsCollective& collective) { collective.all_gather(list, input); });
}

HostsBackend::WorkPtr HostsBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  check_parts(output, input);
  return submit(
      {OpType::_ALLGATHER_BASE, "fddp:_all_gather_base", {input}, {{output}}, options.timeout},
      [=](const HostsCollective& collective) { collective.all_gather_into(output, input); });
}

HostsBackend::WorkPtr HostsBackend::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  check_same_number(outputs.size(), static_cast<size_t>(size_));
  TensorLists of_inputs(inputs.size());
  for (const Tensors& list : outputs) {
    check_same_number(list.size(), inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) of_inputs[i].push_back(list[i]);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_exchange(Tensors(outputs.size(), inputs[i]), of_inputs[i], rank_);
  }
  return submit(
      {OpType::ALLGATHER_COALESCED, "fddp:all_gather", inputs, outputs, options.timeout},
      [=](const HostsCollective& collective) {
        for (size_t i = 0; i < inputs.size(); ++i) collective.all_gather(of_inputs[i], inputs[i]);
      });
}

HostsBackend::WorkPtr HostsBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  check_same_number(outputs.size(), inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) check_parts(outputs[i], inputs[i]);
  return submit(
      {OpType::COALESCED, "fddp:_all_gather_base", inputs, {outputs}, options.timeout},
      [=](const HostsCollective& collective) {
        for (size_t i = 0; i < inputs.size(); ++i) {
          collective.all_gather_into(outputs[i], inputs[i]);
        }
      });
}

HostsBackend::WorkPtr HostsBackend::submit_exchange(
    const Call& call, const Tensors& inputs, const Tensors& outputs) {
  check_exchange(inputs, outputs, rank_);
  return submit(call, [=](const HostsCollective& collective) {
    collective.exchange(inputs, outputs);
  });
}

HostsBackend::WorkPtr HostsBackend::gather(
    TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  check_root(options.rootRank);
  const auto n = static_cast<size_t>(size_);
  const bool is_root = rank_ == options.rootRank;
  TORCH_CHECK(
      is_root || outputs.empty() || outputs[0].empty(), "only the root of a gather has outputs");
  Tensors sent(n);
  sent[static_cast<size_t>(options.rootRank)] = only_one(inputs);
  return submit_exchange(
      {OpType::GATHER, "fddp:gather", inputs, outputs, options.timeout}, sent,
      is_root ? only_list(outputs, n) : Tensors(n));
}

HostsBackend::WorkPtr HostsBackend::scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  check_root(options.rootRank);
  const auto n = static_cast<size_t>(size_);
  const bool is_root = rank_ == options.rootRank;
  TORCH_CHECK(
      is_root || inputs.empty() || inputs[0].empty(), "only the root of a scatter has inputs");
  Tensors received(n);
  received[static_cast<size_t>(options.rootRank)] = only_one(outputs);
  const Tensors sent = is_root ? only_list(inputs, n) : Tensors(n);
  return submit_exchange(
      {OpType::SCATTER, "fddp:scatter", is_root ? sent : Tensors(), {outputs}, options.timeout},
      sent, received);
}

HostsBackend::WorkPtr HostsBackend::reduce_scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  const Tensors list = only_list(inputs, static_cast<size_t>(size_));
  const at::Tensor output = only_one(outputs);
  for (const at::Tensor& tensor : list) check_reducible(tensor, options.reduceOp);
  const at::Tensor& own = list[static_cast<size_t>(rank_)];
  TORCH_CHECK(
      own.numel() == output.numel() && own.scalar_type() == output.scalar_type(),
      "the output and the input of rank ", rank_, " differ in dtype or size");
  const bool even = std::all_of(list.begin(), list.end(), [&](const at::Tensor& tensor) {
    return tensor.numel() == list[0].numel();
  });
  return submit(
      {OpType::REDUCE_SCATTER, "fddp:reduce_scatter", list, {outputs}, options.timeout},
      [=, op = options.reduceOp, rank = rank_](const HostsCollective& collective) {
        if (even) {
          Tensors flat;
          for (const at::Tensor& tensor : list) flat.push_back(tensor.reshape(-1));
          collective.reduce_scatter(output, at::cat(flat), op);
          return;
        }
        for (size_t root = 0; root < list.size(); ++root) {
          const at::Tensor copy = list[root].clone(at::MemoryFormat::Contiguous);
          collective.reduce(copy, op, static_cast<int>(root));
          if (static_cast<int>(root) == rank) output.copy_(copy.view(output.sizes()));
        }
      });
}

HostsBackend::WorkPtr HostsBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  check_parts(input, output);
  check_reducible(input, options.reduceOp);
  return submit(
      {OpType::_REDUCE_SCATTER_BASE, "fddp:_reduce_scatter_base", {input}, {{output}},
       options.timeout},
      [=, op = options.reduceOp](const HostsCollective& collective) {
        collective.reduce_scatter(output, input, op);
      });
}

HostsBackend::WorkPtr HostsBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  check_same_number(outputs.size(), inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_parts(inputs[i], outputs[i]);
    check_reducible(inputs[i], options.reduceOp);
  }
  return submit(
      {OpType::COALESCED, "fddp:_reduce_scatter_base", inputs, {outputs}, options.timeout},
      [=, op = options.reduceOp](const HostsCollective& collective) {
        for (size_t i = 0; i < inputs.size(); ++i) {
          collective.reduce_scatter(outputs[i], inputs[i], op);
        }
      });
}

HostsBackend::WorkPtr HostsBackend::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  return submit_exchange(
      {OpType::ALLTOALL_BASE, "fddp:all_to_all", {input}, {{output}}, options.timeout},
      input.split_with_sizes(part_sizes(input, input_splits, size_)),
      output.split_with_sizes(part_sizes(output, output_splits, size_)));
}

HostsBackend::WorkPtr HostsBackend::alltoall(
    Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  check_same_number(inputs.size(), static_cast<size_t>(size_));
  check_same_number(outputs.size(), static_cast<size_t>(size_));
  return submit_exchange(
      {OpType::ALLTOALL, "fddp:all_to_all", inputs, {outputs}, options.timeout}, inputs, outputs);
}

HostsBackend::WorkPtr HostsBackend::barrier(const c10d::BarrierOptions& options) {
  return submit(
      {OpType::BARRIER, "fddp:barrier", {}, {}, options.timeout},
      [](const HostsCollective& collective) { collective.barrier(); });
}

void HostsBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  const auto work = pass(
      {OpType::BARRIER, "fddp:barrier", {}, {}, c10d::kUnsetTimeout},
      [=](c10d::Backend& gloo) {
        gloo.monitoredBarrier(options, wait_all_ranks);
        return WorkPtr();
      });
  work->wait();
}

// Messages do not wait for collectives that were issued earlier, as with gloo.
HostsBackend::WorkPtr HostsBackend::send(Tensors& tensors, int destination, int tag) {
  return runtime_->whole()->send(tensors, destination, tag);
}

HostsBackend::WorkPtr HostsBackend::recv(Tensors& tensors, int source, int tag) {
  return runtime_->whole()->recv(tensors, source, tag);
}

HostsBackend::WorkPtr HostsBackend::recvAnysource(Tensors& tensors, int tag) {
  return runtime_->whole()->recvAnysource(tensors, tag);
}

}  // namespace fddp
