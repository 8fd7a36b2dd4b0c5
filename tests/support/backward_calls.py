"""Side effects of a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], object]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


def call_in_backward(x: Tensor, call: Callable[[], object]) -> Tensor:
    """Return a copy of `x`. Backward runs `call()` before the gradient passes on.

    `call` must create the error that it raises. One that it holds would keep the graph alive
    through its traceback, in a cycle that Python cannot collect.
    """
    result: Tensor = _CallInBackward.apply(x, call)
    return result
