// Operators of the device: views and copies here, all others by the kernel of the CPU on a stream.

#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <unordered_map>

namespace lag {
namespace {

using c10::IValue;
using Stack = torch::jit::Stack;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Device device_of(std::optional<at::Device> device) {
  const auto found = device.value_or(at::Device(kLag));
  return {kLag, found.has_index() ? found.index() : c10::impl::VirtualGuardImpl(kLag).getDevice().index()};
}

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_generic(
      size, c10::GetAllocator(kLag), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(kLag), kKeys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(
    const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() == size && !format) {
    return self;
  }
  const auto strides = at::empty(size, self.options().device(at::kMeta).memory_format(format)).strides().vec();
  const size_t needed = at::detail::computeStorageNbytes(
      size, strides, self.element_size(), self.storage_offset());
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) {
    const c10::DeviceGuard guard(self.device());
    resize(*storage, needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, strides);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return at::native::set_storage_cpu_(self, std::move(source), 0, count, {});
}

// Copies

at::Tensor& to_device(const at::Tensor& source, at::Tensor& target, bool non_blocking) {
  // As CUDA: pinned memory is read when the copy runs, other memory at once.
  const bool is_late = non_blocking && source.is_pinned();
  if (!is_late) {
    forbid_in_captures("a copy from memory that is not pinned");
  }
  const auto from = is_late ? source : source.clone();
  count("copies", 1, 2 * target.nbytes());
  issue(current_stream(target.device().index()), [from, to = Operand(target)] {
    to.on_host().copy_(from);
  });
  return target;
}

at::Tensor& to_host(const at::Tensor& source, at::Tensor& target, bool non_blocking) {
  const auto stream = current_stream(source.device().index());
  count("copies", 1, 2 * source.nbytes());
  issue(stream, [from = Operand(source), to = target]() mutable { to.copy_(from.on_host()); });
  if (!(non_blocking && target.is_pinned())) {
    wait_for(stream, "copy to the host");
  }
  return target;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  auto target = destination;
  if (!source.is_privateuseone()) {
    return to_device(source, target, non_blocking);
  }
  if (!target.is_privateuseone()) {
    return to_host(source, target, non_blocking);
  }
  // As CUDA: on the current stream of the source's device, which waits for the target's, and vice
  // versa.
  const auto here = current_stream(source.device().index());
  const auto there = current_stream(target.device().index());
  count("copies", 1, source.nbytes() + target.nbytes());
  if (here != there) {
    hold(here, end_of(there));
  }
  issue(here, [from = Operand(source), to = Operand(target)] {
    to.on_host().copy_(from.on_host());
  });
  if (here != there) {
    hold(there, end_of(here));
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination) {
  resize_(destination, source.sizes(), std::nullopt);
  return copy_from(source, destination, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  count("copies", 1, self.nbytes());
  wait_for(current_stream(self.device().index()), "item");
  return Operand(self).on_host().item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  record_use(self.storage().data_ptr(), stream);
}

// All other operators

// Replace the tensors of an argument, also those in lists.
template <typename Replace>
IValue replaced(const IValue& value, const Replace& replace) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    return tensor.defined() ? IValue(replace(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(replace(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor && tensor->defined() ? std::optional(replace(*tensor)) : tensor);
    }
    return list;
  }
  return value;
}

at::Tensor as_meta(const at::Tensor& tensor) {
  if (tensor.is_cpu() && tensor.dim() == 0) {
    return tensor; // possibly a Python number, which takes no part in the choice of a dtype
  }
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// Arguments as they are when the operation runs: tensors of the device by their place in memory, tensors
// of the host by their values at the call.
class Arguments {
 public:
  explicit Arguments(const Stack& arguments) {
    for (const IValue& argument : arguments) {
      kept_.push_back(replaced(argument, [this](const at::Tensor& tensor) {
        if (tensor.is_privateuseone()) {
          operands_.emplace_back(tensor);
          // The number of the operand; tensors of the device must not be kept.
          return at::empty({0, static_cast<int64_t>(operands_.size())}, at::kLong);
        }
        const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
        return is_number ? tensor : tensor.clone();
      }));
      if (argument.isDevice()) {
        kept_.back() = at::Device(at::kCPU);
      }
    }
  }

  Stack on_host() const {
    Stack found;
    for (const IValue& argument : kept_) {
      found.push_back(replaced(argument, [this](const at::Tensor& tensor) {
        const bool is_number = tensor.dim() == 2 && tensor.size(0) == 0;
        return is_number ? operands_[tensor.size(1) - 1].on_host() : tensor;
      }));
    }
    return found;
  }

 private:
  Stack kept_;
  std::vector<Operand> operands_;
};

// The tensors of the results in one list.
std::vector<at::Tensor> tensors_of(const Stack& values) {
  std::vector<at::Tensor> found;
  for (const IValue& value : values) {
    replaced(value, [&found](const at::Tensor& tensor) {
      found.push_back(tensor);
      return tensor;
    });
  }
  return found;
}

std::optional<at::Device> device_of(const Stack& arguments) {
  for (const at::Tensor& tensor : tensors_of(arguments)) {
    if (tensor.is_privateuseone()) {
      return tensor.device();
    }
  }
  for (const IValue& argument : arguments) {
    if (argument.isDevice()) {
      return device_of(std::optional(argument.toDevice()));
    }
  }
  return std::nullopt;
}

// Position of the argument that a result is, for operators that write into an argument.
std::optional<size_t> written(const c10::FunctionSchema& schema, size_t result) {
  const auto* alias = schema.returns()[result].alias_info();
  if (alias == nullptr) {
    return std::nullopt;
  }
  TORCH_CHECK(alias->isWrite(), "the device has no kernel for the view ", schema.name());
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other != nullptr && other->beforeSets() == alias->beforeSets()) {
      return i;
    }
  }
  return std::nullopt;
}

size_t bytes_of(const Stack& values) {
  size_t found = 0;
  for (const at::Tensor& tensor : tensors_of(values)) {
    found += tensor.is_privateuseone() ? tensor.nbytes() : 0;
  }
  return found;
}

// Note an operator as what it is on CUDA: one launch, or one for as many tensors as a launch of a
// multi-tensor operator takes; and the bytes of arguments and results, twice if they are read and written.
void count_kernel(const c10::FunctionSchema& schema, const Stack& arguments, const Stack& results) {
  constexpr std::array<size_t, 4> kTensors{110, 64, 48, 36}; // of a launch, by the number of lists
  const std::string& name = schema.name();
  const bool is_in_place = name.back() == '_' && !name.ends_with("zero_") && !name.ends_with("fill_") &&
      !name.ends_with("copy_");
  size_t nbytes = 0, lists = 0, longest = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    const bool is_written = alias != nullptr && alias->isWrite();
    nbytes += bytes_of({arguments[i]}) * (is_written && is_in_place ? 2 : 1);
    if (arguments[i].isTensorList()) {
      longest = std::max(longest, arguments[i].toTensorList().size());
      ++lists;
    }
  }
  for (size_t i = 0; i < results.size(); ++i) {
    if (schema.returns()[i].alias_info() == nullptr) {
      nbytes += bytes_of({results[i]});
      lists += results[i].isTensorList();
    }
  }
  const bool is_foreach = name.starts_with("aten::_foreach_") && lists > 0;
  const size_t most = is_foreach ? kTensors.at(std::min(lists, kTensors.size()) - 1) : 1;
  count("kernels", is_foreach ? (longest + most - 1) / most : 1, nbytes);
}

template <typename Number>
void append(std::string& key, Number number) {
  key.append(reinterpret_cast<const char*>(&number), sizeof number);
}

template <typename Numbers>
void append_all(std::string& key, const Numbers& numbers) {
  append(key, numbers.size());
  for (const auto number : numbers) {
    append(key, number);
  }
}

// Append all on which shapes and dtypes of results depend. Return false if that is not known.
bool append_form(std::string& key, const IValue& value) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    key += tensor.defined() ? 't' : 'u';
    if (tensor.defined()) {
      append(key, tensor.scalar_type());
      append(key, tensor.is_cpu() && tensor.dim() == 0);
      append(key, tensor.unsafeGetTensorImpl()->is_wrapped_number());
      append_all(key, tensor.sizes());
      append_all(key, tensor.strides());
    }
  } else if (value.isInt()) {
    append(key += 'i', value.toInt());
  } else if (value.isDouble()) {
    append(key += 'f', value.toDouble());
  } else if (value.isBool()) {
    append(key += 'b', value.toBool());
  } else if (value.isString()) {
    key += 's' + value.toStringRef();
  } else if (value.isDevice() || value.isNone()) {
    key += 'n'; // any device is replaced
  } else if (value.isList()) {
    const auto list = value.toList();
    append(key += 'l', list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      if (!append_form(key, list.get(i))) {
        return false;
      }
    }
  } else {
    return false;
  }
  return true;
}

std::optional<Stack> newly_inferred(const c10::OperatorHandle& op, const Stack& arguments);

// Results of the operator on tensors without values; empty if it has no kernel for them. Kept by the
// forms of the arguments, as torch infers them in Python.
std::optional<Stack> inferred(const c10::OperatorHandle& op, const Stack& arguments) {
  static auto& known = *new std::unordered_map<std::string, Stack>;
  static auto& lock = *new std::mutex;
  std::string key = c10::toString(op.operator_name());
  for (const IValue& argument : arguments) {
    if (!append_form(key, argument)) {
      return newly_inferred(op, arguments);
    }
  }
  {
    std::lock_guard held(lock);
    const auto found = known.find(key);
    if (found != known.end()) {
      return found->second;
    }
  }
  const auto before = bytes_of(arguments);
  const auto results = newly_inferred(op, arguments);
  if (results && bytes_of(arguments) == before) { // else it has resized one
    std::lock_guard held(lock);
    known.emplace(std::move(key), *results);
  }
  return results;
}

std::optional<Stack> newly_inferred(const c10::OperatorHandle& op, const Stack& arguments) {
  Stack stack;
  for (const IValue& argument : arguments) {
    stack.push_back(
        argument.isDevice() ? IValue(at::Device(at::kMeta)) : replaced(argument, as_meta));
  }
  const Stack before = stack;
  try {
    op.callBoxed(&stack);
  } catch (const std::exception&) {
    return std::nullopt; // also of wrong arguments, of which the kernel of the CPU says what is wrong
  }
  for (const IValue& value : stack) {
    if (!(value.isTensor() || value.isTensorList())) {
      return std::nullopt; // a number, which the host asks for
    }
  }
  // Results that were resized.
  const auto old = tensors_of(arguments), resized = tensors_of(before);
  for (size_t i = 0; i < old.size(); ++i) {
    if (old[i].is_privateuseone() && old[i].sizes() != resized[i].sizes()) {
      resize_(old[i], resized[i].sizes(), std::nullopt);
    }
  }
  return stack;
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  const auto device = device_of(arguments);
  TORCH_CHECK(device, schema.name(), " on the device needs a tensor of the device");
  const c10::DeviceGuard guard(*device);
  const auto stream = current_stream(device->index());
  at::AutoDispatchBelowADInplaceOrView below;

  const bool is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  std::optional<Stack> results = is_random ? std::nullopt : inferred(op, arguments);
  const bool is_late = results.has_value();
  if (!is_late) {
    // Random numbers come from the host's generator, in the order of the calls. Of others the host
    // has to know the values.
    wait_for(stream, is_random ? "" : schema.name());
    results = Arguments(arguments).on_host();
    op.callBoxed(&*results);
  }
  const auto host_results = is_late ? Stack{} : *results;
  for (size_t i = 0; i < results->size(); ++i) {
    if (const auto position = written(schema, i)) {
      (*results)[i] = arguments[*position];
    } else {
      (*results)[i] = replaced((*results)[i], [&](const at::Tensor& like) {
        return at::empty_strided(like.sizes(), like.strides(), like.options().device(*device));
      });
    }
  }
  count_kernel(schema, arguments, *results);
  std::vector<std::vector<Operand>> targets;
  for (const IValue& result : *results) {
    auto& own = targets.emplace_back();
    for (const at::Tensor& tensor : tensors_of({result})) {
      own.emplace_back(tensor);
    }
  }
  issue(stream, [op, host_results, is_late, targets, late = Arguments(arguments)] {
    Stack found = is_late ? late.on_host() : host_results;
    if (is_late) {
      op.callBoxed(&found);
    }
    for (size_t k = 0; k < targets.size(); ++k) {
      // None where the kernel leaves out a gradient that nobody needs.
      const auto tensors = tensors_of({found[k]});
      for (size_t i = 0; i < tensors.size(); ++i) {
        const auto target = targets[k][i].on_host();
        if (target.numel() > 0 && target.data_ptr() != tensors[i].data_ptr()) {
          target.copy_(tensors[i]);
        }
      }
    }
  });
  for (auto& result : *results) {
    stack->push_back(std::move(result));
  }
}

// Convolutions of devices that torch does not know.
void run_named(const char* name, Stack* stack) {
  run(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), stack);
}

void convolution(const c10::OperatorHandle&, Stack* stack) {
  run_named("aten::convolution", stack);
}

void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  stack->insert(stack->begin() + static_cast<std::ptrdiff_t>(stack->size()) - 7, IValue()); // sizes of the bias
  run_named("aten::convolution_backward", stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // Multi-tensor operators, which torch would take apart; those of CUDA are not.
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const bool is_kernel = name.name.starts_with("aten::_foreach_") && name.overload_name.find("out") == std::string::npos;
    if (is_kernel) {
      m.impl(c10::toString(name).substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
    }
  }
}

// Copies resolve conjugates and negatives themselves.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

} // namespace
} // namespace lag
