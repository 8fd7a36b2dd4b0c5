#include "storage.h"

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/TensorOptions.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>
#include <unordered_map>
#include <utility>

#include "tensor/python_lists.h"

namespace py = pybind11;

namespace fddp {
namespace {

void release_owner(void* owner) {
  c10::intrusive_ptr<c10::StorageImpl>::reclaim(static_cast<c10::StorageImpl*>(owner));
}

// Return a storage over a range of the owner's memory. See [Note: slices].
c10::Storage storage_slice(c10::Storage owner, int64_t begin_bytes, int64_t size_bytes) {
  auto* const base = static_cast<char*>(owner.mutable_data());  // null on the meta device
  void* const data = base == nullptr ? nullptr : base + begin_bytes;
  const c10::Device device = owner.device();
  c10::DataPtr memory(data, owner.unsafeReleaseStorageImpl(), &release_owner, device);
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), size_bytes, std::move(memory),
      /*allocator=*/nullptr, /*resizable=*/false);
}

}  // namespace

std::vector<at::Tensor> slices(const at::Tensor& buffer, const Layout& layout) {
  check_buffer(buffer, layout.numel());
  const c10::InferenceMode no_inference(false);
  const auto item_bytes = static_cast<int64_t>(buffer.itemsize());
  const c10::DispatchKeySet keys(
      c10::computeDispatchKey(buffer.scalar_type(), buffer.layout(), buffer.device()));
  std::vector<at::Tensor> results;
  results.reserve(layout.slots().size());
  for (const Slot& slot : layout.slots()) {
    c10::Storage storage = storage_slice(
        buffer.storage(), (buffer.storage_offset() + slot.offset) * item_bytes,
        slot.numel * item_bytes);
    at::Tensor& result = results.emplace_back(
        at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, buffer.dtype()));
    result.unsafeGetTensorImpl()->set_sizes_and_strides(slot.sizes, slot.strides);
  }
  return results;
}

c10::StorageImpl* owner_of_slice(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.layout() != at::kStrided) return nullptr;
  const c10::DataPtr& memory =
      tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (memory.get_deleter() != &release_owner) return nullptr;
  return static_cast<c10::StorageImpl*>(memory.get_context());
}

int64_t storage_use_count(const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.has_storage(), "storage_use_count: the tensor has no storage");
  const c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  const auto owners = static_cast<int64_t>(tensor.storage().use_count());
  // Once created, the Python object of a storage lives as long as the storage, and each keeps the
  // other alive. It counts as an owner only while Python refers to it.
  return storage.pyobj_slot()->has_unique_reference() ? owners - 1 : owners;
}

namespace {

// Buffers whose views were returned to callers. Held weakly, so that their memory is not kept
// alive.
class LiveViews {
 public:
  void add(const at::Tensor& buffer) {
    // Freed buffers are removed when the number has doubled, so that the cost of a call does not grow
    // with the number of buckets.
    if (storages_.size() >= sweep_size_) {
      for (auto it = storages_.begin(); it != storages_.end();) {
        it = it->second.expired() ? storages_.erase(it) : std::next(it);
      }
      sweep_size_ = std::max(kMinSweepSize, 2 * storages_.size());
    }
    c10::StorageImpl* const storage = buffer.storage().unsafeGetStorageImpl();
    storages_.try_emplace(storage, c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
  }

  // Return true if the tensor is a slice of one of the buffers.
  bool contains(const at::Tensor& tensor) const {
    return storages_.count(owner_of_slice(tensor)) != 0;
  }

  // Return the bytes of the buffers that are in memory, without those among `released` that have no
  // other owner.
  int64_t held_bytes(const std::vector<at::Tensor>& released) const {
    int64_t bytes = 0;
    for (const auto& [storage, reference] : storages_) {
      // Locked, as another thread may free the buffer.
      if (const auto locked = reference.lock()) bytes += static_cast<int64_t>(locked->nbytes());
    }
    for (const at::Tensor& buffer : released) {
      if (storage_use_count(buffer) == 1) bytes -= static_cast<int64_t>(buffer.storage().nbytes());
    }
    return bytes;
  }

 private:
  static constexpr size_t kMinSweepSize = 16;

  std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
  size_t sweep_size_ = kMinSweepSize;
};

// Remove the memory of slices. Any later use of a slice, or of a view of it, raises with this text.
void invalidate(const std::vector<at::Tensor>& tensors, const std::string& error_text) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_TYPE(owner_of_slice(tensor) != nullptr, "only slices can be invalidated");
    c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
    storage.set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(error_text);
  }
}

}  // namespace
}  // namespace fddp

void bind_storage(py::module_& m) {
  py::class_<fddp::LiveViews>(m, "LiveViews")
      .def(py::init<>())
      .def("add", &fddp::LiveViews::add, py::arg("buffer"))
      .def("contains", &fddp::LiveViews::contains, py::arg("tensor"))
      .def("held_bytes", torch::wrap_pybind_function(&fddp::LiveViews::held_bytes), py::arg("released"));
  m.def("invalidate", torch::wrap_pybind_function(&fddp::invalidate), py::arg("tensors"), py::arg("error_text"));
  m.def("slices", torch::wrap_pybind_function([](const at::Tensor& buffer, const fddp::Layout& layout) {
    return fddp::to_list(fddp::slices(buffer, layout));
  }), py::arg("buffer"), py::arg("layout"));
  m.def("storage_use_count", torch::wrap_pybind_function(&fddp::storage_use_count), py::arg("tensor"));
}
