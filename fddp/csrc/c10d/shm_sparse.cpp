// All-reduce of sparse tensors: each rank receives the indices and values of all, whose numbers only
// their senders know, and adds them in the order of the ranks.

#include "c10d/shm_backend.h"

#include <ATen/Functions.h>

#include <exception>
#include <memory>
#include <utility>

namespace fddp {
namespace {

using Tensors = std::vector<at::Tensor>;

// Numbers that precede the indices: the dimensions and the shape, which must be equal on all ranks.
std::vector<int64_t> header_of(const at::Tensor& tensor) {
  std::vector<int64_t> header = {tensor.sparse_dim(), tensor.dense_dim()};
  header.insert(header.end(), tensor.sizes().begin(), tensor.sizes().end());
  return header;
}

at::Tensor sum_of(const at::Tensor& like, const Tensors& indices, const Tensors& values) {
  const at::Tensor header = at::tensor(header_of(like), at::kLong);
  Tensors all_indices;
  Tensors all_values;
  for (size_t rank = 0; rank < indices.size(); ++rank) {
    TORCH_CHECK(
        indices[rank].defined() && values[rank].defined(),
        "no memory can be allocated for the sparse tensor of rank ", rank);
    TORCH_CHECK(
        indices[rank].numel() >= header.numel() &&
            at::equal(indices[rank].narrow(0, 0, header.numel()), header),
        "the ranks passed sparse tensors of different shapes: this one ", like.sizes(),
        ", and rank ", rank, " another");
    const int64_t numbers = indices[rank].numel() - header.numel();
    const int64_t count = numbers / like.sparse_dim();
    std::vector<int64_t> shape = {count};
    const auto dense = like.sizes().slice(static_cast<size_t>(like.sparse_dim()));
    shape.insert(shape.end(), dense.begin(), dense.end());
    all_indices.push_back(
        indices[rank].narrow(0, header.numel(), numbers).view({like.sparse_dim(), count}));
    all_values.push_back(values[rank].view(shape));
  }
  return at::sparse_coo_tensor(
             at::cat(all_indices, 1), at::cat(all_values), like.sizes(), like.options(),
             /*is_coalesced=*/false)
      .coalesce();
}

}  // namespace

void ShmBackend::start_sparse_all_reduce(
    CollectiveWork& work, const at::Tensor& tensor, const c10d::ReduceOp& op, bool waits) {
  const bool average = op.op_ == c10d::ReduceOp::AVG;
  TORCH_CHECK(
      average || op.op_ == c10d::ReduceOp::SUM, "sparse tensors can only be summed and averaged");
  TORCH_CHECK(tensor.sparse_dim() > 0, "a sparse tensor must have a sparse dimension");
  const c10::NoGradGuard guard;
  const at::Tensor own = tensor.coalesce();
  const at::Tensor header = at::tensor(header_of(own), at::kLong);
  const auto indices = std::make_shared<Tensors>();
  const auto values = std::make_shared<Tensors>();
  start_gather_of_any_sizes(
      work, at::cat({header, own.indices().reshape(-1)}), indices, waits);
  start_gather_of_any_sizes(work, own.values(), values, waits);
  work.after_success([tensor, indices, values, average, size = size_] {
    at::Tensor total = sum_of(tensor, *indices, *values);
    if (average) total.div_(size);
    tensor.copy_(total);
  });
}

// `received`: flat tensors of all ranks once the operation has completed. Undefined where there is
// no memory.
void ShmBackend::start_gather_of_any_sizes(
    CollectiveWork& work, const at::Tensor& tensor, std::shared_ptr<Tensors> received,
    bool waits) {
  const at::Tensor dense = readable(work, tensor);
  if (group_ == nullptr) {
    received->push_back(dense.view(-1));
    return;
  }
  auto buffers = std::make_shared<shm::ExchangeBuffers>();
  buffers->sources.assign(size(), {static_cast<const char*>(dense.data_ptr()), dense.nbytes()});
  buffers->targets.assign(size(), {nullptr, shm::kAnySize});
  buffers->allocate = [received, options = dense.options()](const std::vector<uint64_t>& sizes) {
    std::vector<shm::ExchangeBuffers::Target> targets;
    for (const uint64_t bytes : sizes) {
      const auto numel = static_cast<int64_t>(bytes / options.dtype().itemsize());
      at::Tensor part;
      try {
        part = at::empty({numel}, options);
      } catch (const std::exception&) {
      }
      received->push_back(part);
      targets.push_back({part.defined() ? static_cast<char*>(part.data_ptr()) : nullptr, bytes});
    }
    return targets;
  };
  shm::Signature signature{};
  signature.kind = shm::Kind::kExchange;
  signature.number_type = shm::NumberType::kOpaque;
  signature.tag = static_cast<uint32_t>(dense.scalar_type());
  signature.unit_bytes = 1;
  shm::Request request{signature, nullptr, waits, false, nullptr};
  request.exchange = std::move(buffers);
  start(work, std::move(request));
}

}  // namespace fddp
