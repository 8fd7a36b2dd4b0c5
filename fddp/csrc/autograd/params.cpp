// Parameters of a module, whose gradients are counted in every backward pass.
//
// [Note: parameter hooks]
// Parameters live across steps. They are therefore hooked once, at their AccumulateGrad nodes.
// Hooks of users on the tensors run before and cannot replace ours. A pre-hook opens the step,
// while it is still known which gradients existed before. A post-hook counts gradients. Hooks hold
// the set weakly; the set keeps the nodes alive, and borrows the parameters from them, because
// torch.utils.swap_tensors refuses tensors with further owners. A set that is destroyed leaves its hooks in place,
// where they do nothing, because another thread may be iterating over the hooks of the node. The
// next set over the same parameters removes them.

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>
#if FDDP_HAS_RPC
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/context/context.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "accumulation_hooks.h"
#include "backward_watch.h"
#include "gradient_counter.h"
#include "python_entry.h"
#include "tensor/checks.h"
#include "tensor/python_lists.h"
#include "tensor/storage.h"

namespace py = pybind11;
using torch::autograd::FunctionPostHook;
using torch::autograd::FunctionPreHook;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;

namespace fddp {
namespace {

using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

class ParamSet : public GradientCounter, public HookOwner, public std::enable_shared_from_this<ParamSet> {
 public:
  ParamSet(std::vector<at::Tensor> params, std::shared_ptr<BackwardWatch> watch)
      : GradientCounter(std::move(params)), watch_(std::move(watch)) {
    had_grad_before_.resize(size(), false);
    saved_grads_.resize(size());
    used_.resize(size(), false);
  }
  ~ParamSet() override {
    py::gil_scoped_acquire gil;
    watch_.reset();
    before_first_ = py::object();
    if (accumulators_.size() < size()) return;  // not hooked
    for (at::Tensor& leaf : leaves_) c10::MaybeOwnedTraits<at::Tensor>::destroyBorrow(leaf);
  }

  static std::shared_ptr<ParamSet> make(std::vector<at::Tensor> params, std::shared_ptr<BackwardWatch> watch);

  // Set whether an undefined gradient stands for zeros. Otherwise it is ignored.
  void count_undefined(bool on) {
    const std::lock_guard<std::mutex> lock(mutex_);
    counts_undefined_ = on;
  }

  // Return true if all hooks are still in place and serve. A parameter whose dtype or device has changed
  // has a new AccumulateGrad node; that of one whose shape has changed takes gradients of the old shape;
  // one that was swapped is another tensor in the same object of `params`.
  bool intact(const py::list& params) const {
    TORCH_CHECK_VALUE(params.size() == size(), "expected ", size(), " parameters, got ", params.size());
    for (size_t i = 0; i < size(); ++i) {
      if (!tensor_at(params, i).is_same(leaves_[i])) return false;
      if (torch::autograd::impl::try_get_grad_accumulator(leaves_[i]) != accumulators_[i]) return false;
      if (leaves_[i].sizes() != shapes_[i]) return false;
    }
    return true;
  }

  // Multiply the gradients that arrive from now on by `weight`. 0 drops them, and counts them as used.
  // `before_first`, unless it is None, is called before the first of them is accumulated.
  void weigh(double weight, py::object before_first) {
    const std::lock_guard<std::mutex> lock(mutex_);
    weight_ = weight;
    awaits_first_ = !before_first.is_none();
    std::swap(before_first_, before_first);
  }

  // Return the gradient of a leaf with its weight.
  variable_list weighted(const variable_list& grads) {
    const double weight = weight_;
    if (weight == 1.0 || grads.empty() || !grads[0].defined()) return grads;
    if (weight == 0.0) return variable_list(1);
    return {grads[0].mul(weight)};  // what was passed may be other gradients, too
  }

  // Number of hooks on the nodes of the parameters, those of other owners included.
  size_t hook_count() const {
    size_t count = 0;
    for (const Accumulator& node : accumulators_) count += node->pre_hooks().size() + node->post_hooks().size();
    return count;
  }

  // Set whether users' hooks are left out of backward passes that take no step.
  void leave_out_hooks(bool on) {
    const std::lock_guard<std::mutex> lock(mutex_);
    leaves_out_hooks_ = on;
  }

  // Run the deferred hooks of parameters that `assign` has given a mean, after the step. Those that
  // are in a step of another set, too, are left to it.
  void run_hooks() {
    std::vector<bool> leaves = std::exchange(assigned_, {});
    for (size_t i = 0; i < leaves.size(); ++i) leaves[i] = leaves[i] && leaves_[i].grad().defined();
    runs_hooks_ = true;
    const auto done = c10::make_scope_exit([this] { runs_hooks_ = false; });
    for (size_t i = 0; i < leaves.size(); ++i) {
      if (!leaves[i] || is_taken_by_another(i)) continue;
      defer_hooks(i);  // no gradient arrived here if only other ranks used the parameter
      run_deferred(leaves_[i], *this);
    }
  }

  bool defers_hooks() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return in_step_ ? defers_hooks_ : leaves_out_hooks_;
  }

  // Return true if gradients are those of a step, or its means.
  bool takes_gradients() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return in_step_ || runs_hooks_;
  }

  void note_early_use(size_t leaf) override {
    if (is_taken_by_another(leaf)) return;
    const PythonEntry python;
    watch_->note_early_use(leaf);
  }

  // Start a step: record which gradients exist, for `restore`. It may end without `arm`. Users' hooks
  // run after `assign`, if `defer`.
  void begin(bool defer) {
    std::vector<at::Tensor> saved(size());
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < size(); ++i) {
      had_grad_before_[i] = leaves_[i].grad().defined();
      // A gradient from before the step that was set to None since is not part of it.
      used_[i] = used_[i] && had_grad_before_[i];
    }
    used_before_ = used_;
    saved_grads_.swap(saved);
    awaited_.clear();
    assigned_.clear();
    in_step_ = true;
    defers_hooks_ = defer;
  }

  // End the step, and counting with it.
  void disarm() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      in_step_ = false;
    }
    GradientCounter::disarm();
  }

  void reset_used() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::fill(used_.begin(), used_.end(), false);
  }

  // Assign `results` as gradients. Tensors that were gradients before this backward keep their
  // identity and are written in place, unless `replace` is set. Parameters without a result get
  // their previous gradient back. A gradient with an autograd graph keeps the graph and takes the
  // value of the result. New gradients have the strides that their parameters have now.
  void assign(const py::list& results, bool replace) {
    TORCH_CHECK_VALUE(results.size() == size(), "expected ", size(), " gradients, got ", results.size());
    assigned_.assign(size(), false);
    for (size_t i = 0; i < size(); ++i) {
      at::Tensor& grad = leaves_[i].mutable_grad();
      at::Tensor own = std::exchange(saved_grads_[i], {});
      const at::Tensor* const result = tensor_or_none_at(results, i);
      assigned_[i] = result != nullptr && defers_hooks_;
      if (result == nullptr) {
        if (own.defined()) grad = own;
        continue;
      }
      grad = own.defined() ? merged(own, *result, leaves_[i], replace) : laid_out(*result, leaves_[i]);
    }
  }

  // Restore the gradients that were taken, after a failed step. Those that did not exist before it
  // are dropped.
  void restore() {
    bool was_in_step = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      was_in_step = in_step_;
      if (in_step_) used_ = used_before_;
    }
    for (size_t i = 0; i < size(); ++i) {
      at::Tensor own = std::exchange(saved_grads_[i], {});
      at::Tensor& grad = leaves_[i].mutable_grad();
      if (was_in_step && !had_grad_before_[i]) {
        grad.reset();
        continue;
      }
      if (own.defined() && own.unsafeGetTensorImpl() != grad.unsafeGetTensorImpl()) {
        const at::AutoGradMode no_grad(false);
        grad = grad.defined() ? own + grad : own;
      }
    }
  }

  // Forget what `restore` would put back. No gradient is touched.
  void forget() {
    std::vector<at::Tensor> gone(size());
    const std::lock_guard<std::mutex> lock(mutex_);
    if (in_step_) used_ = used_before_;
    saved_grads_.swap(gone);
  }

  // Return true if the gradients of `leaves` are slices of `buffer`, as far as they exist, and
  // nothing else refers to its memory. Such gradients can be reduced in place.
  bool aliases_buffer(const std::vector<int64_t>& leaves, const at::Tensor& buffer, const Layout& layout) const {
    TORCH_CHECK_VALUE(leaves.size() == layout.slots().size(), "got ", leaves.size(), " leaves for a layout of ",
                      layout.slots().size());
    const auto* const begin = static_cast<const char*>(buffer.const_data_ptr());
    int64_t aliased = 0;
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
      ++aliased;
    }
    return aliased > 0 && storage_use_count(buffer) == 1 + aliased;
  }

  // Let the first gradient of one of these leaves open a step until the next one begins, although no
  // output was reached.
  void await_gradients(std::vector<bool> leaves) {
    TORCH_CHECK_VALUE(leaves.empty() || leaves.size() == size(), "expected ", size(), " flags, got ",
                      leaves.size());
    const std::lock_guard<std::mutex> lock(mutex_);
    awaited_ = std::move(leaves);
  }

  void before_accumulation(size_t leaf) {
    if (awaits_first_) call_before_first();
    defer_hooks(leaf);  // users may add hooks at any time
    bool opens = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (in_step_) return;
      opens = watch_->awaits_gradients() || (!awaited_.empty() && awaited_[leaf]);
      if (!opens && !watch_->may_reach_kept_tensors()) return;
    }
    const PythonEntry python;
    if (!opens) watch_->reach_kept_tensors();
    if (opens || watch_->awaits_gradients()) watch_->reach_first_grad();
  }

  // `is_undefined`: what autograd passed to the leaf is.
  void after_accumulation(size_t leaf, bool is_undefined) {
    bool is_local = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const bool is_dropped = weight_ == 0.0;
      if (is_undefined && !is_dropped && !(in_step_ && counts_undefined_)) return;
      used_[leaf] = true;
      is_local = !in_step_ && !is_dropped && watch_->reports_local;
    }
    on_gradient(leaf, is_undefined);
    if (is_local && !is_taken_by_another(leaf)) {
      const PythonEntry python;
      watch_->note_local(leaf);
    }
  }

 protected:
  void release_grad(size_t leaf, bool keep) override {
    at::Tensor& grad = leaves_[leaf].mutable_grad();
    if (!grad.defined()) return;
    if (!saved_grads_[leaf].defined() && (had_grad_before_[leaf] || grad.requires_grad())) saved_grads_[leaf] = grad;
    if (!keep) grad.reset();
  }

  // True if a gradient arrived since `reset_used`, during steps or between them. Gradients that no
  // longer exist when a step begins do not count.
  bool was_used(size_t leaf) const override { return used_[leaf]; }

  bool may_release(size_t leaf) const override {
    const at::Tensor& grad = leaves_[leaf].grad();
    return !had_grad_before_[leaf] && !grad.requires_grad() && grad.layout() == at::kStrided;
  }

 private:
  void hook();

  // Call what was given to `weigh`. Threads of other devices wait until it has returned.
  void call_before_first() {
    const std::lock_guard<std::mutex> first(first_mutex_);
    if (!awaits_first_) return;
    const PythonEntry python;
    py::object call;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::swap(call, before_first_);
    }
    call();
    awaits_first_ = false;
  }

  // Defer the hooks of a parameter from now on, if it has some.
  void defer_hooks(size_t leaf) {
    if (torch::autograd::impl::post_acc_grad_hooks(leaves_[leaf])) fddp::defer_hooks(leaves_[leaf], weak_from_this(), leaf);
  }

  // Return true if a step of another set over the same parameter takes its gradients.
  bool is_taken_by_another(size_t leaf) const;

  // Return the result with the strides of its parameter.
  static at::Tensor laid_out(const at::Tensor& result, const at::Tensor& param) {
    if (result.layout() != at::kStrided || torch::autograd::utils::obeys_layout_contract(result, param)) return result;
    const at::AutoGradMode no_grad(false);
    return torch::autograd::utils::clone_obey_contract(result, param);
  }

  static at::Tensor merged(const at::Tensor& own, const at::Tensor& result, const at::Tensor& param, bool replace) {
    if (own.requires_grad()) {
      const at::AutoGradMode with_grad(true);
      return result + (own - own.detach());
    }
    const bool fits = own.layout() == at::kStrided && result.layout() == at::kStrided &&
        own.sizes() == result.sizes() && own.scalar_type() == result.scalar_type();
    if (replace || !fits) return laid_out(result, param);
    const at::AutoGradMode no_grad(false);
    own.copy_(result);
    return own;
  }

  std::vector<Accumulator> accumulators_;
  std::vector<c10::DimVector> shapes_;   // by leaf, as the accumulators know them
  std::vector<bool> had_grad_before_;    // by leaf: had a gradient when the step began
  std::vector<at::Tensor> saved_grads_;  // by leaf: gradient that was taken and must be preserved
  std::vector<bool> used_;               // by leaf
  std::vector<bool> used_before_;        // by leaf: when the step began
  std::vector<bool> awaited_;            // by leaf: opens a step; empty for none
  std::vector<bool> assigned_;           // by leaf: has a mean, and its hooks have not run
  bool in_step_ = false;                 // between `begin` and `disarm`
  bool defers_hooks_ = false;            // within the step
  bool leaves_out_hooks_ = false;        // outside of a step
  std::atomic<bool> runs_hooks_{false};
  std::atomic<double> weight_{1.0};        // of the gradients that arrive
  py::object before_first_;                // to call before the first of them
  std::atomic<bool> awaits_first_{false};  // it has not been called
  std::mutex first_mutex_;                 // held during the call, and taken before `mutex_`
  std::shared_ptr<BackwardWatch> watch_;
  bool counts_undefined_ = false;
};

class PreAccumulateHook : public FunctionPreHook {
 public:
  PreAccumulateHook(std::weak_ptr<ParamSet> set, size_t leaf) : set_(std::move(set)), leaf_(leaf) {}
  bool is_abandoned() const { return set_.expired(); }
  variable_list operator()(const variable_list& grads) override {
    const auto set = set_.lock();
    if (set == nullptr) return grads;
    set->before_accumulation(leaf_);
    return set->weighted(grads);
  }
  void compiled_args(CompiledNodeArgs&) const override {}  // no effect in compiled autograd

 private:
  std::weak_ptr<ParamSet> set_;
  size_t leaf_;
};

class PostAccumulateHook : public FunctionPostHook {
 public:
  PostAccumulateHook(std::weak_ptr<ParamSet> set, size_t leaf) : set_(std::move(set)), leaf_(leaf) {}
  bool is_abandoned() const { return set_.expired(); }
  std::shared_ptr<ParamSet> set() const { return set_.lock(); }
  variable_list operator()(const variable_list& outputs, const variable_list& grads) override {
    const bool is_undefined = grads.empty() || !grads[0].defined();
    if (const auto set = set_.lock()) set->after_accumulation(leaf_, is_undefined);
    return outputs;
  }
  void compiled_args(CompiledNodeArgs&) const override {}

 private:
  std::weak_ptr<ParamSet> set_;
  size_t leaf_;
};

// Remove hooks of type `Ours` whose set no longer exists.
template <class Ours, class Hooks>
void remove_abandoned(Hooks& hooks) {
  const auto is_abandoned = [](const auto& hook) {
    const auto* const ours = dynamic_cast<const Ours*>(hook.get());
    return ours != nullptr && ours->is_abandoned();
  };
  hooks.erase(std::remove_if(hooks.begin(), hooks.end(), is_abandoned), hooks.end());
}

bool ParamSet::is_taken_by_another(size_t leaf) const {
  const auto& hooks = accumulators_[leaf]->post_hooks();
  return std::any_of(hooks.begin(), hooks.end(), [this](const auto& hook) {
    const auto* const ours = dynamic_cast<const PostAccumulateHook*>(hook.get());
    const auto other = ours == nullptr ? nullptr : ours->set();
    return other != nullptr && other.get() != this && other->takes_gradients();
  });
}

void ParamSet::hook() {
  const bool in_backward = torch::autograd::get_current_graph_task_id() >= 0;
  for (size_t i = 0; i < size(); ++i) {
    Accumulator node = torch::autograd::impl::grad_accumulator(leaves_[i]);
    TORCH_CHECK_VALUE(node, "parameter ", i, " does not require grad");
    if (!in_backward) {
      remove_abandoned<PreAccumulateHook>(node->pre_hooks());
      remove_abandoned<PostAccumulateHook>(node->post_hooks());
    }
    node->add_pre_hook(std::make_unique<PreAccumulateHook>(weak_from_this(), i));
    node->add_post_hook(std::make_unique<PostAccumulateHook>(weak_from_this(), i));
    shapes_.emplace_back(leaves_[i].sizes().begin(), leaves_[i].sizes().end());
    accumulators_.push_back(std::move(node));
  }
  for (at::Tensor& leaf : leaves_) leaf = c10::MaybeOwnedTraits<at::Tensor>::createBorrow(leaf);
}

std::shared_ptr<ParamSet> ParamSet::make(std::vector<at::Tensor> params, std::shared_ptr<BackwardWatch> watch) {
  auto set = std::make_shared<ParamSet>(std::move(params), std::move(watch));
  set->hook();
  return set;
}

// Add gradients of parameters to a context of distributed autograd.
void add_to_context([[maybe_unused]] int64_t context_id,
                    [[maybe_unused]] const std::vector<std::pair<at::Tensor, at::Tensor>>& grads) {
#if FDDP_HAS_RPC
  const auto context = torch::distributed::autograd::DistAutogradContainer::getInstance().retrieveContext(context_id);
  c10::Dict<at::Tensor, at::Tensor> shared = context->getGradients();  // copies of a Dict share their entries
  for (const auto& [param, grad] : grads) shared.insert_or_assign(param, grad);
#endif
}

}  // namespace
}  // namespace fddp

void bind_params(py::module_& m) {
  using namespace fddp;
  m.def("add_to_context", &add_to_context, py::arg("context"), py::arg("grads"));
  py::class_<ParamSet, GradientCounter, std::shared_ptr<ParamSet>>(m, "ParamSet")
      .def(py::init(&ParamSet::make), py::arg("params"), py::arg("watch").none(false))
      .def("count_undefined", &ParamSet::count_undefined, py::arg("on"))
      .def("intact", &ParamSet::intact, py::arg("params"))
      .def("weigh", &ParamSet::weigh, py::arg("weight"), py::arg("before_first"))
      .def("hook_count", &ParamSet::hook_count)
      .def("leave_out_hooks", &ParamSet::leave_out_hooks, py::arg("on"))
      .def("run_hooks", &ParamSet::run_hooks)
      .def("begin", &ParamSet::begin, py::arg("defer"))
      .def("await_gradients", &ParamSet::await_gradients, py::arg("leaves"))
      .def("reset_used", &ParamSet::reset_used)
      .def("aliases_buffer", &ParamSet::aliases_buffer, py::arg("leaves"), py::arg("buffer"), py::arg("layout"))
      .def("assign", &ParamSet::assign, py::arg("results"), py::arg("replace"))
      .def("restore", &ParamSet::restore)
      .def("forget", &ParamSet::forget);
}
