// Hooks of users that run when a parameter has its gradient.
//
// [Note: hooks after accumulation]
// torch calls hooks of `Tensor.register_post_accumulate_grad_hook` once this rank's gradient is
// accumulated. An optimizer in such a hook would train on gradients that nobody has averaged. Within
// a step they are therefore deferred: they run once all means are in `.grad`, in one order on all
// ranks, on the thread that ends the backward pass. Outside of a step they run at once, and the
// owner learns when one has used a gradient that it would have averaged later.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>

namespace fddp {

// Owner of parameters whose hooks may be deferred. Calls come with the GIL or without it.
class HookOwner {
 public:
  virtual ~HookOwner() = default;

  // Return true if hooks are to be left out now. The owner runs them later, or never.
  virtual bool defers_hooks() = 0;

  // Called when a hook that was not deferred has changed a parameter or cleared its gradient.
  virtual void note_early_use(size_t leaf) = 0;
};

// Let an owner defer the hooks of a parameter, which has some. No effect if it does already.
void defer_hooks(const at::Tensor& param, const std::weak_ptr<HookOwner>& owner, size_t leaf);

// Run the hooks that `owner` has deferred.
void run_deferred(const at::Tensor& param, const HookOwner& owner);

}  // namespace fddp
