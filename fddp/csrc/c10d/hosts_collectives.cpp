#include "c10d/hosts_collectives.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <numeric>
#include <utility>

namespace fddp {
namespace {

using c10d::ReduceOp;

// Up to this size the latency of an operation counts, not its bytes: all ranks send the whole.
constexpr size_t kSmallBytes = size_t{16} << 10;
// Larger tensors are reduced in pieces. While one crosses hosts, the next is reduced within them.
constexpr size_t kPieceBytes = size_t{8} << 20;
// Interval at which a rank that waits for its own host looks for reports of others.
constexpr std::chrono::milliseconds kReportInterval{1000};

// The operation within a host. An average is divided in the end, by the number of all ranks.
ReduceOp op_within(const ReduceOp& op) {
  return op.op_ == ReduceOp::AVG ? ReduceOp(ReduceOp::SUM) : op;
}

// The operation between hosts, on `plain_numbers` of the tensor. The factor of PREMUL_SUM is in
// the numbers already.
ReduceOp op_across(const ReduceOp& op, at::ScalarType dtype) {
  const bool truth = dtype == at::kBool;
  switch (op.op_) {
    case ReduceOp::SUM:
    case ReduceOp::AVG:
    case ReduceOp::PREMUL_SUM:
      return truth ? ReduceOp::MAX : ReduceOp::SUM;
    case ReduceOp::PRODUCT:
      return truth ? ReduceOp::MIN : ReduceOp::PRODUCT;
    default:
      return op;
  }
}

// Return a view of a contiguous tensor with numbers that gloo can reduce.
at::Tensor plain_numbers(const at::Tensor& dense) {
  if (dense.is_complex()) return at::view_as_real(dense);
  return dense.scalar_type() == at::kBool ? dense.view(at::kByte) : dense;
}

void divide_average_(const at::Tensor& tensor, const ReduceOp& op, int size) {
  if (op.op_ == ReduceOp::AVG) tensor.div_(size);
}

bool is_usual(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// Return the tensor, or a contiguous copy.
at::Tensor usual(const at::Tensor& tensor) {
  return is_usual(tensor) ? tensor
                          : tensor.clone(at::MemoryFormat::Contiguous).resolve_conj().resolve_neg();
}

void copy_back(const at::Tensor& tensor, const at::Tensor& dense) {
  if (!dense.is_same(tensor)) tensor.copy_(dense);
}

// Combine the rows in their order. Half precision is summed in float32.
at::Tensor combined(const at::Tensor& rows, const ReduceOp& op) {
  const bool half = rows.scalar_type() == at::kHalf || rows.scalar_type() == at::kBFloat16;
  const at::Tensor wide = half ? rows.to(at::kFloat) : rows;
  at::Tensor result = wide[0].clone();
  for (int64_t row = 1; row < wide.size(0); ++row) {
    switch (op.op_) {
      case ReduceOp::SUM:
        result.add_(wide[row]);
        break;
      case ReduceOp::PRODUCT:
        result.mul_(wide[row]);
        break;
      case ReduceOp::MIN:
        at::minimum_out(result, result, wide[row]);
        break;
      case ReduceOp::MAX:
        at::maximum_out(result, result, wide[row]);
        break;
      case ReduceOp::BAND:
        result.bitwise_and_(wide[row]);
        break;
      case ReduceOp::BOR:
        result.bitwise_or_(wide[row]);
        break;
      default:
        result.bitwise_xor_(wide[row]);
    }
  }
  return result;
}

std::string text_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
}

template <class Options>
Options with_timeout(std::chrono::milliseconds timeout) {
  Options options;
  options.timeout = timeout;
  return options;
}

}  // namespace

void check_reduction(const at::Tensor& tensor, const ReduceOp& op) {
  const bool sums =
      op.op_ == ReduceOp::SUM || op.op_ == ReduceOp::AVG || op.op_ == ReduceOp::PREMUL_SUM;
  TORCH_CHECK(
      op.op_ != ReduceOp::AVG || tensor.is_floating_point() || tensor.is_complex(),
      "cannot average dtype ", tensor.scalar_type());
  TORCH_CHECK(
      sums || !tensor.is_complex(), "complex numbers can only be summed and averaged");
  TORCH_CHECK(
      !tensor.is_floating_point() ||
          (op.op_ != ReduceOp::BAND && op.op_ != ReduceOp::BOR && op.op_ != ReduceOp::BXOR),
      "cannot reduce dtype ", tensor.scalar_type(), " by ReduceOp ", static_cast<int>(op.op_));
}

void HostsCollective::all_reduce(const at::Tensor& tensor, const ReduceOp& op) const {
  const at::Tensor dense = usual(tensor);
  if (dense.nbytes() <= kSmallBytes) {
    reduce_whole(dense, op);
  } else {
    const at::Tensor flat = dense.view(-1);
    const int64_t divisible = flat.numel() / levels_.locals() * levels_.locals();
    reduce_pieces(flat.narrow(0, 0, divisible), op);
    const int64_t rest = flat.numel() - divisible;
    if (rest != 0) reduce_whole(flat.narrow(0, divisible, rest), op);
  }
  copy_back(tensor, dense);
}

void HostsCollective::reduce_whole(const at::Tensor& dense, const ReduceOp& op) const {
  Tensors tensors = {dense};
  auto options = with_timeout<c10d::AllreduceOptions>(timeout_);
  options.reduceOp = op_within(op);
  options.asyncOp = false;
  finish_within(levels_.within->allreduce(tensors, options));
  if (dense.numel() == 0) return;
  // An all-reduce of gloo takes two rounds, an all-gather one.
  const at::Tensor rows = gathered_across(plain_numbers(dense));
  plain_numbers(dense).view(-1).copy_(combined(rows, op_across(op, dense.scalar_type())));
  divide_average_(dense, op, levels_.whole->getSize());
}

// The order of operations within the host is the same on all ranks, whatever is late between hosts.
void HostsCollective::reduce_pieces(const at::Tensor& flat, const ReduceOp& op) const {
  const int64_t locals = levels_.locals();
  const auto bytes = static_cast<int64_t>(kPieceBytes / flat.element_size());
  const Tensors pieces = flat.split(std::max<int64_t>(bytes / locals * locals, locals));
  auto options = with_timeout<c10d::ReduceScatterOptions>(timeout_);
  options.reduceOp = op_within(op);
  const auto chunk_of = [&](size_t i) {
    const int64_t size = pieces[i].numel() / locals;
    return pieces[i].narrow(0, size * levels_.local(), size);
  };
  const auto start_scatter = [&](size_t i) {
    at::Tensor chunk = chunk_of(i);
    at::Tensor piece = pieces[i];
    return levels_.within->_reduce_scatter_base(chunk, piece, options);
  };
  std::vector<WorkPtr> gathers;
  WorkPtr scatter = start_scatter(0);
  for (size_t i = 0; i < pieces.size(); ++i) {
    finish_within(scatter);
    at::Tensor chunk = chunk_of(i);
    const WorkPtr crossing = start_across(chunk, op);
    if (i + 1 < pieces.size()) scatter = start_scatter(i + 1);
    finish(crossing, Level::kAcross);
    divide_average_(chunk, op, levels_.whole->getSize());
    at::Tensor piece = pieces[i];
    gathers.push_back(levels_.within->_allgather_base(
        piece, chunk, with_timeout<c10d::AllgatherOptions>(timeout_)));
  }
  for (const WorkPtr& gather : gathers) finish_within(gather);
}

HostsCollective::WorkPtr HostsCollective::start_across(
    const at::Tensor& dense, const ReduceOp& op) const {
  Tensors numbers = {plain_numbers(dense)};
  auto options = with_timeout<c10d::AllreduceOptions>(timeout_);
  options.reduceOp = op_across(op, dense.scalar_type());
  return levels_.across->allreduce(numbers, options);
}

void HostsCollective::reduce(const at::Tensor& tensor, const ReduceOp& op, int root) const {
  const bool is_root = levels_.whole->getRank() == root;
  // The tensors of other ranks stay as they are.
  const at::Tensor dense =
      is_root ? usual(tensor) : tensor.clone(at::MemoryFormat::Contiguous).resolve_conj();
  Tensors tensors = {dense};
  auto options = with_timeout<c10d::ReduceOptions>(timeout_);
  options.rootRank = root % levels_.locals();
  options.asyncOp = false;
  options.reduceOp = op_within(op);
  finish_within(levels_.within->reduce(tensors, options));
  if (levels_.local() == options.rootRank && dense.numel() != 0) {
    Tensors numbers = {plain_numbers(dense)};
    options.rootRank = root / levels_.locals();
    options.reduceOp = op_across(op, dense.scalar_type());
    finish(levels_.across->reduce(numbers, options), Level::kAcross);
  }
  if (!is_root) return;
  divide_average_(dense, op, levels_.whole->getSize());
  copy_back(tensor, dense);
}

void HostsCollective::broadcast(const at::Tensor& tensor, int root) const {
  const at::Tensor dense = usual(tensor);
  auto options = with_timeout<c10d::BroadcastOptions>(timeout_);
  options.asyncOp = false;
  const int local_root = root % levels_.locals();
  if (levels_.local() == local_root && dense.numel() != 0) {
    // The dtype does not matter, and gloo has fewer.
    Tensors bytes = {dense.view(-1).view(at::kByte)};
    options.rootRank = root / levels_.locals();
    finish(levels_.across->broadcast(bytes, options), Level::kAcross);
  }
  Tensors tensors = {dense};
  options.rootRank = local_root;
  finish_within(levels_.within->broadcast(tensors, options));
  copy_back(tensor, dense);
}

// Inputs of the ranks of equal number on all hosts, by host.
at::Tensor HostsCollective::gathered_across(const at::Tensor& input) const {
  at::Tensor own = usual(input).view(-1);
  at::Tensor rows = at::empty({levels_.hosts(), own.numel()}, own.options());
  if (own.numel() == 0) return rows;
  // The dtype does not matter, and gloo has fewer.
  at::Tensor own_bytes = own.view(at::kByte);
  if (levels_.hosts() == 2) {
    // Gloo's all-gather would copy from a buffer of its own.
    const int other = 1 - levels_.host();
    std::vector<int64_t> sizes = {0, 0};
    sizes[static_cast<size_t>(other)] = own_bytes.numel();
    std::vector<int64_t> same_sizes = sizes;  // gloo takes the contents of both
    at::Tensor received = rows[other].view(at::kByte);
    const WorkPtr work = levels_.across->alltoall_base(
        received, own_bytes, sizes, same_sizes, with_timeout<c10d::AllToAllOptions>(timeout_));
    rows[levels_.host()].copy_(own);
    finish(work, Level::kAcross);
    return rows;
  }
  at::Tensor bytes = rows.view(-1).view(at::kByte);
  finish(
      levels_.across->_allgather_base(
          bytes, own_bytes, with_timeout<c10d::AllgatherOptions>(timeout_)),
      Level::kAcross);
  return rows;
}

void HostsCollective::all_gather(const Tensors& outputs, const at::Tensor& input) const {
  const bool even = std::all_of(outputs.begin(), outputs.end(), [&](const at::Tensor& output) {
    return output.numel() == input.numel();
  });
  if (!even) {
    exchange(Tensors(outputs.size(), input), outputs);
    return;
  }
  const at::Tensor rows = gathered_across(input);
  Tensors inputs;
  TensorLists of_locals(static_cast<size_t>(levels_.locals()));
  for (int host = 0; host < levels_.hosts(); ++host) {
    inputs.push_back(rows[host]);
    for (int local = 0; local < levels_.locals(); ++local) {
      of_locals[static_cast<size_t>(local)].push_back(
          outputs[static_cast<size_t>(host * levels_.locals() + local)]);
    }
  }
  auto options = with_timeout<c10d::AllgatherOptions>(timeout_);
  options.asyncOp = false;
  finish_within(levels_.within->allgather_coalesced(of_locals, inputs, options));
}

void HostsCollective::all_gather_into(const at::Tensor& output, const at::Tensor& input) const {
  const at::Tensor dense =
      is_usual(output) ? output : at::empty_like(output, at::MemoryFormat::Contiguous);
  const at::Tensor rows = gathered_across(input);
  Tensors inputs = rows.unbind(0);
  Tensors outputs = dense.view({levels_.hosts(), levels_.locals() * input.numel()}).unbind(0);
  auto options = with_timeout<c10d::AllgatherOptions>(timeout_);
  options.asyncOp = false;
  finish_within(levels_.within->allgather_into_tensor_coalesced(outputs, inputs, options));
  copy_back(output, dense);
}

void HostsCollective::reduce_scatter(
    const at::Tensor& output, const at::Tensor& input, const ReduceOp& op) const {
  const at::Tensor given = usual(input);
  const int64_t size = output.numel();
  at::Tensor sent =
      levels_.within->allocateTensor(levels_.hosts() * size, given.options()).view(
          {levels_.hosts(), size});
  Tensors inputs = given.view({levels_.hosts(), levels_.locals() * size}).unbind(0);
  Tensors outputs = sent.unbind(0);
  auto options = with_timeout<c10d::ReduceScatterOptions>(timeout_);
  options.asyncOp = false;
  options.reduceOp = op_within(op);
  finish_within(levels_.within->reduce_scatter_tensor_coalesced(outputs, inputs, options));
  if (size == 0) return;
  // Gloo's own reduce-scatter is an all-reduce, which sends twice as much.
  at::Tensor numbers = plain_numbers(sent);
  at::Tensor received = at::empty_like(numbers);
  std::vector<int64_t> equal;
  finish(
      levels_.across->alltoall_base(
          received, numbers, equal, equal, with_timeout<c10d::AllToAllOptions>(timeout_)),
      Level::kAcross);
  at::Tensor result = combined(received, op_across(op, given.scalar_type()));
  divide_average_(result, op, levels_.whole->getSize());
  if (output.is_complex()) result = at::view_as_complex(result);
  output.copy_(result.view(output.sizes()));
}

// Ranks of this host exchange in shared memory, and all ranks the rest by gloo. Both move bytes,
// because gloo does not know every dtype.
void HostsCollective::exchange(const Tensors& inputs, const Tensors& outputs) const {
  const at::Tensor nothing = at::empty({0}, at::kByte);
  const auto bytes_of = [&](const at::Tensor& dense) {
    return dense.defined() ? dense.view(-1).view(at::kByte) : nothing;
  };
  Tensors dense_outputs;
  Tensors near_inputs;
  Tensors near_outputs;
  Tensors far_inputs = {nothing};
  std::vector<int64_t> sent(inputs.size(), 0);
  std::vector<int64_t> expected(inputs.size(), 0);
  for (size_t rank = 0; rank < inputs.size(); ++rank) {
    const at::Tensor& output = outputs[rank];
    const bool needs_copy = output.defined() && !is_usual(output);
    dense_outputs.push_back(
        needs_copy ? at::empty_like(output, at::MemoryFormat::Contiguous) : output);
    const at::Tensor input =
        bytes_of(inputs[rank].defined() ? usual(inputs[rank]) : inputs[rank]);
    const at::Tensor target = bytes_of(dense_outputs.back());
    if (is_near(rank)) {
      near_inputs.push_back(input);
      near_outputs.push_back(target);
    } else {
      far_inputs.push_back(input);
      sent[rank] = input.numel();
      expected[rank] = target.numel();
    }
  }
  auto options = with_timeout<c10d::AllToAllOptions>(timeout_);
  options.asyncOp = false;
  finish_within(levels_.within->alltoall(near_outputs, near_inputs, options));
  at::Tensor packed = at::cat(far_inputs);
  at::Tensor received =
      at::empty({std::accumulate(expected.begin(), expected.end(), int64_t{0})}, at::kByte);
  const Tensors parts = received.split_with_sizes(expected);
  finish(
      levels_.whole->alltoall_base(received, packed, expected, sent, options), Level::kWhole);
  for (size_t rank = 0; rank < outputs.size(); ++rank) {
    if (!outputs[rank].defined()) continue;
    if (!is_near(rank)) bytes_of(dense_outputs[rank]).copy_(parts[rank]);
    copy_back(outputs[rank], dense_outputs[rank]);
  }
}

void HostsCollective::barrier() const {
  auto options = with_timeout<c10d::BarrierOptions>(timeout_);
  options.asyncOp = false;
  finish_within(levels_.within->barrier(options));
  finish(levels_.across->barrier(options), Level::kAcross);
}

void HostsCollective::finish(const WorkPtr& work, Level level) const {
  try {
    work->wait();
  } catch (...) {
    throw LevelError(level, text_of(std::current_exception()));
  }
}

// A rank that waits for its own host hears of failures elsewhere through the reports alone.
void HostsCollective::finish_within(const WorkPtr& work) const {
  for (;;) {
    try {
      work->wait(kReportInterval);
      return;
    } catch (...) {
      const bool completed = work->isCompleted();
      if (completed && !work->exception()) return;
      if (completed) throw LevelError(Level::kWithin, text_of(std::current_exception()));
      if (interrupted_()) throw LevelError(Level::kReports, "another rank ended the group");
    }
  }
}

}  // namespace fddp
