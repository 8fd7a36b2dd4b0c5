// A handler that XLA calls where a compiled program reduces over ranks. It lends the program's own
// memory to Python, which has operands copied into buckets, and sums from buckets into results.
//
// Compiled where jaxlib's header was found, see CMakeLists.txt; without it fddp.jax takes
// jaxlib's handler for Python callbacks. The header is a plain C interface whose versions XLA
// supports for a year and longer, and XLA compares versions when it meets the handler.

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

#if __has_include("xla/ffi/api/c_api.h")

#include <ATen/ATen.h>
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

constexpr std::string_view kNumber = "call";

// Kept until the process ends: programs may run while the interpreter is taken down.
PyObject* carry_out = nullptr;

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
    default: throw std::invalid_argument("XLA's dtype " + std::to_string(dtype) + " can't be summed");
  }
}

struct Piece {
  char* data;
  size_t nbytes;
};

// The arrays among `all`; tokens have no memory, and are left out.
std::vector<Piece> pieces(void* const* all, int64_t size) {
  std::vector<Piece> found;
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

// Memory that XLA lends while its program waits: operands to read, results to write.
class Loan {
 public:
  explicit Loan(const XLA_FFI_CallFrame& frame)
      : operands_(pieces(frame.args.args, frame.args.size)),
        results_(pieces(frame.rets.rets, frame.rets.size)) {}

  // Operands, one behind the other, into a buffer of their size.
  void pack(const at::Tensor& buffer, const std::vector<size_t>& members) const {
    char* to = start(buffer, operands_, members);
    py::gil_scoped_release unlocked;
    for (const size_t member : members) {
      copy(to, operands_[member].data, operands_[member].nbytes);
      to += operands_[member].nbytes;
    }
  }

  // Results from such a buffer.
  void unpack(const at::Tensor& buffer, const std::vector<size_t>& members) const {
    const char* from = start(buffer, results_, members);
    py::gil_scoped_release unlocked;
    for (const size_t member : members) {
      copy(results_[member].data, from, results_[member].nbytes);
      from += results_[member].nbytes;
    }
  }

  void end() {
    operands_.clear();
    results_.clear();
  }

 private:
  static void copy(char* to, const char* from, size_t nbytes) {
    if (nbytes > 0) {  // empty arrays have no address
      std::memcpy(to, from, nbytes);
    }
  }

  static char* start(
      const at::Tensor& buffer,
      const std::vector<Piece>& lent,
      const std::vector<size_t>& members) {
    size_t nbytes = 0;
    for (const size_t member : members) {
      nbytes += lent.at(member).nbytes;  // throws where the loan has ended
    }
    if (!buffer.is_cpu() || !buffer.is_contiguous() || buffer.nbytes() != nbytes) {
      throw std::invalid_argument(
          "a buffer of " + std::to_string(buffer.nbytes()) + " bytes for arrays of " +
          std::to_string(nbytes));
    }
    return static_cast<char*>(buffer.data_ptr());
  }

  std::vector<Piece> operands_;
  std::vector<Piece> results_;
};

int64_t number(const XLA_FFI_Attrs& attrs) {
  for (int64_t i = 0; i < attrs.size; ++i) {
    if (std::string_view(attrs.names[i]->ptr, attrs.names[i]->len) == kNumber &&
        attrs.types[i] == XLA_FFI_AttrType_SCALAR) {
      return *static_cast<const int64_t*>(static_cast<const XLA_FFI_Scalar*>(attrs.attrs[i])->value);
    }
  }
  throw std::invalid_argument("a reduction without its number");
}

// Empty, or what went wrong.
std::string execute(const XLA_FFI_CallFrame& frame) {
  try {
    const auto loan = std::make_shared<Loan>(frame);
    // Whoever still has the loan then can't reach what is XLA's again.
    const std::unique_ptr<Loan, void (*)(Loan*)> ended(loan.get(), [](Loan* l) { l->end(); });
    py::gil_scoped_acquire gil;
    const py::object problem =
        py::reinterpret_borrow<py::object>(carry_out)(number(frame.attrs), loan);
    return problem.is_none() ? std::string() : problem.cast<std::string>();
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
  const std::string problem = execute(*frame);
  if (problem.empty()) {
    return nullptr;
  }
  XLA_FFI_Error_Create_Args args{
      XLA_FFI_Error_Create_Args_STRUCT_SIZE,
      nullptr,
      problem.c_str(),
      XLA_FFI_Error_Code_ABORTED};
  return frame->api->XLA_FFI_Error_Create(&args);
}

}  // namespace
}  // namespace fddp

void bind_xla_ffi(py::module_& m) {
  using fddp::Loan;
  py::class_<Loan, std::shared_ptr<Loan>>(m, "XlaLoan")
      .def("pack", &Loan::pack, py::arg("buffer"), py::arg("members"))
      .def("unpack", &Loan::unpack, py::arg("buffer"), py::arg("members"));
  m.def(
      "xla_handler",
      [](py::function fn) {
        Py_XDECREF(fddp::carry_out);
        fddp::carry_out = fn.release().ptr();
        return py::capsule(reinterpret_cast<void*>(&fddp::handle));
      },
      py::arg("carry_out"),
      "The handler that XLA is to call, as a capsule; None where it was not compiled.\n\n"
      "It calls `carry_out(number, loan)`: the attribute \"call\" of the operation, and the\n"
      "operation's memory, lent until it returns. A text that it returns is the program's error.");
}

#else

void bind_xla_ffi(py::module_& m) {
  m.def("xla_handler", [](const py::function&) { return py::none(); }, py::arg("carry_out"));
}

#endif
