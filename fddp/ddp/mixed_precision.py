"""Mixed precision: a module computes on casts of its parameters.

Autograd records the casts. So gradients arrive at the parameters themselves, in their dtype, and
gradient hooks need not know of the casts. A communication hook sets the dtype in which gradients
are reduced (`wire_dtype`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fddp.ddp.parameter_swap import ParameterSwap
from fddp.ddp.torch_private import cast_forward_inputs
from fddp.native.torch_private import current_graph_task_id
from fddp.native.untraced import untraced


class Precision(Protocol):
    """Dtypes of torch's `_MixedPrecision`; None leaves the tensors as they are.

    Attributes:
        param_dtype: dtype of parameters and inputs in forward and backward.
        reduce_dtype: dtype in which gradients are reduced; that of the parameters if None.
        buffer_dtype: dtype to which buffers are cast once.
    """

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None


class MixedPrecision:
    """Casts for one module. Construction hooks the module and casts its buffers.

    Tensors with a true attribute `_ddp_ignored` and non-floating tensors are not cast.

    Args:
        module: the module for `run`.
        config: dtypes of parameters, inputs and buffers.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.nn.parallel.distributed import _MixedPrecision
        >>> module = nn.Linear(2, 1)
        >>> mixed = MixedPrecision(module, _MixedPrecision(param_dtype=torch.bfloat16))
        >>> output = mixed.run(module, (torch.ones(3, 2),), {})
        >>> output.sum().backward()
        >>> output.dtype, module.weight.grad
        (torch.bfloat16, tensor([[3., 3.]]))
    """

    def __init__(self, module: nn.Module, config: Precision) -> None:
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
        args, kwargs = cast_forward_inputs(self._dtype, *args, **kwargs)
        with self._casts.over(module):
            return module(*args, **kwargs)

    def _cast(self, part: nn.Module, name: str, own: Tensor) -> Tensor | None:
        if self._dtype is None or not _is_castable(own, self._dtype):
            return None
        cast: Tensor = _Cast.apply(own, self._dtype)  # type: ignore[no-untyped-call]  # torch's
        return cast


def wire_dtype(config: Precision) -> torch.dtype | None:
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
    @untraced()
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.to(ctx.dtype)


def _in_backward() -> bool:
    return current_graph_task_id() >= 0


def _is_castable(tensor: Tensor, dtype: torch.dtype) -> bool:
    is_ignored = getattr(tensor, "_ddp_ignored", False)
    return tensor.is_floating_point() and tensor.dtype is not dtype and not is_ignored
