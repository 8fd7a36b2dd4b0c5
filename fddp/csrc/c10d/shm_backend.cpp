#include "c10d/shm_backend.h"

#include "c10d/open_groups.h"
#include "c10d/shm_errors.h"
#include "shm_ownership.h"
#include "shm_tensor.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace fddp {

using c10d::OpType;

void check_same_number(size_t outputs, size_t inputs) {
  TORCH_CHECK(
      outputs == inputs, "expected as many outputs as inputs, got ", outputs, " and ", inputs);
}

const at::Tensor& only_one(const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK(tensors.size() == 1, "expected one tensor, got ", tensors.size());
  return tensors[0];
}

const std::vector<at::Tensor>& only_list(
    const std::vector<std::vector<at::Tensor>>& lists, size_t size) {
  TORCH_CHECK(lists.size() == 1, "expected one list of tensors, got ", lists.size());
  TORCH_CHECK(
      lists[0].size() == size, "expected a list of one tensor for each of the ", size,
      " ranks, got ", lists[0].size());
  return lists[0];
}

ShmBackend::ShmBackend(
    std::shared_ptr<shm::ShmGroup> group, int rank, int size, std::chrono::milliseconds timeout)
    : Backend(rank, size),
      group_(std::move(group)),
      messages_(group_ == nullptr ? nullptr : owned(new shm::Messages(group_))),
      options_(c10::make_intrusive<Options>("fddp", timeout)) {
  init();
  if (group_ != nullptr) remember_open_group(group_, messages_);
}

ShmBackend::~ShmBackend() {
  close(/*drains=*/true);
}

void ShmBackend::close(bool drains) {
  if (group_ == nullptr) return;
  without_gil([&] {
    if (drains) group_->drain();
    messages_->close();
    group_->leave();
  });
}

void ShmBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  if (group_ != nullptr) group_->set_timeout(timeout);
}

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  const bool on_cpu = !options.has_device() || options.device().is_cpu();
  if (group_ != nullptr && on_cpu) {
    auto shared = shm::empty_in_arena(group_->options().arena, size, dtype);
    if (shared) return *shared;
  }
  return at::empty({size}, options);
}

c10::intrusive_ptr<c10d::Backend> ShmBackend::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& options) {
  // torch may give groups of the same ranks the same part of the store, one after the other.
  c10d::PrefixStore numbered("fddp/" + std::to_string(parts_[ranks]++), store);
  return split_in_new_store(numbered, ranks, options ? options->timeout : options_->timeout);
}

c10::intrusive_ptr<c10d::Backend> ShmBackend::split_in_new_store(
    c10d::Store& store, const std::vector<int>& ranks, std::chrono::milliseconds timeout) {
  const auto own = std::find(ranks.begin(), ranks.end(), rank_);
  if (own == ranks.end()) return nullptr;
  for (const int rank : ranks) check_root(rank);
  std::shared_ptr<shm::ShmGroup> part;
  if (ranks.size() > 1) {
    without_gil([&] { part = join_part(store, {ranks.begin(), ranks.end()}); });
    part->set_timeout(timeout);
  }
  return c10::make_intrusive<ShmBackend>(
      std::move(part), static_cast<int>(own - ranks.begin()), static_cast<int>(ranks.size()),
      timeout);
}

// The first member makes the control block. All ranks meet twice, so that none uses the group
// unless all have joined it. The last rank deletes the keys: a default group that is made later
// counts its groups from zero again.
std::shared_ptr<shm::ShmGroup> ShmBackend::join_part(
    c10d::Store& store, const std::vector<size_t>& members) {
  const std::string prefix = "part/";
  const bool is_first = members[0] == static_cast<size_t>(rank_);
  const auto publish = [&](const std::string& key, std::string text) {
    store.set(key, std::vector<uint8_t>(text.begin(), text.end()));
  };
  const auto read = [&](const std::string& key) {
    const std::vector<uint8_t> text = store.get(key);
    return std::string(text.begin(), text.end());
  };
  if (is_first) {
    const auto made = shm::ShmGroup::make_control_block(*group_->options().arena, members.size());
    publish(prefix + "control_block", made ? std::to_string(*made) : "");
  }
  const std::string offset = read(prefix + "control_block");
  std::shared_ptr<shm::ShmGroup> part;
  std::string problem = "no shared memory can be reserved";
  if (!offset.empty()) {
    try {
      part = owned(new shm::ShmGroup(group_->options_of_part(members, std::stoull(offset))));
      problem = "";
    } catch (const std::exception& error) {
      problem = error.what();
    }
  }
  publish(prefix + std::to_string(rank_), problem);
  for (const size_t member : members) {
    const std::string found = read(prefix + std::to_string(member));
    if (!found.empty()) {
      throw_backend_error("rank " + std::to_string(member) + " could not join the group: " + found);
    }
  }
  if (store.add(prefix + "met", 1) == static_cast<int64_t>(members.size())) {
    for (const size_t member : members) store.deleteKey(prefix + std::to_string(member));
    for (const char* const key : {"control_block", "met"}) store.deleteKey(prefix + key);
  }
  return part;
}

ShmBackend::Collective ShmBackend::make_work(
    OpType type, const char* title, const Tensors& inputs, TensorLists outputs,
    std::chrono::milliseconds timeout) {
  const WorkDescription description = {type, title, rank_, sequence_++, timeout};
  return c10::make_intrusive<CollectiveWork>(group_, description, inputs, std::move(outputs));
}

void ShmBackend::start(CollectiveWork& work, shm::Request request) {
  work.start(std::move(request));
  const std::lock_guard lock(last_mutex_);
  last_ = work.last();
}

void ShmBackend::check_root(int64_t root) const {
  TORCH_CHECK(root >= 0 && root < size_, "rank ", root, " is not in the group of ", size_);
}

// One tensor for each rank, of which only the root's is defined.
ShmBackend::Tensors ShmBackend::only_for(int64_t root, const at::Tensor& tensor) const {
  check_root(root);
  Tensors list(size());
  list[static_cast<size_t>(root)] = tensor;
  return list;
}

// The list that only the root of a gather or scatter passes.
ShmBackend::Tensors ShmBackend::of_root(
    int64_t root, const TensorLists& lists, const char* problem) const {
  if (rank_ == root) return only_list(lists, size());
  TORCH_CHECK(lists.empty() || lists[0].empty(), problem);
  return Tensors(size());
}

// Make a work and start its operations by `body(work, waits)`, where `waits`: the caller waits next.
template <class CallOptions, class Body>
ShmBackend::WorkPtr ShmBackend::run(
    OpType type, const char* title, const Tensors& inputs, TensorLists outputs,
    const CallOptions& options, const Body& body) {
  std::vector<TensorRange> ranges = ranges_of(outputs, inputs);
  const auto work = make_work(type, title, inputs, std::move(outputs), options.timeout);
  in_flight_.await_conflicting(ranges);
  body(*work, !options.asyncOp);
  if (group_ != nullptr) in_flight_.add(std::move(ranges), work);
  work->all_started();
  return work;
}

ShmBackend::WorkPtr ShmBackend::broadcast(
    Tensors& tensors, const c10d::BroadcastOptions& options) {
  check_root(options.rootRank);
  return run(
      OpType::BROADCAST, "fddp:broadcast", tensors, {tensors}, options,
      [&](CollectiveWork& work, bool waits) {
        start_broadcast(work, only_one(tensors), options.rootRank, waits);
      });
}

ShmBackend::WorkPtr ShmBackend::allreduce(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (only_one(tensors).is_sparse()) return allreduce_sparse(tensors, options);
  return run(
      OpType::ALLREDUCE, "fddp:all_reduce", tensors, {tensors}, options,
      [&](CollectiveWork& work, bool waits) {
        start_all_reduce(work, tensors[0], options.reduceOp, waits);
      });
}

ShmBackend::WorkPtr ShmBackend::allreduce_sparse(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  return run(
      OpType::_ALLREDUCE_SPARSE, "fddp:all_reduce", tensors, {tensors}, options,
      [&](CollectiveWork& work, bool waits) {
        start_sparse_all_reduce(work, only_one(tensors), options.reduceOp, waits);
      });
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return run(
      OpType::ALLREDUCE_COALESCED, "fddp:all_reduce", tensors, {tensors}, options,
      [&](CollectiveWork& work, bool waits) {
        const bool share = items_conflict({tensors}, {});
        for (const at::Tensor& tensor : tensors) {
          const at::Tensor own = share ? tensor.clone(at::MemoryFormat::Contiguous) : tensor;
          if (share) work.after_success([tensor, own] { tensor.copy_(own); });
          start_all_reduce(work, own, options.reduceOp, waits);
        }
      });
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  check_root(options.rootRank);
  return run(
      OpType::REDUCE, "fddp:reduce", tensors, {tensors}, options,
      [&](CollectiveWork& work, bool waits) {
        start_reduce(work, only_one(tensors), options.reduceOp, options.rootRank, waits);
      });
}

ShmBackend::WorkPtr ShmBackend::allgather(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const Tensors& list = only_list(outputs, size());
  const at::Tensor& input = only_one(inputs);
  return run(
      OpType::ALLGATHER, "fddp:all_gather", inputs, outputs, options,
      [&](CollectiveWork& work, bool waits) {
        start_exchange(work, Tensors(size(), input), list, 0, waits);
      });
}

ShmBackend::WorkPtr ShmBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return run(
      OpType::_ALLGATHER_BASE, "fddp:_all_gather_base", {input}, {{output}}, options,
      [&](CollectiveWork& work, bool waits) { start_all_gather(work, output, input, waits); });
}

ShmBackend::WorkPtr ShmBackend::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  TORCH_CHECK(
      outputs.size() == size(), "expected one list of outputs for each of the ", size(),
      " ranks, got ", outputs.size());
  for (const Tensors& list : outputs) check_same_number(list.size(), inputs.size());
  return run(
      OpType::ALLGATHER_COALESCED, "fddp:all_gather", inputs, outputs, options,
      [&](CollectiveWork& work, bool waits) {
        const Tensors sources = read_first(inputs, outputs);
        for (size_t i = 0; i < inputs.size(); ++i) {
          Tensors of_ranks;
          for (const Tensors& list : outputs) of_ranks.push_back(list[i]);
          start_exchange(work, Tensors(size(), sources[i]), of_ranks, 0, waits);
        }
      });
}

ShmBackend::WorkPtr ShmBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  check_same_number(outputs.size(), inputs.size());
  return run(
      OpType::COALESCED, "fddp:_all_gather_base", inputs, {outputs}, options,
      [&](CollectiveWork& work, bool waits) {
        const Tensors sources = read_first(inputs, {outputs});
        for (size_t i = 0; i < inputs.size(); ++i) {
          start_all_gather(work, outputs[i], sources[i], waits);
        }
      });
}

ShmBackend::WorkPtr ShmBackend::gather(
    TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const Tensors sent = only_for(options.rootRank, only_one(inputs));
  const Tensors received = of_root(options.rootRank, outputs, "only the root of a gather has outputs");
  return run(
      OpType::GATHER, "fddp:gather", inputs, outputs, options,
      [&](CollectiveWork& work, bool waits) {
        start_exchange(work, sent, received, options.rootRank, waits);
      });
}

ShmBackend::WorkPtr ShmBackend::scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  const Tensors received = only_for(options.rootRank, only_one(outputs));
  const Tensors sent = of_root(options.rootRank, inputs, "only the root of a scatter has inputs");
  return run(
      OpType::SCATTER, "fddp:scatter", inputs.empty() ? Tensors() : inputs[0], {outputs}, options,
      [&](CollectiveWork& work, bool waits) {
        start_exchange(work, sent, received, options.rootRank, waits);
      });
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  const Tensors& list = only_list(inputs, size());
  const at::Tensor& output = only_one(outputs);
  const bool even = std::all_of(list.begin(), list.end(), [&](const at::Tensor& tensor) {
    return tensor.numel() == list[0].numel();
  });
  const auto start_even = [&](CollectiveWork& work, bool waits) {
    Tensors flat;
    for (const at::Tensor& tensor : list) flat.push_back(tensor.reshape(-1));
    start_reduce_scatter(work, output, at::cat(flat), options.reduceOp, waits);
  };
  const auto start_uneven = [&](CollectiveWork& work, bool waits) {
    for (int root = 0; root < size_; ++root) {
      const at::Tensor copy = list[static_cast<size_t>(root)].clone(at::MemoryFormat::Contiguous);
      start_reduce(work, copy, options.reduceOp, root, waits);
      if (root == rank_) work.after_success([=] { output.copy_(copy.view(output.sizes())); });
    }
  };
  return run(
      OpType::REDUCE_SCATTER, "fddp:reduce_scatter", list, {outputs}, options,
      [&](CollectiveWork& work, bool waits) {
        even ? start_even(work, waits) : start_uneven(work, waits);
      });
}

ShmBackend::WorkPtr ShmBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return run(
      OpType::_REDUCE_SCATTER_BASE, "fddp:_reduce_scatter_base", {input}, {{output}}, options,
      [&](CollectiveWork& work, bool waits) {
        start_reduce_scatter(work, output, input, options.reduceOp, waits);
      });
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  check_same_number(outputs.size(), inputs.size());
  return run(
      OpType::COALESCED, "fddp:_reduce_scatter_base", inputs, {outputs}, options,
      [&](CollectiveWork& work, bool waits) {
        const Tensors sources = read_first(inputs, {outputs});
        for (size_t i = 0; i < inputs.size(); ++i) {
          start_reduce_scatter(work, outputs[i], sources[i], options.reduceOp, waits);
        }
      });
}

ShmBackend::WorkPtr ShmBackend::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  return run(
      OpType::ALLTOALL_BASE, "fddp:all_to_all", {input}, {{output}}, options,
      [&](CollectiveWork& work, bool waits) {
        start_all_to_all(work, {output, output_splits}, {input, input_splits}, waits);
      });
}

ShmBackend::WorkPtr ShmBackend::alltoall(
    Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  TORCH_CHECK(
      inputs.size() == size() && outputs.size() == size(),
      "expected one input and one output for each of the ", size(), " ranks, got ", inputs.size(),
      " and ", outputs.size());
  return run(
      OpType::ALLTOALL, "fddp:all_to_all", inputs, {outputs}, options,
      [&](CollectiveWork& work, bool waits) { start_exchange(work, inputs, outputs, 0, waits); });
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return run(
      OpType::BARRIER, "fddp:barrier", {}, {}, options, [&](CollectiveWork& work, bool waits) {
        if (group_ == nullptr) return;
        {
          const std::lock_guard lock(last_mutex_);
          work.wait_for_earlier(last_);
        }
        const at::Tensor words = at::zeros({size_}, at::kByte);
        start_all_gather(work, words, words[rank_], waits);
      });
}

// Rank 0 waits for a message of each rank and answers all. The texts are those of gloo, which
// programs look for.
void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  if (group_ == nullptr) return;
  // Another tag for each call: a rank that was late for one must not pass the next.
  const int32_t tag = std::numeric_limits<int32_t>::min() + static_cast<int32_t>(monitored_++ % (1 << 30));
  const auto limit =
      options.timeout == c10d::kUnsetTimeout ? options_->timeout : options.timeout;
  const auto until = shm::Clock::now() + limit;
  const auto word = std::make_shared<char>(0);  // a message may outlive the call
  std::vector<shm::MessagePtr> received(static_cast<size_t>(size_));
  const auto receive_from = [&](size_t rank) {
    received[rank] = messages_->receive({rank, tag, word.get(), 1, word, nullptr});
  };
  const auto has_arrived = [&](size_t rank) {
    const auto left = std::max<shm::Nanoseconds>(until - shm::Clock::now(), shm::Nanoseconds(0));
    if (messages_->wait(*received[rank], left) == shm::Status::kOk) return true;
    messages_->cancel(*received[rank]);
    return false;
  };
  const auto send_to = [&](size_t rank) {
    messages_->wait(*messages_->send({rank, tag, word.get(), 1, word, nullptr}), limit);
  };
  if (rank_ != 0) {
    send_to(0);
    receive_from(0);
    if (has_arrived(0)) return;
    throw_backend_error(
        "Rank " + std::to_string(rank_) +
        " successfully reached monitoredBarrier, but received errors while waiting for send/recv "
        "from rank 0. Please check rank 0 logs for faulty rank.");
  }
  for (size_t rank = 1; rank < received.size(); ++rank) receive_from(rank);
  std::string absent;
  for (size_t rank = 1; rank < received.size(); ++rank) {
    const bool enough = !absent.empty() && !wait_all_ranks;
    if (absent.empty() && shm::Clock::now() >= until) {
      for (size_t other = rank; other < received.size(); ++other) {
        messages_->cancel(*received[other]);
      }
      throw_backend_error(
          "Rank 0 timed out in monitoredBarrier after " + std::to_string(limit.count()) + " ms");
    }
    if (enough) {
      messages_->cancel(*received[rank]);
    } else if (!has_arrived(rank)) {
      absent += (absent.empty() ? "" : ", ") + std::to_string(rank);
    }
  }
  if (!absent.empty()) {
    throw_backend_error(
        std::string(wait_all_ranks ? "Ranks " : "Rank ") + absent +
        " failed to pass monitoredBarrier in " + std::to_string(limit.count()) + " ms");
  }
  for (size_t rank = 1; rank < received.size(); ++rank) send_to(rank);
}

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int destination, int tag) {
  check_root(destination);
  return message(
      OpType::SEND, "fddp:send", tensors, static_cast<size_t>(destination), tag);
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int source, int tag) {
  check_root(source);
  return message(OpType::RECV, "fddp:recv", tensors, static_cast<size_t>(source), tag);
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return message(
      OpType::RECVANYSOURCE, "fddp:recvAnySource", tensors, shm::MessageRequest::kAnyMember, tag);
}

ShmBackend::WorkPtr ShmBackend::message(
    OpType type, const char* title, Tensors& tensors, size_t peer, int tag) {
  const at::Tensor& tensor = only_one(tensors);
  TORCH_CHECK(group_ != nullptr, "a group of one rank has no other rank to send to or receive from");
  const bool sends = type == OpType::SEND;
  const WorkDescription description = {
      type, title, rank_, sequence_++, c10d::kUnsetTimeout};
  const auto work = c10::make_intrusive<MessageWork>(
      group_, messages_, description, sends ? tensors : Tensors(),
      sends ? TensorLists() : TensorLists{tensors});
  const at::Tensor dense =
      sends ? readable(*work, tensor) : writable(*work, tensor, /*with_values=*/false);
  shm::MessageRequest request = {
      peer, tag, static_cast<char*>(dense.data_ptr()), dense.nbytes(), nullptr, nullptr};
  work->start(std::move(request));
  return work;
}

}  // namespace fddp
