"""Mixed precision: a module computes on casts of its parameters.

Autograd records the casts. So gradients arrive at the parameters themselves, in their dtype, and
gradient hooks need not know of the casts. A communication hook sets the dtype in which gradients
are reduced (`wire_dtype`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.utils import _cast_forward_inputs
from torch.nn.parallel.distributed import _MixedPrecision

from fddp.ddp.parameter_swap import ParameterSwap


class MixedPrecision:
    """Casts for one module. Construction hooks the module and casts its buffers.

    Tensors with a true attribute `_ddp_ignored` and non-floating tensors are not cast.

    Args:
        module: the module for `run`.
        config: `param_dtype` is the dtype of parameters and inputs in forward and backward;
            `buffer_dtype` is the dtype to which buffers are cast once. None casts nothing.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> module = nn.Linear(2, 1)
        >>> mixed = MixedPrecision(module, _MixedPrecision(param_dtype=torch.bfloat16))
        >>> output = mixed.run(module, (torch.ones(3, 2),), {})
        >>> output.sum().backward()
        >>> output.dtype, module.weight.grad
        (torch.bfloat16, tensor([[3., 3.]]))
    """

    def __init__(self, module: nn.Module, config: _MixedPrecision) -> None:
        self._dtype = config.param_dtype
        self._casts: ParameterSwap | None = None
        if config.buffer_dtype is not None:
            for buffer in module.buffers():
                if _is_castable(buffer, config.buffer_dtype):
                    buffer.data = buffer.to(config.buffer_dtype)  # keeps the tensor object
        if self._dtype is not None:
            self._casts = ParameterSwap(module, self._cast, _in_backward)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module on casts of its parameters and inputs.

        The module has its own parameters again on return or error.
        """
        if self._casts is None:
            return module(*args, **kwargs)
        args, kwargs = _cast_forward_inputs(self._dtype, *args, **kwargs)
        with self._casts.over(module):
            return module(*args, **kwargs)

    def _cast(self, part: nn.Module, name: str, own: Tensor) -> Tensor | None:
        if self._dtype is None or not _is_castable(own, self._dtype):
            return None
        cast: Tensor = _Cast.apply(own, self._dtype)  # type: ignore[no-untyped-call]  # torch's
        return cast


def wire_dtype(config: _MixedPrecision) -> torch.dtype | None:
    """Return the dtype in which gradients are reduced; None for their own."""
    return config.reduce_dtype or config.param_dtype


class _Cast(torch.autograd.Function):
    """`Tensor.to` for sparse gradients, too. Autograd casts gradients back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtype = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.to(ctx.dtype)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


def _is_castable(tensor: Tensor, dtype: torch.dtype) -> bool:
    is_ignored = getattr(tensor, "_ddp_ignored", False)
    return tensor.is_floating_point() and tensor.dtype is not dtype and not is_ignored
