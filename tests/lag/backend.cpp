// A backend of torch.distributed for the device: gloo, called on a stream of its own.

#include "device.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <mutex>
#include <unordered_map>

namespace lag {
namespace {

using Tensors = std::vector<at::Tensor>;
using Operands = std::vector<Operand>;

Operands operands(const Tensors& tensors) {
  return {tensors.begin(), tensors.end()};
}

Tensors on_host(const Operands& operands) {
  Tensors found;
  for (const auto& operand : operands) {
    found.push_back(operand.on_host());
  }
  return found;
}

// As of NCCL: `wait` makes the current stream wait, and the work keeps its tensors until then.
class LagWork final : public c10d::Work {
 public:
  LagWork(c10::Stream stream, Tensors outputs, Tensors kept)
      : stream_(stream), outputs_(std::move(outputs)), kept_(std::move(kept)) {}

  void begun() {
    end_ = end_of(stream_);
    const c10::StreamGuard guard(stream_);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream_.device()});
    future_->markCompleted(c10::IValue(outputs_));
  }

  bool isCompleted() override {
    return end_.is_over();
  }

  bool isSuccess() const override {
    return end_.is_over() && error_.empty();
  }

  bool wait(std::chrono::milliseconds) override {
    count("waits", 1);
    hold(current_stream(stream_.device_index()), end_);
    std::lock_guard lock(lock_);
    kept_.clear();
    TORCH_CHECK(error_.empty(), error_);
    return true;
  }

  void synchronize() override {
    wait(kNoTimeout);
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

  std::vector<at::Tensor> result() override {
    return outputs_;
  }

  void fail(const std::string& error) {
    std::lock_guard lock(lock_);
    error_ = error;
  }

 private:
  c10::Stream stream_;
  Tensors outputs_, kept_;
  Moment end_;
  std::mutex lock_;
  std::string error_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class LagBackend final : public c10d::Backend {
 public:
  explicit LagBackend(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "lag";
  }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options)
      override {
    return start(tensors, tensors, [=, to = operands(tensors)](c10d::Backend& gloo) {
      Tensors host = on_host(to);
      return gloo.allreduce(host, options);
    });
  }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options)
      override {
    return start(tensors, tensors, [=, to = operands(tensors)](c10d::Backend& gloo) {
      Tensors host = on_host(to);
      return gloo.broadcast(host, options);
    });
  }

  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options)
      override {
    const auto from = operands(inputs), to = operands(outputs.at(0));
    return start(outputs.at(0), inputs, [=](c10d::Backend& gloo) {
      std::vector<Tensors> arrived{on_host(to)};
      Tensors host = on_host(from);
      return gloo.allgather(arrived, host, options);
    });
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return start({output}, {input}, [=, from = Operand(input), to = Operand(output)](auto& gloo) {
      auto arrived = to.on_host(), host = from.on_host();
      return gloo._allgather_base(arrived, host, options);
    });
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return start({output}, {input}, [=, from = Operand(input), to = Operand(output)](auto& gloo) {
      auto arrived = to.on_host(), host = from.on_host();
      return gloo._reduce_scatter_base(arrived, host, options);
    });
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& received,
      std::vector<int64_t>& sent,
      const c10d::AllToAllOptions& options) override {
    return start({output}, {input}, [=, from = Operand(input), to = Operand(output)](auto& gloo) {
      auto arrived = to.on_host(), host = from.on_host();
      auto sizes_in = received, sizes_out = sent;
      return gloo.alltoall_base(arrived, host, sizes_in, sizes_out, options);
    });
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    c10d::BarrierOptions plain;
    plain.timeout = options.timeout;
    return gloo_->barrier(plain);
  }

 private:
  using Operation = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>;

  c10::intrusive_ptr<c10d::Work> start(Tensors outputs, const Tensors& inputs, Operation operation) {
    const auto device = outputs.at(0).device();
    size_t nbytes = 0;
    for (const auto& tensor : outputs) {
      nbytes += tensor.nbytes();
    }
    count("collectives", 1, nbytes);
    auto& stream = streams_.try_emplace(device.index(), new_stream(device)).first->second;
    hold(stream, end_of(current_stream(device.index())));
    if (last_) {
      hold(stream, *last_); // gloo matches the operations of ranks by their order
    }
    for (int i = 0; i < 20; ++i) {
      issue(stream, [] {}); // each with a delay: a network is slow
    }
    Tensors kept = outputs;
    kept.insert(kept.end(), inputs.begin(), inputs.end());
    auto work = c10::make_intrusive<LagWork>(stream, std::move(outputs), std::move(kept));
    issue(stream, [work, operation = std::move(operation), gloo = gloo_] {
      try {
        operation(*gloo)->wait();
      } catch (const std::exception& error) {
        work->fail(error.what());
      }
    });
    work->begun();
    last_ = end_of(stream);
    return work;
  }

  static c10::Stream new_stream(c10::Device device) {
    return c10::impl::VirtualGuardImpl(kLag).getNewStream(device);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::unordered_map<int, c10::Stream> streams_;
  std::optional<Moment> last_; // the end of the operation that was issued last
};

} // namespace

void bind(pybind11::module& module) {
  namespace py = pybind11;
  py::module_::import("torch.distributed");
  py::class_<LagBackend, c10d::Backend, c10::intrusive_ptr<LagBackend>>(module, "LagBackend")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>(), py::arg("gloo"))
      .def_property_readonly("options", [](const LagBackend&) { return py::none(); });
  // An occurrence for which a stream waits until the host ends it.
  py::class_<Moment>(module, "Moment").def(py::init<>()).def("end", &Moment::end);
  module.def("hold", [](c10::DeviceIndex device, const Moment& moment) {
    hold(current_stream(device), moment);
  }, py::arg("device"), py::arg("moment"));
  module.def("take_waits", &take_waits);
  module.def("take_counts", &take_counts);
  module.def("seed", &seed, py::arg("number"), py::arg("scale") = 1.0);
}

} // namespace lag

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  lag::bind(module);
}
