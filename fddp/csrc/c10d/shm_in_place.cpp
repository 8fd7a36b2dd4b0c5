#include "c10d/shm_in_place.h"

#include "python_entry.h"
#include "tensor/checks.h"
#include "tensor/layout.h"
#include "tensor/number_type.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>

namespace py = pybind11;

namespace fddp {
namespace {

using shm::Kind;
using shm::Signature;
using shm::SumTree;

constexpr std::string_view kInPlaceNames[] = {
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"};

Kind kind_of(std::string_view name) {
  const auto* const found = std::find(std::begin(kInPlaceNames), std::end(kInPlaceNames), name);
  TORCH_CHECK_VALUE(found != std::end(kInPlaceNames), "unknown operation '", std::string(name), "'");
  return static_cast<Kind>(found - std::begin(kInPlaceNames));
}

Signature signature_of(Kind kind, const at::Tensor& tensor, const InPlaceOptions& options) {
  Signature signature{};
  signature.kind = kind;
  signature.tag = static_cast<uint32_t>(tensor.scalar_type());
  const bool has_src = options.src >= 0 && options.src < UINT32_MAX;
  signature.src = has_src ? static_cast<uint32_t>(options.src) : UINT32_MAX;
  signature.reduction = options.average ? shm::Reduction::kAverage : shm::Reduction::kSum;
  const bool sums = shm::is_reduction(kind);
  signature.number_type =
      sums ? number_type_of(tensor.scalar_type()) : shm::NumberType::kOpaque;
  TORCH_CHECK_TYPE(
      !sums || signature.number_type != shm::NumberType::kOpaque, "cannot sum dtype ",
      tensor.scalar_type());
  signature.unit_bytes = static_cast<uint32_t>(
      sums ? shm::number_bytes(signature.number_type) : static_cast<size_t>(tensor.itemsize()));
  signature.units = tensor.numel() * (sums && tensor.is_complex() ? 2 : 1);
  signature.n_dims = static_cast<uint32_t>(tensor.dim());
  for (size_t d = 0; d < std::min<size_t>(signature.n_dims, Signature::kDims); ++d) {
    signature.dims[d] = tensor.size(static_cast<int64_t>(d));
  }
  return signature;
}

py::dict describe(const Signature& signature) {
  py::list shape;
  for (size_t d = 0; d < std::min<size_t>(signature.n_dims, Signature::kDims); ++d) {
    shape.append(signature.dims[d]);
  }
  const auto kind = static_cast<size_t>(signature.kind);
  // A faulty member may have posted an invalid dtype.
  py::object dtype = py::none();
  if (signature.tag < static_cast<uint32_t>(at::ScalarType::NumOptions)) {
    try {
      const auto type = static_cast<at::ScalarType>(signature.tag);
      dtype = py::reinterpret_borrow<py::object>(
          reinterpret_cast<PyObject*>(torch::getTHPDtype(type)));
    } catch (const std::exception&) {
    }
  }
  py::dict result;
  result["kind"] = kind < std::size(kInPlaceNames) ? std::string(kInPlaceNames[kind]) : "unknown";
  result["dtype"] = dtype;
  result["shape"] = py::tuple(shape);
  result["src"] = signature.src;
  result["average"] = signature.reduction == shm::Reduction::kAverage;
  result["tree"] = signature.tree;
  return result;
}

// Longest wait before Python checks the other ranks, as CHECK_INTERVAL_S in transport/liveness/membership.py.
constexpr auto kCheckInterval = std::chrono::milliseconds(250);

class PendingInMemory : public PendingCollective {
 public:
  PendingInMemory(InPlaceOperation operation, std::shared_ptr<const SharedObject> adopt)
      : operation_(std::move(operation)), adopt_(std::move(adopt)) {}

  bool done() override {
    return operation_.done();
  }
  bool wait(const std::function<std::string()>&) override {
    return operation_.status_within(kCheckInterval) == shm::Status::kOk;
  }
  void end_range(std::shared_ptr<CollectiveRange> range) override {
    operation_.when_completed([range = std::move(range)] { range->end(); });
  }
  py::object to_python() override {
    return adopt_->get()(operation_);
  }

 private:
  InPlaceOperation operation_;
  std::shared_ptr<const SharedObject> adopt_;
};

class ShmCollectives : public Collectives {
 public:
  ShmCollectives(std::shared_ptr<shm::ShmGroup> group, py::object adopt)
      : group_(std::move(group)), adopt_(std::make_shared<SharedObject>(std::move(adopt))) {}

  bool takes(c10::Device device) const override {
    return device.is_cpu();
  }
  std::shared_ptr<PendingCollective> all_reduce(
      const at::Tensor& tensor, bool average, bool wait_soon) override {
    InPlaceOptions options;
    options.average = average;
    options.wait_soon = wait_soon;
    return std::make_shared<PendingInMemory>(
        start_in_place(group_, "all_reduce", tensor, options), adopt_);
  }

 private:
  std::shared_ptr<shm::ShmGroup> group_;
  std::shared_ptr<const SharedObject> adopt_;
};

}  // namespace

shm::Status InPlaceOperation::status_within(shm::Nanoseconds timeout) const {
  const shm::Status status = operation_->status();
  if (status != shm::Status::kPending) return status;
  TORCH_CHECK_VALUE(!group_->is_forked(), shm::kForkedError);
  return group_->wait(*operation_, timeout);
}

std::optional<double> InPlaceOperation::done_s() const {
  if (operation_->status() == shm::Status::kPending) return std::nullopt;
  return shm::Seconds(operation_->completed_at().time_since_epoch()).count();
}

py::list InPlaceOperation::descriptors() const {
  py::list result;
  if (operation_->status() != shm::Status::kMismatch) return result;
  for (const Signature& signature : operation_->signatures()) result.append(describe(signature));
  return result;
}

InPlaceOperation start_in_place(
    const std::shared_ptr<shm::ShmGroup>& group, std::string_view kind, const at::Tensor& tensor,
    const InPlaceOptions& options) {
  // Python reports the details of unsuitable tensors. The checks here are cheap.
  TORCH_CHECK_VALUE(
      tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
          !tensor.requires_grad() && !tensor.is_conj() && !tensor.is_neg() &&
          !tensor._is_zerotensor(),
      "expected a contiguous CPU tensor that does not require grad");
  TORCH_CHECK_TYPE(!is_wrapper(tensor), "expected a plain tensor, whose memory holds its values");
  check_storage(fits_storage(tensor, tensor.numel()), "the tensor");
  TORCH_CHECK_TYPE(
      !options.average || tensor.is_floating_point() || tensor.is_complex(),
      "cannot average dtype ", tensor.scalar_type());
  TORCH_CHECK_VALUE(group != nullptr, "a group of one rank has no operations");
  shm::Request request{
      signature_of(kind_of(kind), tensor, options), static_cast<char*>(tensor.data_ptr()),
      options.wait_soon, options.prompt, std::make_shared<at::Tensor>(tensor)};
  if (options.tree.has_value()) {
    request.tree = std::make_shared<const SumTree>(
        SumTree{options.tree->first, options.tree->second});
    request.signature.tree = request.tree->digest();
  }
  try {
    return {group, group->start(std::move(request))};
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

std::shared_ptr<Collectives> collectives_in_memory(
    std::shared_ptr<shm::ShmGroup> group, py::object adopt) {
  return std::make_shared<ShmCollectives>(std::move(group), std::move(adopt));
}

}  // namespace fddp
