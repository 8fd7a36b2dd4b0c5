#include "kept_slices.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <cstddef>
#include <unordered_map>
#include <utility>

#include "storage.h"

namespace py = pybind11;

namespace fddp {
namespace {

// Attribute of a buffer: list of its kept slices by slot, and None for those that were freed.
PyObject* attribute_name() {
  static PyObject* const name = PyUnicode_InternFromString("_fddp_slices");
  return name;
}

py::object python_object(const at::Tensor& tensor) {
  auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  if (!object) throw py::error_already_set();
  return object;
}

// Return the list of kept slices; null if there is none.
py::object kept_list(const py::object& buffer) {
  PyObject* list = nullptr;
  if (PyObject_GetOptionalAttr(buffer.ptr(), attribute_name(), &list) < 0) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(list);
}

// Return the list of kept slices for `size` slots. Make it if there is none of this size.
py::object kept_list_of_size(const at::Tensor& buffer, size_t size) {
  const py::object owner = python_object(buffer);
  py::object list = kept_list(owner);
  if (list && PyList_GET_SIZE(list.ptr()) == static_cast<Py_ssize_t>(size)) return list;
  list = py::list(size);  // of null pointers, which only this function sees
  for (size_t i = 0; i < size; ++i) PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(Py_None));
  if (PyObject_SetAttr(owner.ptr(), attribute_name(), list.ptr()) < 0) throw py::error_already_set();
  return list;
}

// Set an item of a list. Return the old one.
py::object exchange_item(const py::object& list, size_t i, PyObject* item) {
  PyObject* const old = PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i));
  PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(item));
  return py::reinterpret_steal<py::object>(old);
}

// Return true if an object has attributes, or something refers to its dictionary of them.
bool has_attributes(PyObject* object) {
  PyObject** const dict = _PyObject_GetDictPtr(object);
  return dict != nullptr && *dict != nullptr && (PyDict_GET_SIZE(*dict) != 0 || Py_REFCNT(*dict) != 1);
}

bool has_weak_references(PyObject* object) {
  const Py_ssize_t offset = Py_TYPE(object)->tp_weaklistoffset;  // negative from Python 3.12 on
  return offset != 0 && *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset) != nullptr;
}

// Return true if the tensor is still a slice of the buffer: its storage was not exchanged, and its
// memory not moved.
bool is_slice_of(const at::Tensor& tensor, const at::Tensor& buffer) {
  const c10::StorageImpl& owner = *buffer.storage().unsafeGetStorageImpl();
  if (owner_of_slice(tensor) != &owner) return false;
  const auto* const begin = static_cast<const char*>(owner.data());
  const auto* const memory = static_cast<const char*>(tensor.storage().data());
  if (begin == nullptr) return memory == nullptr;  // on the meta device
  return memory >= begin && memory + tensor.storage().nbytes() <= begin + owner.nbytes();
}

// Return true if a tensor that only the list refers to differs from a new one.
bool is_marked(PyObject* item, const at::Tensor& tensor) {
  const auto& fields = *reinterpret_cast<THPVariable*>(item);
  return Py_TYPE(item) != reinterpret_cast<PyTypeObject*>(THPVariableClass) || fields.backward_hooks != nullptr ||
      fields.post_accumulate_grad_hooks != nullptr || tensor.weak_use_count() != 1 ||
      tensor.unsafeGetTensorImpl()->autograd_meta() != nullptr || has_weak_references(item) || has_attributes(item);
}

// Return true if a slice of the buffer has the form and the place of a new slice for the slot. `keys`:
// dispatch keys of a new slice.
bool fits(const at::Tensor& tensor, const at::Tensor& buffer, const Slot& slot, c10::DispatchKeySet keys) {
  const auto item_bytes = static_cast<int64_t>(buffer.itemsize());
  const auto* const begin = static_cast<const char*>(buffer.const_data_ptr());
  return tensor.key_set() == keys && tensor.scalar_type() == buffer.scalar_type() && tensor.storage_offset() == 0 &&
      tensor.sizes() == at::IntArrayRef(slot.sizes) && tensor.strides() == at::IntArrayRef(slot.strides) &&
      tensor.storage().nbytes() == static_cast<size_t>(slot.numel * item_bytes) &&
      tensor.storage().data() == (begin == nullptr ? nullptr : begin + slot.offset * item_bytes);
}

// Return the dispatch keys of new slices, which depend on the device.
c10::DispatchKeySet keys_of_slices(const at::Tensor& buffer, const Slot& slot) {
  static std::unordered_map<c10::DeviceType, c10::DispatchKeySet> known;  // guarded by the GIL
  const auto found = known.find(buffer.device().type());
  if (found != known.end()) return found->second;
  return known[buffer.device().type()] = slice(buffer, slot).key_set();
}

// Use of a kept slice.
enum class Use { kUnused, kMarked, kInUse, kElsewhere };

Use use_of(PyObject* item, const at::Tensor& buffer) {
  const at::Tensor& tensor = THPVariable_Unpack(item);
  if (!is_slice_of(tensor, buffer)) return Use::kElsewhere;
  if (Py_REFCNT(item) != 1 || tensor.use_count() != 1) return Use::kInUse;
  if (is_marked(item, tensor)) return Use::kMarked;
  if (storage_use_count(tensor) != 1) return Use::kInUse;
  // The storage has an object in Python, which may have attributes.
  return tensor.storage().use_count() == 1 ? Use::kUnused : Use::kMarked;
}

}  // namespace

std::vector<py::object> kept_slices(const at::Tensor& buffer, const Layout& layout) {
  check_buffer(buffer, layout.numel());
  const c10::InferenceMode no_inference(false);
  const std::vector<Slot>& slots = layout.slots();
  const py::object kept = kept_list_of_size(buffer, slots.size());
  std::vector<py::object> freed;  // at the end, as this may run code of the caller
  std::vector<py::object> results;
  results.reserve(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    PyObject* item = PyList_GET_ITEM(kept.ptr(), static_cast<Py_ssize_t>(i));
    const bool is_usable = item != Py_None && use_of(item, buffer) == Use::kUnused &&
        fits(THPVariable_Unpack(item), buffer, slots[i], keys_of_slices(buffer, slots[i]));
    if (!is_usable) {
      const py::object made = python_object(slice(buffer, slots[i]));
      freed.push_back(exchange_item(kept, i, made.ptr()));
      item = made.ptr();
    } else if (THPVariable_Unpack(item)._version() != 0) {
      THPVariable_Unpack(item).unsafeGetTensorImpl()->set_version_counter(c10::VariableVersion(0));
    }
    results.push_back(py::reinterpret_borrow<py::object>(item));
  }
  return results;
}

MemoryUse memory_use(const at::Tensor& buffer, bool stop_at_owner) {
  MemoryUse use;
  const py::object list = kept_list(python_object(buffer));
  for (Py_ssize_t i = 0; list && i < PyList_GET_SIZE(list.ptr()); ++i) {
    PyObject* const item = PyList_GET_ITEM(list.ptr(), i);
    if (item == Py_None) continue;
    const Use found = use_of(item, buffer);
    use.unused += found == Use::kUnused;
    use.marked += found == Use::kMarked;
    use.has_owners |= found == Use::kInUse;
    if (use.has_owners && stop_at_owner) return use;
  }
  use.has_owners |= storage_use_count(buffer) != 1 + use.unused + use.marked;
  return use;
}

bool is_unused(const at::Tensor& buffer) { return !memory_use(buffer, /*stop_at_owner=*/true).has_owners; }

bool free_marked_slices(const at::Tensor& buffer) {
  {
    const py::object list = kept_list(python_object(buffer));
    std::vector<py::object> freed;
    for (Py_ssize_t i = 0; list && i < PyList_GET_SIZE(list.ptr()); ++i) {
      PyObject* const item = PyList_GET_ITEM(list.ptr(), i);
      const Use found = item == Py_None ? Use::kUnused : use_of(item, buffer);
      const bool is_freed = found == Use::kMarked || found == Use::kElsewhere;
      if (is_freed) freed.push_back(exchange_item(list, static_cast<size_t>(i), Py_None));
    }
  }
  const MemoryUse use = memory_use(buffer);
  return !use.has_owners && use.marked == 0;
}

}  // namespace fddp
