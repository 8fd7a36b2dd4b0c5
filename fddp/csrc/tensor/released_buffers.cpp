// Released buffers of one key of a pool, see [Note: results are values] in native/buffer_pool.py.

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "tensor/python_lists.h"
#include "tensor/storage.h"
#include "tensor/streams.h"

namespace py = pybind11;

namespace fddp {
namespace {

class ReleasedBuffers {
 public:
  void add(at::Tensor buffer) {
    Released released{std::move(buffer), {}};
    if (has_streams(released.buffer.device())) {
      released.streams.push_back(current_stream(released.buffer.device()));
      // The pool may drop the buffer, or be dropped, while work on this stream is in flight.
      released.buffer.record_stream(released.streams.back());
    }
    released_.push_back(std::move(released));
    if (released_.size() > kKept) released_.erase(released_.begin());
  }

  // Take the first buffer of this form whose memory has no other owner.
  std::optional<at::Tensor> take(int64_t numel, at::ScalarType dtype, at::Device device) {
    const auto found = std::find_if(released_.begin(), released_.end(), [&](const Released& released) {
      const at::Tensor& buffer = released.buffer;
      return buffer.numel() == numel && buffer.scalar_type() == dtype && buffer.device() == device &&
          storage_use_count(buffer) == 1;
    });
    if (found == released_.end()) return std::nullopt;
    Released taken = std::move(*found);
    released_.erase(found);
    return usable(std::move(taken));
  }

  // Take the buffer that was released last, and drop the others: its key needs no other.
  std::optional<at::Tensor> take_last() {
    if (released_.empty()) return std::nullopt;
    Released taken = std::move(released_.back());
    released_.clear();
    return usable(std::move(taken));
  }

  // Drop the buffers that no view uses.
  void trim() {
    const auto is_free = [](const Released& released) { return storage_use_count(released.buffer) == 1; };
    released_.erase(std::remove_if(released_.begin(), released_.end(), is_free), released_.end());
  }

  std::vector<at::Tensor> buffers() const {
    std::vector<at::Tensor> buffers;
    for (const Released& released : released_) buffers.push_back(released.buffer);
    return buffers;
  }

 private:
  static constexpr size_t kKept = 2;  // older ones are freed with their last view

  struct Released {
    at::Tensor buffer;
    std::vector<c10::Stream> streams;  // the one on which it was released; none on the CPU
  };

  // Return a buffer for the current stream, after what that of the release was given: it may still
  // read the buffer.
  static at::Tensor usable(Released released) {
    wait_for(released.streams);
    // The step may fail, and drop the buffer, while work on this stream is in flight.
    if (!released.streams.empty()) released.buffer.record_stream(current_stream(released.buffer.device()));
    return std::move(released.buffer);
  }

  std::vector<Released> released_;  // the last is the most recent
};

}  // namespace
}  // namespace fddp

void bind_released_buffers(py::module_& m) {
  using fddp::ReleasedBuffers;
  py::class_<ReleasedBuffers>(m, "ReleasedBuffers")
      .def(py::init<>())
      .def("add", torch::wrap_pybind_function(&ReleasedBuffers::add), py::arg("buffer"))
      .def("take", torch::wrap_pybind_function(&ReleasedBuffers::take), py::arg("numel"), py::arg("dtype"),
           py::arg("device"))
      .def("take_last", torch::wrap_pybind_function(&ReleasedBuffers::take_last))
      .def("trim", torch::wrap_pybind_function(&ReleasedBuffers::trim))
      .def("buffers", [](const ReleasedBuffers& self) { return fddp::to_list(self.buffers()); });
}
