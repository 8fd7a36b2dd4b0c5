"""Leaves and parameters that are still being gathered: any use waits for them.

[Note: pending leaves]
The loss function gets a `PendingLeaf` in place of each leaf that has not arrived. It has the shape,
dtype and device of the leaf, and no memory, so that nothing can read what is in flight. Functions
and methods of torch are called with the leaf itself, once it has arrived (`__torch_function__`).
What takes another way (compiled extensions, TorchScript, transforms of `torch.func`, functions of
`torch.autograd.Function`) is served below autograd (`__torch_dispatch__`); the graph then leads to
the leaf through a node of its own.

The parameters of a module stay the objects that they are, because hooks, compiled code and lists of
modules refer to them. A parameter that has not arrived has the class `PendingParameter`, whose
`__torch_function__` gives it its memory and its class back before any use. Until then, all of its
elements are NaN, for code that takes another way.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only

_ATTRIBUTES = ("device", "dtype", "is_leaf", "layout", "ndim", "requires_grad", "shape")
_METADATA = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
        *(Tensor.dim, Tensor.is_complex, Tensor.is_floating_point),
        *(Tensor.element_size, Tensor.nelement, Tensor.numel, Tensor.size),
    }
)
"""Functions that read no elements."""

_STRIDES = frozenset({Tensor.is_contiguous, Tensor.stride})
"""Functions that read no elements, and wait for parameters, which have other strides until then."""

_GRAD: Any = Tensor.grad  # a descriptor, which type checkers take for the attribute
_ATTACHED = frozenset(
    {
        *(_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__, Tensor._version.__get__),  # type: ignore[attr-defined]
        *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
    }
)
"""Functions that read no elements of parameters, which are leaves of graphs."""


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
        of = _leaf_of if func in _METADATA or func in _STRIDES else _arrived
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


class PendingParameter(Parameter):
    """A parameter that has not arrived; see [Note: pending leaves]. Made by `make_pending_`."""

    _arrive: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function with parameters that have arrived."""
        if func not in _METADATA and func not in _ATTACHED:
            tree_map_only(PendingParameter, _awaited, (tuple(args), kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    def __deepcopy__(self, memo: Any) -> Any:
        self._arrive()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._arrive()
        return self.__reduce_ex__(protocol)


def make_pending_(param: Tensor, arrive: Callable[[], None]) -> None:
    """Take the memory of a parameter until it has arrived.

    Args:
        param: the parameter, of the class `torch.nn.Parameter`.
        arrive: waits for it and calls `give_back_`; called before each use.
    """
    param.data = torch.full((), math.nan, dtype=param.dtype, device=param.device).expand(
        param.shape
    )
    param.__class__ = PendingParameter
    param._arrive = arrive  # type: ignore[attr-defined]


def give_back_(param: Tensor, memory: Tensor) -> None:
    """Give a parameter that has arrived its memory and its class."""
    if isinstance(param, PendingParameter):
        del param._arrive
        param.__class__ = Parameter  # type: ignore[assignment]
    param.data = memory


def _awaited(given: PendingParameter) -> PendingParameter:
    given._arrive()
    return given


def _leaf_of(given: PendingLeaf) -> Tensor:
    return given._leaf


def _arrived(given: PendingLeaf) -> Tensor:
    given._arrive()
    return given._leaf


def _elements(given: PendingLeaf) -> Tensor:
    given._arrive()
    return given._leaf.detach()
