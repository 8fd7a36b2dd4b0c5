// Translation of collectives on tensors to operations of a shared-memory group.

#include "c10d/shm_backend.h"
#include "tensor/checks.h"
#include "tensor/number_type.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

namespace fddp {
namespace {

using c10d::ReduceOp;
using shm::Kind;
using shm::Reduction;
using shm::Request;
using shm::Signature;

void check_dense(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_cpu(), "expected a tensor on the CPU, got one on ", tensor.device());
  TORCH_CHECK(tensor.layout() == at::kStrided, "expected a dense tensor, got a ", tensor.layout());
  TORCH_CHECK(!is_wrapper(tensor), "expected a plain tensor, whose memory holds its values");
}

char* data_of(const at::Tensor& tensor) {
  return static_cast<char*>(tensor.data_ptr());
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

Reduction reduction_of(const ReduceOp& op) {
  switch (op.op_) {
    case ReduceOp::SUM:
    case ReduceOp::PREMUL_SUM:
      return Reduction::kSum;
    case ReduceOp::AVG:
      return Reduction::kAverage;
    case ReduceOp::PRODUCT:
      return Reduction::kProduct;
    case ReduceOp::MIN:
      return Reduction::kMin;
    case ReduceOp::MAX:
      return Reduction::kMax;
    case ReduceOp::BAND:
      return Reduction::kAnd;
    case ReduceOp::BOR:
      return Reduction::kOr;
    case ReduceOp::BXOR:
      return Reduction::kXor;
    default:
      TORCH_CHECK(false, "unknown ReduceOp ", static_cast<int>(op.op_));
  }
}

// Reduction of truth values, which are bytes 0 and 1.
Reduction reduction_of_truth(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
    case Reduction::kMax:
      return Reduction::kOr;
    case Reduction::kProduct:
    case Reduction::kMin:
      return Reduction::kAnd;
    default:
      return reduction;
  }
}

Signature signature_of(Kind kind, at::ScalarType dtype, int64_t root) {
  Signature signature{};
  signature.kind = kind;
  signature.number_type = shm::NumberType::kOpaque;
  signature.tag = static_cast<uint32_t>(dtype);
  signature.src = static_cast<uint32_t>(root);
  signature.unit_bytes = 1;
  return signature;
}

Signature reduction_signature(Kind kind, const at::Tensor& tensor, const ReduceOp& op, int64_t root) {
  const at::ScalarType dtype = tensor.scalar_type();
  Signature signature = signature_of(kind, dtype, root);
  const bool truth = dtype == at::kBool;
  signature.number_type = truth ? shm::NumberType::kU8 : number_type_of(dtype);
  const Reduction reduction = reduction_of(op);
  signature.reduction = truth ? reduction_of_truth(reduction) : reduction;
  TORCH_CHECK(
      shm::is_defined(signature.reduction, signature.number_type), "cannot reduce dtype ", dtype,
      " by ReduceOp ", static_cast<int>(op.op_));
  TORCH_CHECK(
      !tensor.is_complex() || shm::is_sum(signature.reduction),
      "complex numbers can only be summed and averaged");
  signature.unit_bytes = static_cast<uint32_t>(shm::number_bytes(signature.number_type));
  signature.units = tensor.numel() * (tensor.is_complex() ? 2 : 1);
  return signature;
}

at::Tensor premultiplied(const at::Tensor& tensor, const ReduceOp& op) {
  const auto* const factor = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(factor != nullptr, "PREMUL_SUM has no factor");
  const c10::NoGradGuard guard;
  return factor->tensor_factor.defined() ? tensor * factor->tensor_factor.to(tensor.scalar_type())
                                         : tensor * factor->double_factor;
}

// Multiply in place by the factor of PREMUL_SUM.
void premultiply_(const at::Tensor& tensor, const ReduceOp& op) {
  if (op.op_ != ReduceOp::PREMUL_SUM) return;
  const c10::NoGradGuard guard;
  tensor.copy_(premultiplied(tensor, op));
}

// Dtype of the first tensor that is defined.
at::ScalarType dtype_of(
    const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs) {
  for (const auto* const list : {&inputs, &outputs}) {
    for (const at::Tensor& tensor : *list) {
      if (tensor.defined()) return tensor.scalar_type();
    }
  }
  return at::ScalarType::Undefined;
}

// Return the sizes of parts of a tensor along its first dimension: `sizes`, or those of `n` equal
// parts if it is empty.
std::vector<int64_t> part_sizes(const at::Tensor& tensor, std::vector<int64_t> sizes, int n) {
  if (sizes.empty()) {
    TORCH_CHECK(
        tensor.dim() > 0 && tensor.size(0) % n == 0, "a tensor of shape ", tensor.sizes(),
        " cannot be divided along its first dimension into ", n, " equal parts");
    sizes.assign(static_cast<size_t>(n), tensor.size(0) / n);
  }
  TORCH_CHECK(
      sizes.size() == static_cast<size_t>(n), "expected one split size for each of the ", n,
      " ranks, got ", sizes.size());
  int64_t sum = 0;
  for (const int64_t size : sizes) {
    TORCH_CHECK(
        size >= 0 && size <= std::numeric_limits<int64_t>::max() - sum, "invalid split size ", size);
    sum += size;
  }
  TORCH_CHECK(
      tensor.dim() > 0 && sum == tensor.size(0), "the split sizes ", sizes,
      " do not add up to the first dimension of a tensor of shape ", tensor.sizes());
  return sizes;
}

Request request_of(const Signature& signature, char* data, bool waits) {
  Request request{signature, data, waits, false, nullptr};
  return request;
}

}  // namespace

at::Tensor readable(ShmWork& work, const at::Tensor& tensor) {
  check_dense(tensor);
  at::Tensor dense =
      is_plain(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
  work.keep(dense);
  return dense;
}

at::Tensor writable(ShmWork& work, const at::Tensor& tensor, bool with_values) {
  check_dense(tensor);
  if (is_plain(tensor)) {
    work.keep(tensor);
    return tensor;
  }
  at::Tensor dense = with_values
                         ? tensor.clone(at::MemoryFormat::Contiguous).resolve_conj().resolve_neg()
                         : at::empty_like(tensor, at::MemoryFormat::Contiguous);
  work.after_success([tensor, dense] { tensor.copy_(dense); });
  return dense;
}

void ShmBackend::start_all_reduce(
    CollectiveWork& work, const at::Tensor& tensor, const ReduceOp& op, bool waits) {
  const at::Tensor dense = writable(work, tensor, /*with_values=*/true);
  const Signature signature = reduction_signature(Kind::kAllReduce, dense, op, 0);
  premultiply_(dense, op);
  if (group_ != nullptr) start(work, request_of(signature, data_of(dense), waits));
}

void ShmBackend::start_reduce(
    CollectiveWork& work, const at::Tensor& tensor, const ReduceOp& op, int64_t root, bool waits) {
  at::Tensor dense = writable(work, tensor, /*with_values=*/true);
  const Signature signature = reduction_signature(Kind::kReduce, dense, op, root);
  if (op.op_ == ReduceOp::PREMUL_SUM && rank_ != root) {
    dense = readable(work, premultiplied(dense, op));
  } else {
    premultiply_(dense, op);
  }
  if (group_ != nullptr) start(work, request_of(signature, data_of(dense), waits));
}

void ShmBackend::start_broadcast(
    CollectiveWork& work, const at::Tensor& tensor, int64_t root, bool waits) {
  const at::Tensor dense = writable(work, tensor, /*with_values=*/rank_ == root);
  Signature signature = signature_of(Kind::kBroadcast, dense.scalar_type(), root);
  signature.units = static_cast<int64_t>(dense.nbytes());
  if (group_ != nullptr) start(work, request_of(signature, data_of(dense), waits));
}

void ShmBackend::start_all_gather(
    CollectiveWork& work, const at::Tensor& output, const at::Tensor& input, bool waits) {
  TORCH_CHECK(
      output.scalar_type() == input.scalar_type(), "the dtypes of output and input differ: ",
      output.scalar_type(), " and ", input.scalar_type());
  TORCH_CHECK(
      output.numel() == input.numel() * size_, "the output must have ", input.numel() * size_,
      " elements, ", size_, " times as many as the input, got ", output.numel());
  const at::Tensor dense = writable(work, output, /*with_values=*/false);
  const at::Tensor own = readable(work, input);
  char* const chunk = data_of(dense) + static_cast<int64_t>(own.nbytes()) * rank_;
  if (chunk != data_of(own) && own.nbytes() != 0) {
    std::memmove(chunk, data_of(own), own.nbytes());
  }
  Signature signature = signature_of(Kind::kAllGather, dense.scalar_type(), 0);
  signature.units = static_cast<int64_t>(dense.nbytes());
  if (group_ != nullptr) start(work, request_of(signature, data_of(dense), waits));
}

void ShmBackend::start_reduce_scatter(
    CollectiveWork& work, const at::Tensor& output, const at::Tensor& input, const ReduceOp& op,
    bool waits) {
  TORCH_CHECK(
      output.scalar_type() == input.scalar_type(), "the dtypes of output and input differ: ",
      output.scalar_type(), " and ", input.scalar_type());
  TORCH_CHECK(
      input.numel() == output.numel() * size_, "the input must have ", output.numel() * size_,
      " elements, ", size_, " times as many as the output, got ", input.numel());
  const bool scaled = op.op_ == ReduceOp::PREMUL_SUM;
  at::Tensor sent = readable(work, scaled ? premultiplied(input, op) : input);
  const at::Tensor received = writable(work, output, /*with_values=*/false);
  const char* const own = data_of(sent) + static_cast<int64_t>(received.nbytes()) * rank_;
  if (data_of(received) != own && share_memory({received}, {sent})) {
    sent = readable(work, sent.clone());  // others read the chunks that this rank would overwrite
  }
  const Signature signature = reduction_signature(Kind::kReduceScatter, sent, op, 0);
  if (group_ == nullptr) {
    std::memmove(data_of(received), data_of(sent), sent.nbytes());
    return;
  }
  Request request = request_of(signature, data_of(sent), waits);
  request.result = data_of(received);
  start(work, std::move(request));
}

// Undefined tensors stand for nothing to send or to receive.
void ShmBackend::start_exchange(
    CollectiveWork& work, const Tensors& inputs, const Tensors& outputs, int64_t root,
    bool waits) {
  const at::ScalarType dtype = dtype_of(inputs, outputs);
  auto buffers = std::make_shared<shm::ExchangeBuffers>();
  // Others read an input while this rank writes what it receives from them.
  Tensors from_others = outputs;
  from_others[static_cast<size_t>(rank_)] = at::Tensor();
  const bool overlaps = share_memory(from_others, inputs);
  at::Tensor latest;  // equal inputs follow each other
  at::Tensor dense;
  for (const at::Tensor& input : inputs) {
    if (!input.defined()) {
      buffers->sources.push_back({nullptr, 0});
      continue;
    }
    TORCH_CHECK(
        input.scalar_type() == dtype, "the inputs have different dtypes: ", dtype, " and ",
        input.scalar_type());
    if (!latest.defined() || !latest.is_same(input)) {
      dense = readable(work, overlaps ? input.clone(at::MemoryFormat::Contiguous) : input);
    }
    latest = input;
    buffers->sources.push_back({data_of(dense), dense.nbytes()});
  }
  for (const at::Tensor& output : outputs) {
    if (!output.defined()) {
      buffers->targets.push_back({nullptr, 0});
      continue;
    }
    TORCH_CHECK(
        output.scalar_type() == dtype, "the dtypes of output and input differ: ",
        output.scalar_type(), " and ", dtype);
    const at::Tensor target = writable(work, output, /*with_values=*/false);
    buffers->targets.push_back({data_of(target), target.nbytes()});
  }
  start_exchange_of(work, std::move(buffers), dtype, root, waits);
}

// Parts are ranges of bytes: a tensor for each would take longer than a small exchange.
void ShmBackend::start_all_to_all(
    CollectiveWork& work, const Divided& output, const Divided& input, bool waits) {
  const at::ScalarType dtype = input.tensor.scalar_type();
  TORCH_CHECK(
      output.tensor.scalar_type() == dtype, "the dtypes of output and input differ: ",
      output.tensor.scalar_type(), " and ", dtype);
  const at::Tensor received = writable(work, output.tensor, /*with_values=*/false);
  at::Tensor sent = readable(work, input.tensor);
  if (share_memory({received}, {sent})) sent = readable(work, sent.clone());
  auto buffers = std::make_shared<shm::ExchangeBuffers>();
  const auto add_parts = [&](const at::Tensor& tensor, const auto& sizes, auto& parts) {
    const int64_t rows = tensor.dim() == 0 ? 0 : tensor.size(0);
    const uint64_t row_bytes = rows == 0 ? 0 : tensor.nbytes() / static_cast<uint64_t>(rows);
    char* data = data_of(tensor);
    for (const int64_t size : part_sizes(tensor, sizes, size_)) {
      const uint64_t bytes = static_cast<uint64_t>(size) * row_bytes;
      parts.push_back({data, bytes});
      data += bytes;
    }
  };
  add_parts(sent, input.sizes, buffers->sources);
  add_parts(received, output.sizes, buffers->targets);
  start_exchange_of(work, std::move(buffers), dtype, 0, waits);
}

void ShmBackend::start_exchange_of(
    CollectiveWork& work, std::shared_ptr<shm::ExchangeBuffers> buffers, at::ScalarType dtype,
    int64_t root, bool waits) {
  const auto own = static_cast<size_t>(rank_);
  TORCH_CHECK(
      buffers->sources[own].bytes == buffers->targets[own].bytes, "rank ", rank_, " sends ",
      buffers->sources[own].bytes, " bytes to itself and receives ", buffers->targets[own].bytes);
  if (group_ == nullptr) {
    if (buffers->sources[0].bytes != 0) {
      std::memmove(
          buffers->targets[0].data, buffers->sources[0].data, buffers->sources[0].bytes);
    }
    return;
  }
  Request request = request_of(signature_of(Kind::kExchange, dtype, root), nullptr, waits);
  request.exchange = std::move(buffers);
  start(work, std::move(request));
}

}  // namespace fddp
