"""Leaves of parameters that are still being gathered: any use waits for them.

[Note: pending leaves]
The loss function gets a `PendingLeaf` in place of each leaf that has not arrived. It has the shape,
dtype and device of the leaf, and no memory, so that nothing can read what is in flight. Functions
and methods of torch are called with the leaf itself, once it has arrived (`__torch_function__`).
What takes another way (compiled extensions, TorchScript, transforms of `torch.func`, functions of
`torch.autograd.Function`) is served below autograd (`__torch_dispatch__`); the graph then leads to
the leaf through a node of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_ATTRIBUTES = ("device", "dtype", "is_leaf", "layout", "ndim", "requires_grad", "shape")
_METADATA = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
        *(Tensor.dim, Tensor.is_complex, Tensor.is_contiguous, Tensor.is_floating_point),
        *(Tensor.element_size, Tensor.nelement, Tensor.numel, Tensor.size, Tensor.stride),
    }
)
"""Functions that read no elements."""


class PendingLeaf(Tensor):
    """A leaf that has not arrived; see [Note: pending leaves]. Made by `pending`."""

    _leaf: Tensor
    _arrive: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function with the leaf itself."""
        of = _leaf_of if func in _METADATA else _arrived
        args, kwargs = tree_map_only(PendingLeaf, of, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch passes the function first
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call an operator with the leaf's elements."""
        args, kwargs = tree_map_only(PendingLeaf, _elements, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


class _Pending(torch.autograd.Function):
    """Identity, whose result has no memory."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, arrive: Callable[[], None]) -> Tensor:
        """Make the result."""
        result = Tensor._make_wrapper_subclass(
            PendingLeaf, leaf.shape, strides=leaf.stride(), dtype=leaf.dtype, device=leaf.device
        )
        result._leaf, result._arrive = leaf, arrive
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Pass the gradient on."""
        return grad, None


def pending(leaf: Tensor, arrive: Callable[[], None]) -> Tensor:
    """Return what stands for a leaf until it has arrived.

    Args:
        leaf: the leaf, whose elements may be in flight.
        arrive: waits for it; called before each use.
    """
    result: Tensor = _Pending.apply(leaf, arrive)  # type: ignore[no-untyped-call]
    return result


def _leaf_of(given: PendingLeaf) -> Tensor:
    return given._leaf


def _arrived(given: PendingLeaf) -> Tensor:
    given._arrive()
    return given._leaf


def _elements(given: PendingLeaf) -> Tensor:
    given._arrive()
    return given._leaf.detach()
