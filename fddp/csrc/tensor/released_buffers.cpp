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
    if (has_streams(buffer.device())) {
      const c10::Stream stream = current_stream(buffer.device());
      if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
      // The pool may drop the buffer, or be dropped, while work on this stream is in flight.
      buffer.record_stream(stream);
    }
    buffers_.push_back(std::move(buffer));
    if (buffers_.size() > kKept) buffers_.erase(buffers_.begin());
  }

  // Take the first buffer of this form whose memory has no other owner.
  std::optional<at::Tensor> take(int64_t numel, at::ScalarType dtype, at::Device device) {
    const auto found = std::find_if(buffers_.begin(), buffers_.end(), [&](const at::Tensor& buffer) {
      return buffer.numel() == numel && buffer.scalar_type() == dtype && buffer.device() == device &&
          storage_use_count(buffer) == 1;
    });
    if (found == buffers_.end()) return std::nullopt;
    if (has_streams(device)) wait_for(streams_);
    at::Tensor taken = std::move(*found);
    buffers_.erase(found);
    return taken;
  }

  // Take the buffer that was released last, and drop the others: its key needs no other.
  std::optional<at::Tensor> take_last() {
    if (buffers_.empty()) return std::nullopt;
    at::Tensor taken = std::move(buffers_.back());
    buffers_.clear();
    if (has_streams(taken.device())) wait_for(streams_);
    return taken;
  }

  // Drop the buffers that no view uses.
  void trim() {
    const auto is_free = [](const at::Tensor& buffer) { return storage_use_count(buffer) == 1; };
    buffers_.erase(std::remove_if(buffers_.begin(), buffers_.end(), is_free), buffers_.end());
  }

  const std::vector<at::Tensor>& buffers() const { return buffers_; }

 private:
  static constexpr size_t kKept = 2;  // older ones are freed with their last view

  std::vector<at::Tensor> buffers_;   // the last is the most recent
  std::vector<c10::Stream> streams_;  // on which buffers were released, and which may still read them
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
