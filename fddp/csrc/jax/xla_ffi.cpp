// Handler of XLA custom calls that reduce over ranks. It exposes the memory of the compiled program
// to Python, which copies operands into buckets and results out of them.
//
// Compiled if the header of jaxlib was found, see CMakeLists.txt. Otherwise fddp.jax uses jaxlib's
// handler for Python callbacks. The header is a plain C interface. XLA supports each version for at
// least a year and checks the version when the handler is registered.

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

#if __has_include("xla/ffi/api/c_api.h")

#include <ATen/core/Tensor.h>
#include <xla/ffi/api/c_api.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace fddp {
namespace {

constexpr std::string_view kCallNumber = "call";

// Never released: programs may run during interpreter shutdown.
PyObject* callback = nullptr;

int64_t item_bytes(XLA_FFI_DataType dtype) {
  switch (dtype) {
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8: return 1;
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16: return 2;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_F32: return 4;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_C64: return 8;
    case XLA_FFI_DataType_C128: return 16;
    default: throw std::invalid_argument("cannot reduce XLA dtype " + std::to_string(dtype));
  }
}

struct Array {
  char* data;
  size_t nbytes;
};

// Return the arrays among `all`. Tokens have no memory and are skipped.
std::vector<Array> arrays(void* const* all, int64_t size) {
  std::vector<Array> found;
  found.reserve(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) {
    const auto& buffer = *static_cast<const XLA_FFI_Buffer*>(all[i]);
    if (buffer.dtype == XLA_FFI_DataType_TOKEN) {
      continue;
    }
    int64_t nbytes = item_bytes(buffer.dtype);
    for (int64_t axis = 0; axis < buffer.rank; ++axis) {
      nbytes *= buffer.dims[axis];
    }
    found.push_back({static_cast<char*>(buffer.data), static_cast<size_t>(nbytes)});
  }
  return found;
}

// Memory of a compiled program during a call: operands to read and results to write.
class BorrowedBuffers {
 public:
  explicit BorrowedBuffers(const XLA_FFI_CallFrame& frame)
      : operands_(arrays(frame.args.args, frame.args.size)),
        results_(arrays(frame.rets.rets, frame.rets.size)) {}

  // Copy operands, one after the other, into a buffer of their total size.
  void pack(const at::Tensor& buffer, const std::vector<size_t>& members) const {
    char* to = checked_data(buffer, operands_, members);
    py::gil_scoped_release unlocked;
    for (const size_t member : members) {
      copy(to, operands_[member].data, operands_[member].nbytes);
      to += operands_[member].nbytes;
    }
  }

  // Copy such a buffer into results.
  void unpack(const at::Tensor& buffer, const std::vector<size_t>& members) const {
    const char* from = checked_data(buffer, results_, members);
    py::gil_scoped_release unlocked;
    for (const size_t member : members) {
      copy(results_[member].data, from, results_[member].nbytes);
      from += results_[member].nbytes;
    }
  }

  void expire() {
    operands_.clear();
    results_.clear();
  }

 private:
  static void copy(char* to, const char* from, size_t nbytes) {
    if (nbytes > 0) {  // empty arrays may have a null address
      std::memcpy(to, from, nbytes);
    }
  }

  static char* checked_data(
      const at::Tensor& buffer,
      const std::vector<Array>& arrays,
      const std::vector<size_t>& members) {
    size_t nbytes = 0;
    for (const size_t member : members) {
      nbytes += arrays.at(member).nbytes;  // throws if the buffers have expired
    }
    if (!buffer.is_cpu() || !buffer.is_contiguous() || buffer.nbytes() != nbytes) {
      throw std::invalid_argument(
          "expected a contiguous CPU buffer of " + std::to_string(nbytes) + " bytes, got " +
          std::to_string(buffer.nbytes()));
    }
    return static_cast<char*>(buffer.data_ptr());
  }

  std::vector<Array> operands_;
  std::vector<Array> results_;
};

int64_t call_number(const XLA_FFI_Attrs& attrs) {
  for (int64_t i = 0; i < attrs.size; ++i) {
    if (std::string_view(attrs.names[i]->ptr, attrs.names[i]->len) == kCallNumber &&
        attrs.types[i] == XLA_FFI_AttrType_SCALAR) {
      const auto& scalar = *static_cast<const XLA_FFI_Scalar*>(attrs.attrs[i]);
      return *static_cast<const int64_t*>(scalar.value);
    }
  }
  throw std::invalid_argument("the custom call has no scalar attribute 'call'");
}

// Run the callback. Return the text of the error, or an empty string.
std::string execute(const XLA_FFI_CallFrame& frame) {
  try {
    const auto buffers = std::make_shared<BorrowedBuffers>(frame);
    // References that outlive the call can no longer access memory of XLA.
    const std::unique_ptr<BorrowedBuffers, void (*)(BorrowedBuffers*)> expire_at_exit(
        buffers.get(), [](BorrowedBuffers* borrowed) { borrowed->expire(); });
    py::gil_scoped_acquire gil;
    const py::object error_text =
        py::reinterpret_borrow<py::object>(callback)(call_number(frame.attrs), buffers);
    return error_text.is_none() ? std::string() : error_text.cast<std::string>();
  } catch (const std::exception& error) {
    return error.what();
  }
}

XLA_FFI_Error* handle(XLA_FFI_CallFrame* frame) {
  for (auto* extension = frame->extension_start; extension; extension = extension->next) {
    if (extension->type == XLA_FFI_Extension_Metadata) {
      auto& metadata = *reinterpret_cast<XLA_FFI_Metadata_Extension*>(extension)->metadata;
      metadata.api_version.major_version = XLA_FFI_API_MAJOR;
      metadata.api_version.minor_version = XLA_FFI_API_MINOR;
      metadata.traits = 0;
      return nullptr;
    }
  }
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) {
    return nullptr;
  }
  const std::string error_text = execute(*frame);
  if (error_text.empty()) {
    return nullptr;
  }
  XLA_FFI_Error_Create_Args args{
      XLA_FFI_Error_Create_Args_STRUCT_SIZE,
      nullptr,
      error_text.c_str(),
      XLA_FFI_Error_Code_ABORTED};
  return frame->api->XLA_FFI_Error_Create(&args);
}

}  // namespace
}  // namespace fddp

void bind_xla_ffi(py::module_& m) {
  using fddp::BorrowedBuffers;
  py::class_<BorrowedBuffers, std::shared_ptr<BorrowedBuffers>>(m, "XlaBorrowedBuffers")
      .def("pack", &BorrowedBuffers::pack, py::arg("buffer"), py::arg("members"))
      .def("unpack", &BorrowedBuffers::unpack, py::arg("buffer"), py::arg("members"));
  m.def(
      "xla_handler",
      [](py::function fn) {
        Py_XDECREF(fddp::callback);
        fddp::callback = fn.release().ptr();
        return py::capsule(reinterpret_cast<void*>(&fddp::handle));
      },
      py::arg("callback"),
      "Return the XLA custom call handler as a capsule. None if it was not compiled.\n\n"
      "The handler calls `callback(number, buffers)` with the attribute \"call\" of the operation\n"
      "and its operands and results, which are valid until the callback returns. The callback\n"
      "returns None, or the text of the error that the program fails with.");
}

#else

void bind_xla_ffi(py::module_& m) {
  m.def("xla_handler", [](const py::function&) { return py::none(); }, py::arg("callback"));
}

#endif
