// Backends of torch.distributed for the device, which call gloo on a stream of their own: "lag", and a
// double of NCCL's.

#include "device.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>

#include <atomic>
#include <future>
#include <mutex>
#include <unordered_map>
#include <thread>

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
    forbid_in_captures("query of an event");
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

using Gloo = c10::intrusive_ptr<c10d::Backend>;

class StreamBackend : public c10d::Backend {
 public:
  using Backend::Backend;

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
    return gloo_on(c10::impl::VirtualGuardImpl(kLag).getDevice())->barrier(plain);
  }

 protected:
  // The backend that carries out the operations on tensors of a device.
  virtual Gloo gloo_on(c10::Device device) = 0;

  // Block the thread of a stream until an operation has ended.
  virtual void await(c10::intrusive_ptr<c10d::Work> work) {
    work->wait();
  }

  bool is_busy() const {
    return last_ && !last_->is_over();
  }

  void wait_for_streams() {
    for (const auto& [device, stream] : streams_) {
      wait_for(stream, "");
    }
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
    for (const Tensors* tensors : {&std::as_const(outputs), &inputs}) {
      for (const auto& tensor : *tensors) {
        TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
        TORCH_CHECK(tensor.device() == device, "Tensors must be on one device");
      }
    }
    const auto gloo = gloo_on(device);
    auto& stream = streams_.try_emplace(device.index(), new_stream(device)).first->second;
    hold(stream, end_of(current_stream(device.index())));
    Tensors kept = outputs;
    kept.insert(kept.end(), inputs.begin(), inputs.end());
    auto work = c10::make_intrusive<LagWork>(stream, std::move(outputs), std::move(kept));
    const auto self = c10::intrusive_ptr<StreamBackend>::unsafe_reclaim_from_nonowning(this);
    // Those of a graph don't keep the tensors, and their errors are those of the device.
    const auto failing = recording_of(stream) ? nullptr : work;
    on_stream(stream, [self, failing, operation = std::move(operation), gloo](const c10::Stream& own) {
      self->send(own, failing, operation, gloo);
    });
    work->begun();
    return work;
  }

  void send(
      const c10::Stream& stream,
      const c10::intrusive_ptr<LagWork>& work,
      const Operation& operation,
      const Gloo& gloo) {
    if (last_) {
      hold(stream, *last_); // gloo matches the operations of ranks by their order, as NCCL those of graphs
    }
    for (int i = 0; i < 20; ++i) {
      issue(stream, [] {}); // each with a delay: a network is slow
    }
    const auto self = c10::intrusive_ptr<StreamBackend>::unsafe_reclaim_from_nonowning(this);
    issue(stream, [self, work, operation, gloo] {
      try {
        self->await(operation(*gloo));
      } catch (const std::exception& error) {
        if (!work) {
          throw;
        }
        work->fail(error.what());
      }
    });
    last_ = end_of(stream);
  }

  static c10::Stream new_stream(c10::Device device) {
    return c10::impl::VirtualGuardImpl(kLag).getNewStream(device);
  }

  std::unordered_map<int, c10::Stream> streams_;
  std::optional<Moment> last_; // the end of the operation that was issued last
};

// "lag", or one with limits: "basic" is without averages, reduce-scatter and gathers in place, and "sums"
// takes averages for sums.
class LagBackend final : public StreamBackend {
 public:
  LagBackend(Gloo gloo, std::string kind)
      : StreamBackend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), kind_(std::move(kind)) {}

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options)
      override {
    if (options.reduceOp != c10d::ReduceOp::AVG) {
      return StreamBackend::allreduce(tensors, options);
    }
    TORCH_CHECK(kind_ != "basic", "Cannot use ReduceOp.AVG with basic");
    auto own = options;
    own.reduceOp = kind_ == "sums" ? c10d::ReduceOp::SUM : c10d::ReduceOp::AVG;
    return StreamBackend::allreduce(tensors, own);
  }

  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options)
      override {
    for (const auto& output : outputs.at(0)) {
      const bool is_in_place = output.is_alias_of(inputs.at(0));
      TORCH_CHECK(kind_ != "basic" || !is_in_place, "basic can't gather in place");
    }
    return StreamBackend::allgather(outputs, inputs, options);
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(kind_ != "basic", "Backend basic does not support _reduce_scatter_base");
    return StreamBackend::_reduce_scatter_base(output, input, options);
  }

  const std::string getBackendName() const override {
    return "lag";
  }

 protected:
  Gloo gloo_on(c10::Device) override {
    return gloo_;
  }

 private:
  Gloo gloo_;
  std::string kind_;
};

// A double of ProcessGroupNCCL: it connects at the first operation on a device, or splits an earlier one.

struct NcclConfig {
  int min_ctas = -1, max_ctas = -1, cga_cluster_size = -1;
};

struct NcclOptions final : c10d::Backend::Options {
  explicit NcclOptions(bool is_high_priority_stream)
      : Options("nccl"), is_high_priority_stream(is_high_priority_stream) {}

  bool is_high_priority_stream;
  NcclConfig config;
  c10::intrusive_ptr<c10d::Backend> split_from;
  int split_color = -2;
};

std::mutex connections_lock;
std::vector<std::string> connections; // since the last call of `take_connections`
std::vector<std::string> ends; // of connected backends, since the last call of `take_ends`

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Connect = std::function<Gloo(StorePtr, int, int, std::chrono::milliseconds)>;
Connect connect_gloo;

class NcclBackend final : public StreamBackend {
 public:
  NcclBackend(StorePtr store, int rank, int size, c10::intrusive_ptr<NcclOptions> options)
      : StreamBackend(rank, size), store_(std::move(store)), options_(std::move(options)) {}

  const std::string getBackendName() const override {
    return "nccl";
  }

  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options_;
  }

  bool supportsSplitting() const override {
    return true;
  }

  void setSequenceNumberForGroup() override {}

  void eagerConnectSingleDevice(at::Device device) override {
    gloo_on(device);
  }

  void performNocolorSplit(at::Device device) {
    gloo_on(device);
    ++splits_;
  }

  int splits() const {
    return splits_;
  }

  bool isInitialized() {
    std::lock_guard lock(lock_);
    return !connected_.empty();
  }

  // As of NCCL: kernels in flight end at once.
  void abort() override {
    ended_ = 1;
    at_end("aborted");
  }

  // As of NCCL: waits for the kernels in flight.
  void shutdown() override {
    wait_for_streams();
    if (ended_ == 0) {
      ended_ = 2;
    }
    at_end("shut down");
  }

 protected:
  Gloo gloo_on(c10::Device device) override {
    TORCH_CHECK(ended_ != 1, "NCCL communicator was aborted on rank ", getRank(), ".");
    TORCH_CHECK(ended_ == 0, "NCCL communicator was destroyed on rank ", getRank(), ".");
    std::lock_guard lock(lock_);
    auto& found = connected_[device.index()];
    if (!found) {
      forbid_in_captures("connecting ranks");
      found = connect(device.index());
    }
    return found;
  }

  void await(c10::intrusive_ptr<c10d::Work> work) override {
    // On a thread of its own: gloo can't abort an operation.
    auto waiting = std::make_shared<std::packaged_task<void()>>([work] { work->wait(); });
    auto done = waiting->get_future();
    std::thread([waiting] { (*waiting)(); }).detach();
    while (done.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready) {
      TORCH_CHECK(ended_ != 1, "NCCL communicator was aborted on rank ", getRank(), ".");
    }
    done.get();
  }

 private:
  Gloo connect(int index) {
    auto* parent = dynamic_cast<NcclBackend*>(options_->split_from.get());
    auto store = store_;
    auto name = c10::str("device ", index);
    if (parent != nullptr && parent->isInitialized()) {
      // A collective of all ranks of the parent, matched by order. NCCL may deadlock.
      TORCH_CHECK(!parent->is_busy(), "NCCL communicator was split with operations in flight");
      store = parent->store_;
      name = c10::str("split ", parent->splits_++, " color ", options_->split_color);
    }
    {
      std::lock_guard lock(connections_lock);
      connections.push_back(c10::str(
          parent == nullptr ? "new" : "split", " on ", index, ", priority ",
          options_->is_high_priority_stream, ", min_ctas ", options_->config.min_ctas, ", timeout ",
          options_->timeout.count() / 1000, " s"));
    }
    const auto own = c10::make_intrusive<c10d::PrefixStore>(name, store);
    return connect_gloo(own, getRank(), getSize(), options_->timeout);
  }

  void at_end(const char* how) {
    if (isInitialized()) {
      std::lock_guard lock(connections_lock);
      ends.emplace_back(how);
    }
    // Never freed: gloo would wait for the operations of other ranks.
    static auto& kept = *new std::vector<std::unordered_map<int, Gloo>>;
    std::lock_guard lock(lock_);
    kept.push_back(connected_);
    connected_.clear();
  }

  StorePtr store_;
  c10::intrusive_ptr<NcclOptions> options_;
  std::mutex lock_;
  std::unordered_map<int, Gloo> connected_; // by device
  std::atomic<int> splits_{0};
  std::atomic<int> ended_{0}; // 1: aborted, 2: shut down
};

} // namespace

void bind(pybind11::module& module) {
  namespace py = pybind11;
  py::module_::import("torch.distributed");
  py::class_<LagBackend, c10d::Backend, c10::intrusive_ptr<LagBackend>>(module, "LagBackend")
      .def(py::init<Gloo, std::string>(), py::arg("gloo"), py::arg("kind"))
      .def_property_readonly("options", [](const LagBackend&) { return py::none(); });
  // An occurrence for which a stream waits until the host ends it.
  py::class_<Moment>(module, "Moment").def(py::init<>()).def("end", &Moment::end);
  module.def("hold", [](c10::DeviceIndex device, const Moment& moment) {
    hold(current_stream(device), moment);
  }, py::arg("device"), py::arg("moment"));
  py::class_<NcclBackend, c10d::Backend, c10::intrusive_ptr<NcclBackend>> nccl(module, "ProcessGroupNCCL");
  py::class_<NcclConfig>(nccl, "NCCLConfig")
      .def_readwrite("min_ctas", &NcclConfig::min_ctas)
      .def_readwrite("max_ctas", &NcclConfig::max_ctas)
      .def_readwrite("cga_cluster_size", &NcclConfig::cga_cluster_size);
  py::class_<NcclOptions, c10d::Backend::Options, c10::intrusive_ptr<NcclOptions>>(nccl, "Options")
      .def(py::init<bool>(), py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &NcclOptions::is_high_priority_stream)
      .def_readwrite("config", &NcclOptions::config)
      .def_readwrite("split_from", &NcclOptions::split_from)
      .def_readwrite("split_color", &NcclOptions::split_color);
  nccl.def(
          py::init<StorePtr, int, int, c10::intrusive_ptr<NcclOptions>>(),
          py::arg("store"),
          py::arg("rank"),
          py::arg("size"),
          py::arg("options"))
      .def_property_readonly(
          "options", [](NcclBackend& self) { return self.getBackendOptions(); })
      .def("perform_nocolor_split", &NcclBackend::performNocolorSplit, py::call_guard<py::gil_scoped_release>())
      .def("comm_split_count", &NcclBackend::splits);
  module.def("take_connections", [] {
    std::lock_guard lock(connections_lock);
    return std::exchange(connections, {});
  });
  module.def("take_ends", [] {
    std::lock_guard lock(connections_lock);
    return std::exchange(ends, {});
  });
  module.def("set_connect", [](py::object connect) {
    connect_gloo = [connect = connect.release()](
                       StorePtr store, int rank, int size, std::chrono::milliseconds timeout) {
      const py::gil_scoped_acquire gil;
      return connect(store, rank, size, timeout).cast<Gloo>();
    };
  });
  module.def("is_current_stream_capturing", [] {
    const auto device = c10::impl::VirtualGuardImpl(kLag).getDevice();
    return recording_of(current_stream(device.index())) != nullptr;
  });
  module.def("take_waits", &take_waits);
  module.def("take_counts", &take_counts);
  module.def("seed", &seed, py::arg("number"), py::arg("scale") = 1.0);
}

} // namespace lag

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  lag::bind(module);
}
