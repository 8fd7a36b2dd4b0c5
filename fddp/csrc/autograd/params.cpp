// Parameters of a module, whose gradients are announced as they arrive in any backward pass.
//
// [Note: hooks of parameters]
// Parameters live across steps, so they are hooked once, at the node that accumulates their
// gradients: hooks that users put on the tensors run before ours and can't take their place. A hook
// before accumulation opens the step, when it can still be seen which gradients were there before;
// a hook after it counts. Hooks hold the set weakly; the set keeps the nodes alive.

#include <Python.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>
#if FDDP_HAS_RPC
#include <torch/csrc/distributed/autograd/context/context.h>
#endif

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "arrivals.h"
#include "tensor/checks.h"
#include "tensor/storage.h"

namespace py = pybind11;
using torch::autograd::FunctionPostHook;
using torch::autograd::FunctionPreHook;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;

namespace fddp {
namespace {

using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

class ParamSet : public Arrivals, public std::enable_shared_from_this<ParamSet> {
 public:
  ParamSet(std::vector<at::Tensor> params, py::object on_begin)
      : Arrivals(std::move(params)), on_begin_(std::make_unique<py::object>(std::move(on_begin))) {
    existed_.resize(size(), false);
    held_.resize(size());
    used_.resize(size(), false);
  }
  ~ParamSet() override {
    py::gil_scoped_acquire gil;
    on_begin_.reset();
  }

  static std::shared_ptr<ParamSet> make(std::vector<at::Tensor> params, py::object on_begin);

  // Whether a backward pass opens a step, by calling `on_begin`.
  void watch(bool on) {
    const std::lock_guard<std::mutex> lock(mutex_);
    watching_ = on;
  }

  // Whether all are hooked still: a parameter that changed its type or device has a new node.
  bool intact() const {
    for (size_t i = 0; i < size(); ++i) {
      if (torch::autograd::impl::try_get_grad_accumulator(leaves_[i]) != accumulators_[i]) return false;
    }
    return true;
  }

  void arm(std::shared_ptr<const BucketMembers> members, std::vector<int64_t> expected,
           std::vector<EagerSlot> eager, py::object on_bucket) {
    std::vector<at::Tensor> held(size());
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (size_t i = 0; i < size(); ++i) existed_[i] = leaves_[i].grad().defined();
      held_.swap(held);
    }
    Arrivals::arm(std::move(members), std::move(expected), std::move(eager), std::move(on_bucket));
  }

  // Whether a gradient came for each since `forget_use`, in steps or between them.
  std::vector<bool> used() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return used_;
  }
  void forget_use() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::fill(used_.begin(), used_.end(), false);
  }

  // Makes `results` the gradients. Tensors that were gradients before this backward stay the same
  // objects and are written, unless `replace` is set. Where there is no result, the gradient is what
  // it was. A gradient with a graph of its own keeps it: the value is the result's.
  void put(const std::vector<std::optional<at::Tensor>>& results, bool replace) {
    TORCH_CHECK_VALUE(results.size() == size(), "expected ", size(), " gradients, got ", results.size());
    for (size_t i = 0; i < size(); ++i) {
      at::Tensor& grad = leaves_[i].mutable_grad();
      at::Tensor own = std::exchange(held_[i], {});
      if (!own.defined() && (existed_[i] || (grad.defined() && grad.requires_grad()))) own = grad;
      if (!results[i]) {
        if (own.defined()) grad = own;
        continue;
      }
      grad = own.defined() ? joined(own, *results[i], replace) : *results[i];
    }
  }

  // Gives the gradients back that were taken and are still there, after a step that failed.
  void put_back() {
    for (size_t i = 0; i < size(); ++i) {
      at::Tensor own = std::exchange(held_[i], {});
      at::Tensor& grad = leaves_[i].mutable_grad();
      if (own.defined() && own.unsafeGetTensorImpl() != grad.unsafeGetTensorImpl()) {
        const at::AutoGradMode no_grad(false);
        grad = grad.defined() ? own + grad : own;
      }
    }
  }

  // Whether a buffer's slices are the gradients of `leaves`, as far as these have any, and nothing
  // else refers to its memory: gradients may then be reduced where they lie.
  bool lie_in(const std::vector<int64_t>& leaves, const at::Tensor& buffer, const Layout& layout) const {
    TORCH_CHECK_VALUE(leaves.size() == layout.slots().size(), "got ", leaves.size(), " leaves for a layout of ",
                      layout.slots().size());
    const auto* const begin = static_cast<const char*>(buffer.const_data_ptr());
    int64_t there = 0;
    for (size_t i = 0; i < leaves.size(); ++i) {
      const at::Tensor& grad = leaves_.at(leaves[i]).grad();
      if (!grad.defined()) continue;
      const Slot& slot = layout.slots()[i];
      if (owner_of_slice(grad) != buffer.storage().unsafeGetStorageImpl() || storage_use_count(grad) != 1 ||
          grad.requires_grad() || grad.scalar_type() != buffer.scalar_type() ||
          grad.sizes() != at::IntArrayRef(slot.sizes) || !is_linear(grad, slot) ||
          grad.const_data_ptr() != begin + slot.offset * static_cast<int64_t>(buffer.itemsize())) {
        return false;
      }
      ++there;
    }
    return there > 0 && storage_use_count(buffer) == 1 + there;
  }

  void starting() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (armed_ || !watching_) return;
    }
    py::gil_scoped_acquire gil;
    (*on_begin_)();
  }

  void accumulated(size_t leaf) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      used_[leaf] = true;
    }
    arrived(leaf);
  }

 protected:
  void let_go(size_t leaf, bool keep) override {
    at::Tensor& grad = leaves_[leaf].mutable_grad();
    if (!grad.defined()) return;
    if (!held_[leaf].defined() && (existed_[leaf] || grad.requires_grad())) held_[leaf] = grad;
    if (!keep) grad.reset();
  }

  bool may_drop(size_t leaf) const override {
    const at::Tensor& grad = leaves_[leaf].grad();
    return !existed_[leaf] && !grad.requires_grad() && grad.layout() == at::kStrided;
  }

 private:
  void hook();

  static at::Tensor joined(const at::Tensor& own, const at::Tensor& result, bool replace) {
    if (own.requires_grad()) {
      const at::AutoGradMode with_grad(true);
      return result + (own - own.detach());
    }
    const bool fits = own.layout() == at::kStrided && result.layout() == at::kStrided &&
        own.sizes() == result.sizes() && own.scalar_type() == result.scalar_type();
    if (replace || !fits) return result;
    const at::AutoGradMode no_grad(false);
    own.copy_(result);
    return own;
  }

  std::vector<Accumulator> accumulators_;
  std::vector<bool> existed_;     // by leaf: there was a gradient when the step opened
  std::vector<at::Tensor> held_;  // by leaf: the gradient that was taken, where it must not get lost
  std::vector<bool> used_;        // by leaf
  std::unique_ptr<py::object> on_begin_;
  bool watching_ = false;
};

class BeginHook : public FunctionPreHook {
 public:
  explicit BeginHook(std::weak_ptr<ParamSet> set) : set_(std::move(set)) {}
  variable_list operator()(const variable_list& grads) override {
    if (const auto set = set_.lock()) set->starting();
    return grads;
  }
  void compiled_args(CompiledNodeArgs&) const override {}  // nothing to do in compiled autograd

 private:
  std::weak_ptr<ParamSet> set_;
};

class CountHook : public FunctionPostHook {
 public:
  CountHook(std::weak_ptr<ParamSet> set, size_t leaf) : set_(std::move(set)), leaf_(leaf) {}
  variable_list operator()(const variable_list& outputs, const variable_list& grads) override {
    if (!grads.empty() && grads[0].defined()) {
      if (const auto set = set_.lock()) set->accumulated(leaf_);
    }
    return outputs;
  }
  void compiled_args(CompiledNodeArgs&) const override {}

 private:
  std::weak_ptr<ParamSet> set_;
  size_t leaf_;
};

void ParamSet::hook() {
  for (size_t i = 0; i < size(); ++i) {
    Accumulator node = torch::autograd::impl::grad_accumulator(leaves_[i]);
    TORCH_CHECK_VALUE(node, "parameter ", i, " requires no gradient");
    node->add_pre_hook(std::make_unique<BeginHook>(weak_from_this()));
    node->add_post_hook(std::make_unique<CountHook>(weak_from_this(), i));
    accumulators_.push_back(std::move(node));
  }
}

std::shared_ptr<ParamSet> ParamSet::make(std::vector<at::Tensor> params, py::object on_begin) {
  auto set = std::make_shared<ParamSet>(std::move(params), std::move(on_begin));
  set->hook();
  return set;
}

// Whether the backward pass that runs was told which leaves to serve, as autograd.grad is: it then
// leaves the gradients of all others alone.
bool serves_some() {
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  return info != nullptr && !info->empty();
}

// The context of distributed autograd that the backward pass belongs to, if any: gradients then go
// there instead of into their parameters.
std::optional<int64_t> distributed_context() {
#if FDDP_HAS_RPC
  const auto context = torch::distributed::autograd::ThreadLocalDistAutogradContext::getContextPtr();
  if (context) return context->contextId();
#endif
  return std::nullopt;
}

}  // namespace
}  // namespace fddp

void bind_params(py::module_& m) {
  using namespace fddp;
  m.def("serves_some", &serves_some);
  m.def("distributed_context", &distributed_context);
  py::class_<ParamSet, Arrivals, std::shared_ptr<ParamSet>>(m, "ParamSet")
      .def(py::init(&ParamSet::make), py::arg("params"), py::arg("on_begin"))
      .def("watch", &ParamSet::watch, py::arg("on"))
      .def("intact", &ParamSet::intact)
      .def("arm", &ParamSet::arm, py::arg("members"), py::arg("expected"), py::arg("eager"),
           py::arg("on_bucket"))
      .def("used", &ParamSet::used)
      .def("forget_use", &ParamSet::forget_use)
      .def("lie_in", &ParamSet::lie_in, py::arg("leaves"), py::arg("buffer"), py::arg("layout"))
      .def("put", &ParamSet::put, py::arg("results"), py::arg("replace"))
      .def("put_back", &ParamSet::put_back);
}
