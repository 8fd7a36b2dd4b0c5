// Sparse tensors of the device: their parts are tensors of the device, and operators wait for them.

#include "device.h"

#include <ATen/SparseTensorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>
#include <type_traits>

namespace lag {
namespace {

// The maker of a sparse tensor, which makes it for the current device, for that of its arguments.
template <auto make>
struct OnDevice;

template <class... Arguments, at::Tensor (*make)(Arguments...)>
struct OnDevice<make> {
  static at::Tensor call(Arguments... arguments) {
    std::optional<at::Device> device;
    const auto note = [&](const auto& argument) {
      using Argument = std::decay_t<decltype(argument)>;
      if constexpr (std::is_same_v<Argument, at::Tensor>) device = argument.device();
      if constexpr (std::is_same_v<Argument, std::optional<at::Device>>) device = argument ? argument : device;
    };
    (note(arguments), ...);
    const c10::OptionalDeviceGuard guard(device);
    return make(arguments...);
  }
};

at::Tensor moved(const at::Tensor& tensor, at::Device device) {
  if (!tensor.is_sparse()) {
    return tensor.to(device);
  }
  const auto indices = tensor._indices().to(device), values = tensor._values().to(device);
  auto sparse = at::_sparse_coo_tensor_unsafe(indices, values, tensor.sizes());
  return sparse._coalesced_(tensor.is_coalesced());
}

// Write to a tensor of the device what an operator wrote on the host. A sparse one gets other parts.
at::Tensor written(const at::Tensor& target, const at::Tensor& result) {
  if (!target.is_sparse()) {
    return target.copy_(result);
  }
  auto* sparse = static_cast<at::SparseTensorImpl*>(target.unsafeGetTensorImpl());
  const auto device = target.device();
  sparse->set_indices_and_values_unsafe(result._indices().to(device), result._values().to(device));
  sparse->set_coalesced(result.is_coalesced());
  return target;
}

// Run an operator on the host, between copies there and back.
void run_sparse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto count = op.schema().arguments().size();
  const auto arguments = torch::jit::pop(*stack, count);
  torch::jit::Stack host;
  std::optional<at::Device> device;
  for (const auto& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined()) {
      const auto& tensor = argument.toTensor();
      device = tensor.is_cpu() ? device : tensor.device();
      host.push_back(moved(tensor, at::kCPU));
    } else {
      host.push_back(argument.isDevice() ? c10::IValue(at::Device(at::kCPU)) : argument);
    }
  }
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(&host);
  for (size_t i = 0; i < host.size(); ++i) {
    const auto* alias = op.schema().returns()[i].alias_info();
    if (alias != nullptr) {
      TORCH_CHECK(alias->isWrite(), op.schema().name(), " of a sparse tensor of the device");
      stack->push_back(written(arguments[0].toTensor(), host[i].toTensor()));
    } else {
      stack->push_back(host[i].isTensor() ? c10::IValue(moved(host[i].toTensor(), *device)) : host[i]);
    }
  }
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("_values", at::native::_values_sparse);
  m.impl("indices", at::native::indices_sparse);
  m.impl("values", at::native::values_sparse);
  m.impl("_nnz", at::native::_nnz_sparse);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("_coalesced_", at::native::_coalesced_sparse_);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
  m.impl("_sparse_coo_tensor_with_dims", OnDevice<at::native::new_with_dims_sparse>::call);
  m.impl(
      "_sparse_coo_tensor_with_dims_and_tensors",
      OnDevice<at::native::new_with_dims_and_tensor_sparse_symint>::call);
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_sparse>());
}

} // namespace
} // namespace lag
