#include "accumulation_hooks.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

using torch::autograd::PostAccumulateGradHook;
using torch::autograd::Variable;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::SwapSavedVariables;

namespace fddp {
namespace {

// Stands before the hooks of a parameter, which torch keeps as one object. It stays there when the
// owner is gone, and passes every call on.
class DeferredHooks : public PostAccumulateGradHook {
 public:
  DeferredHooks(std::unique_ptr<PostAccumulateGradHook> hooks, std::weak_ptr<HookOwner> owner, size_t leaf)
      : hooks_(std::move(hooks)), owner_(std::move(owner)), leaf_(leaf) {}

  void operator()(const Variable& param) override {
    const auto owner = owner_.lock();
    if (owner == nullptr) return run(param);
    if (owner->defers_hooks()) return;
    const bool had_grad = param.grad().defined();
    const auto version = param._version();
    run(param);
    if (param._version() != version || (had_grad && !param.grad().defined())) owner->note_early_use(leaf_);
  }
  void compiled_args(CompiledNodeArgs& args) const override { hooks_->compiled_args(args); }
  void apply_with_saved(Variable& param, SwapSavedVariables& saved) override { hooks_->apply_with_saved(param, saved); }

  void run(const Variable& param) { (*hooks_)(param); }
  bool is_abandoned() const { return owner_.expired(); }
  bool is_of(const HookOwner& owner) const { return owner_.lock().get() == &owner; }
  void adopt(std::weak_ptr<HookOwner> owner, size_t leaf) {
    owner_ = std::move(owner);
    leaf_ = leaf;
  }
  DeferredHooks* next() const { return dynamic_cast<DeferredHooks*>(hooks_.get()); }

 private:
  std::unique_ptr<PostAccumulateGradHook> hooks_;  // those of torch, or of another owner
  std::weak_ptr<HookOwner> owner_;
  size_t leaf_;
};

// Return those of the deferred hooks of a parameter that satisfy `is_wanted`, or null.
template <class Predicate>
DeferredHooks* find(const at::Tensor& param, Predicate is_wanted) {
  auto* found = dynamic_cast<DeferredHooks*>(torch::autograd::impl::post_acc_grad_hooks(param).get());
  while (found != nullptr && !is_wanted(*found)) found = found->next();
  return found;
}

}  // namespace

void defer_hooks(const at::Tensor& param, const std::weak_ptr<HookOwner>& owner, size_t leaf) {
  auto& hooks = torch::autograd::impl::post_acc_grad_hooks(param);
  const auto mine = owner.lock();
  if (find(param, [&](const DeferredHooks& found) { return found.is_of(*mine); }) != nullptr) return;
  if (auto* const found = find(param, [](const DeferredHooks& found) { return found.is_abandoned(); })) {
    found->adopt(owner, leaf);
    return;
  }
  hooks = std::make_unique<DeferredHooks>(std::move(hooks), owner, leaf);
}

void run_deferred(const at::Tensor& param, const HookOwner& owner) {
  auto* const found = find(param, [&](const DeferredHooks& hooks) { return hooks.is_of(owner); });
  if (found != nullptr) found->run(param);
}

}  // namespace fddp
