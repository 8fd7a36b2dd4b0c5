// Guard that disables autograd, modes and functional transforms for torch operations on plain
// tensors.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "checks.h"

namespace fddp {

struct PlainOps {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_modes{
      kWrapperKeys |
      c10::DispatchKeySet(
          {c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
           c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

}  // namespace fddp
