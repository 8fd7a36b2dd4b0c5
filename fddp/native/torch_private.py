"""Private names of torch: autograd, transforms, dynamo and multi-tensor operators.

Each private name that the package uses is in one of the files `torch_private.py`, with its reason.
`docs/dependencies.md` has the versions of torch that they were tried on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._functorch.utils import enable_single_level_autograd_function
from torch._guards import TracingContext
from torch._library.effects import EffectType
from torch.autograd import Variable
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "DispatchModeKey",
    "SingleLevelFunction",
    "are_functorch_transforms_active",
    "below_autograd",
    "current_graph_task_id",
    "disable_current_modes",
    "dispatch_depth",
    "dispatch_mode",
    "enable_single_level_autograd_function",
    "eval_frame",
    "extract_stack",
    "foreach_norm",
    "is_functional_tensor",
    "is_functorch_wrapped_tensor",
    "is_gradtrackingtensor",
    "keep_ordered",
    "node_of",
    "peek_interpreter_stack",
    "queue_callback",
    "set_fwd_grad_enabled",
    "temporarily_clear_interpreter_stack",
    "will_engine_execute_node",
]

# Transforms and tracers, which are refused, or suspended while collectives run.
are_functorch_transforms_active = torch._C._are_functorch_transforms_active
peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack
is_functional_tensor = torch._is_functional_tensor
sync_functional: Any = torch._sync  # type: ignore[attr-defined]
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
is_gradtrackingtensor = torch._C._functorch.is_gradtrackingtensor
dispatch_depth = torch._C._len_torch_dispatch_stack
dispatch_mode = torch._C._get_dispatch_mode
DispatchModeKey = torch._C._TorchDispatchModeKey
disable_current_modes = _disable_current_modes

# Operators that are differentiated under a transform, as torch's own are.
SingleLevelFunction = _SingleLevelFunction
set_fwd_grad_enabled = _set_fwd_grad_enabled
below_autograd = torch._C._AutoDispatchBelowAutograd

# Code that dynamo skips: `torch.compiler.disable` imports dynamo, which takes as long as torch.
eval_frame = torch._C._dynamo.eval_frame

# Backward passes: whether one runs, whether it reaches a leaf, and callbacks at its end.
current_graph_task_id = torch._C._current_graph_task_id
will_engine_execute_node = torch._C._will_engine_execute_node
queue_callback = Variable._execution_engine.queue_callback

# Norms of many tensors in few launches.
foreach_norm = torch._foreach_norm

# The user's line in errors of compiled functions.
extract_stack = TracingContext.extract_stack


def node_of(tensor: torch.Tensor, tracer: Any) -> Any:
    """Return the node of a graph that gives a tensor of its tracer."""
    from torch._subclasses.functional_tensor import FunctionalTensor  # both load much of torch
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    if isinstance(tensor, FunctionalTensor):
        sync_functional(tensor)
        tensor = torch._from_functional_tensor(tensor.elem)
    return get_proxy_slot(tensor, tracer).proxy.node


def keep_ordered(name: str, library: torch.library.Library) -> None:
    """Let graphs keep the calls of an operator in order, and those whose results are not used."""
    torch.library._register_effectful_op(name, EffectType.ORDERED, lib=library)
