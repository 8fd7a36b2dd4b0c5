#include "backward_watch.h"

#include <Python.h>

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#if FDDP_HAS_RPC
#include <torch/csrc/distributed/autograd/context/context.h>
#endif

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <utility>

#include "clock.h"
#include "python_entry.h"
#include "tensor/python_lists.h"

namespace py = pybind11;
using torch::autograd::FunctionPreHook;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;

namespace fddp {

// Callback at the end of a backward pass. The graph task frees it without a call if the pass is
// aborted. Until then it keeps the driver alive.
class EndOfBackward {
 public:
  EndOfBackward(std::shared_ptr<BackwardWatch> watch, py::object driver)
      : watch_(std::move(watch)), driver_(std::move(driver)) {}
  EndOfBackward(const EndOfBackward&) = delete;
  EndOfBackward& operator=(const EndOfBackward&) = delete;

  // May run in any thread that frees the last reference to the graph task.
  ~EndOfBackward() {
    if (Py_IsInitialized() == 0) {
      driver_.release();  // leaked: the interpreter is being shut down
      return;
    }
    const PythonEntry python;
    const py::error_scope error;
    try {
      if (is_current()) {
        watch_->end_ = nullptr;
        watch_->news_ |= BackwardWatch::kPassAborted;
        watch_->takes_outputs_ = false;  // until the driver has seen it
        driver_.attr("on_abort")();
      }
    } catch (py::error_already_set& raised) {
      raised.discard_as_unraisable("the end of an aborted backward pass");
    }
    driver_ = {};
    watch_.reset();
  }

  void run() {
    const PythonEntry python;
    if (!is_current()) return;
    watch_->end_ = nullptr;
    driver_.attr("on_end")();
  }

 private:
  bool is_current() const { return watch_->end_ == this; }

  std::shared_ptr<BackwardWatch> watch_;
  py::object driver_;
};

namespace {

// Return true if the current backward pass computes gradients of given inputs only, as
// autograd.grad does. Other gradients are left unchanged then.
bool has_explicit_inputs() {
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  return info != nullptr && !info->empty();
}

// Return true within a backward pass that compiled autograd runs.
bool is_compiled() {
  static PyObject* const name = PyUnicode_InternFromString("torch._dynamo.compiled_autograd");
  PyObject* const module = PyDict_GetItem(PyImport_GetModuleDict(), name);
  return module != nullptr && py::bool_(py::handle(module).attr("in_compiled_autograd_region"));
}

// Return the context of distributed autograd that the backward pass belongs to, if any. Gradients
// are accumulated there instead of in `.grad`.
std::optional<int64_t> distributed_context() {
#if FDDP_HAS_RPC
  const auto context = torch::distributed::autograd::ThreadLocalDistAutogradContext::getContextPtr();
  if (context) return context->contextId();
#endif
  return std::nullopt;
}

// Return false for zeros. Those of other devices are not looked at, because that would wait for them.
bool may_bring_gradients(const at::Tensor& grad) {
  if (!grad.defined()) return false;
  return !grad.device().is_cpu() || grad.layout() != at::kStrided || at::any(grad).item<bool>();
}

// Hook on the node of an output of a forward pass within `no_sync`.
class AllowedOutputHook : public FunctionPreHook {
 public:
  explicit AllowedOutputHook(std::weak_ptr<BackwardWatch> watch) : watch_(std::move(watch)) {}

  variable_list operator()(const variable_list& grads) override {
    const PythonEntry python;
    if (const auto watch = watch_.lock()) watch->reach_allowed_output(grads);
    return grads;
  }
  void compiled_args(CompiledNodeArgs&) const override {}  // no gradient is reported there

 private:
  std::weak_ptr<BackwardWatch> watch_;
};

// Hook on the node of an output.
class OutputHook : public FunctionPreHook {
 public:
  OutputHook(std::weak_ptr<BackwardWatch> watch, uint32_t output) : watch_(std::move(watch)), output_(output) {}

  variable_list operator()(const variable_list& grads) override {
    const PythonEntry python;
    if (const auto watch = watch_.lock()) watch->reach_output();
    return grads;
  }

  // Compiled autograd, which has the GIL, calls hooks of Python only.
  void compiled_args(CompiledNodeArgs& args) const override {
    const auto watch = watch_.lock();
    if (watch == nullptr) return;
    py::object hook = watch->on_output();
    args.add_tensor_pre_hook(c10::SafePyObject(hook.release().ptr(), getPyInterpreter()), static_cast<int>(output_));
  }

 private:
  std::weak_ptr<BackwardWatch> watch_;
  uint32_t output_;  // number among the outputs of the node
};

// Hook each output by `make(node, output)`, and return those that are leaves.
template <class Make>
py::list hook_outputs(const py::list& outputs, Make make) {
  py::list leaves;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& output = tensor_at(outputs, i);
    if (!output.requires_grad()) continue;
    if (const auto node = output.grad_fn()) {
      node->add_tensor_pre_hook(make(output));
    } else {
      leaves.append(outputs[i]);
    }
  }
  return leaves;
}

}  // namespace

BackwardWatch::BackwardWatch(const py::object& driver, py::object gate, const py::object& lock, py::object on_output,
                             py::object reports)
    : driver_(driver),
      gate_(std::move(gate)),
      acquire_(lock.attr("acquire")),
      release_(lock.attr("release")),
      on_output_(std::move(on_output)),
      reports_(std::move(reports)) {}

BackwardWatch::NodeNumber BackwardWatch::next_node() {
  return {at::RecordFunction::currentThreadId(), at::sequence_number::peek()};
}

void BackwardWatch::begin_forward(bool keep) {
  if (!keep) forwards_.clear();
  has_forwards_ = !forwards_.empty();
  forward_begin_ = next_node();
}

py::list BackwardWatch::expect_outputs(const py::list& outputs) {
  const NodeNumber end = next_node();
  if (end.first == forward_begin_.first && end.second > forward_begin_.second) {
    forwards_[forward_begin_] = end.second;
    has_forwards_ = true;
  }
  return hook_outputs(outputs, [&](const at::Tensor& output) {
    return std::make_unique<OutputHook>(weak_from_this(), output.output_nr());
  });
}

py::list BackwardWatch::allow_outputs(const py::list& outputs) {
  return hook_outputs(outputs, [&](const at::Tensor&) { return std::make_unique<AllowedOutputHook>(weak_from_this()); });
}

void BackwardWatch::reach_allowed_output(const variable_list& grads) {
  // Within `no_sync` nothing is reported in any case.
  if (!allowed_pass_.expired() || !py::bool_(gate_.attr("is_on"))) return;
  if (!std::any_of(grads.begin(), grads.end(), may_bring_gradients)) return;
  const auto pass = std::make_shared<const bool>(true);
  torch::autograd::Engine::get_default_engine().queue_callback([pass] {});
  allowed_pass_ = pass;
}

void BackwardWatch::note_local(size_t leaf) {
  const bool takes_step = end_ != nullptr;  // at its end, from what is in `.grad` then
  if (takes_step || !allowed_pass_.expired() || !py::bool_(gate_.attr("is_on")) || distributed_context()) return;
  auto leaves = local_leaves_.lock();
  if (leaves == nullptr) {
    leaves = std::make_shared<std::vector<size_t>>();
    torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), leaves] {
      const PythonEntry python;
      if (const auto watch = weak.lock()) watch->report_local(*leaves);
    });
    local_leaves_ = leaves;
  }
  leaves->push_back(leaf);
}

void BackwardWatch::report_local(const std::vector<size_t>& leaves) {
  if (!allowed_pass_.expired() || !reports_local) return;
  reports_.attr("report")(leaves);
}

void BackwardWatch::note_early_use(size_t leaf) const { reports_.attr("refuse_early_use")(leaf); }

void BackwardWatch::follow(bool awaits_gradients, bool takes_outputs) {
  awaits_gradients_ = awaits_gradients;
  takes_outputs_ = takes_outputs;
}

void BackwardWatch::note_output() {
  if (std::isinf(reached_s_)) reached_s_ = perf_counter_s();
}

void BackwardWatch::queue_end(py::object driver) {
  if (end_ != nullptr || driver.is_none()) return;
  const auto end = std::make_shared<EndOfBackward>(shared_from_this(), std::move(driver));
  torch::autograd::Engine::get_default_engine().queue_callback([end] { end->run(); });
  end_ = end.get();
  reached_s_ = std::numeric_limits<double>::infinity();
}

void BackwardWatch::reach_output() {
  py::object found = driver();
  if (found.is_none()) return;
  if (!is_usual()) {
    on_output_();
    return;
  }
  queue_end(std::move(found));
  note_output();
  news_ |= kOutputReached;
  awaits_gradients_ = true;
}

void BackwardWatch::reach_first_grad() const {
  const py::object found = driver();
  if (!found.is_none()) found.attr("on_first_grad")(distributed_context());
}

bool BackwardWatch::may_reach_kept_tensors() const {
  return has_forwards_ && examined_pass_ != torch::autograd::get_current_graph_task_id();
}

void BackwardWatch::reach_kept_tensors() {
  const bool is_local = end_ != nullptr || !allowed_pass_.expired() || !py::bool_(gate_.attr("is_on"));
  if (!is_local && runs_forward_nodes()) reach_output();
  examined_pass_ = torch::autograd::get_current_graph_task_id();
}

bool BackwardWatch::runs_forward_nodes() const {
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto* const info = torch::autograd::get_current_graph_task_exec_info();
  if (nodes == nullptr || info == nullptr) return false;
  return std::any_of(nodes->begin(), nodes->end(), [&](torch::autograd::Node* node) {
    const auto next = forwards_.upper_bound({node->thread_id(), node->sequence_nr()});
    if (next == forwards_.begin()) return false;
    const auto& [first, end] = *std::prev(next);
    if (first.first != node->thread_id() || node->sequence_nr() >= end) return false;
    const auto given = info->find(node);
    return info->empty() || (given != info->end() && given->second.should_execute());
  });
}

// Return true if a pass may take the step without a decision of the driver. No other thread runs
// Python in between, because nothing here releases the GIL.
bool BackwardWatch::is_usual() const {
  return takes_outputs_ && torch::autograd::get_current_graph_task_id() >= 0 &&
      !has_explicit_inputs() && !is_compiled() && py::bool_(gate_.attr("is_on")) && is_unlocked();
}

// Return false if another thread has the lock, for example at the end of its own backward pass.
bool BackwardWatch::is_unlocked() const {
  const auto acquired = py::reinterpret_steal<py::object>(PyObject_CallOneArg(acquire_.ptr(), Py_False));
  if (!acquired) throw py::error_already_set();
  if (acquired.ptr() != Py_True) return false;
  release_();
  return true;
}

}  // namespace fddp

void bind_backward_watch(py::module_& m) {
  using namespace fddp;
  m.attr("OUTPUT_REACHED") = static_cast<int64_t>(BackwardWatch::kOutputReached);
  m.attr("PASS_ABORTED") = static_cast<int64_t>(BackwardWatch::kPassAborted);
  m.def("has_explicit_inputs", &has_explicit_inputs);
  m.def("is_compiled_backward", &is_compiled);
  py::class_<BackwardWatch, std::shared_ptr<BackwardWatch>>(m, "BackwardWatch")
      .def(py::init<py::object, py::object, py::object, py::object, py::object>(), py::arg("driver"), py::arg("gate"),
           py::arg("lock"), py::arg("on_output"), py::arg("reports"))
      .def("begin_forward", &BackwardWatch::begin_forward, py::arg("keep"))
      .def("expect_outputs", &BackwardWatch::expect_outputs, py::arg("outputs"))
      .def("allow_outputs", &BackwardWatch::allow_outputs, py::arg("outputs"))
      .def("reach_allowed_output", [](BackwardWatch& watch, const at::Tensor& grad) { watch.reach_allowed_output({grad}); },
           py::arg("grad"))
      .def("report_local", [](BackwardWatch& watch, bool on) { watch.reports_local = on; }, py::arg("on"))
      .def_property_readonly("reports_local", [](const BackwardWatch& watch) { return watch.reports_local.load(); })
      .def("follow", &BackwardWatch::follow, py::arg("awaits_gradients"), py::arg("takes_outputs"))
      .def("take_news", &BackwardWatch::take_news)
      .def("queue_end", py::overload_cast<>(&BackwardWatch::queue_end))
      .def("forget_end", &BackwardWatch::forget_end)
      .def("note_output", &BackwardWatch::note_output)
      .def("reach_output", [](BackwardWatch& watch, const py::object&) { watch.reach_output(); }, py::arg("grad"))
      .def_property_readonly("reached_s", &BackwardWatch::reached_s)
      .def_property_readonly("is_queued", &BackwardWatch::is_queued);
}
