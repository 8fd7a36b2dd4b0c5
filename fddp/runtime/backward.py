"""Backward passes that accumulate gradients only into the leaves of the call.

[Note: gradients of others]
`Tensor.backward()` adds to `.grad` of every leaf in the graph. If the graph has foreign leaves,
which are not arguments of the call, the pass is restricted by `inputs=`. Two kinds of nodes rule
this out: those that run a nested backward pass and reject `inputs=` (re-entrant checkpointing), and
those that hide our leaves. In these cases the `.grad` of the visible foreign leaves is set aside
before the pass and restored after it. Foreign leaves hidden in a nested pass are treated likewise
when its recomputation first uses them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from fddp._C import GraphView


_Root: TypeAlias = Tensor | GradientEdge

# Ranks that are threads of one process may share foreign leaves. A lock is safe: nothing in a
# backward pass waits for another rank.
_ONE_AT_A_TIME = threading.RLock()


def backward(loss: Tensor, view: GraphView, leaves: Sequence[Tensor]) -> None:
    """Accumulate gradients of `loss`, a scalar, into `leaves` only, which are in the order of
    `view.used`."""
    options: dict[str, Any] = {}
    if view.foreign and not view.whole:
        served = [leaf for leaf, used in zip(leaves, view.used, strict=True) if used]
        if not served:
            return
        options["inputs"] = served
    if not view.opaque:
        torch.autograd.backward(loss, **options)
        return
    with _ONE_AT_A_TIME:
        taken = _StashedGradients(view.foreign if view.whole else (), leaves)
        try:
            with _Recomputation(taken):
                _backward_from_edges(loss, **options)
        finally:
            taken.restore()


def _backward_from_edges(
    tensors: _Root | Sequence[_Root],
    grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
    *,
    inputs: Sequence[_Root] | None = None,
    **options: Any,
) -> None:
    """Run `torch.autograd.backward` without a torch-function override. An override disables the
    mode, which must be active in recomputations."""
    roots = (tensors,) if isinstance(tensors, (Tensor, GradientEdge)) else tuple(tensors)
    grads = (grad_tensors,) if isinstance(grad_tensors, Tensor) else grad_tensors
    seeds = [
        _implicit_seed(root) if grad is None else grad
        for root, grad in zip(roots, grads or [None] * len(roots), strict=True)
    ]
    if inputs is not None:
        options["inputs"] = [_edge(leaf) for leaf in inputs]
    torch.autograd.backward([_edge(root) for root in roots], seeds, **options)


def _edge(root: _Root) -> GradientEdge:
    return root if isinstance(root, GradientEdge) else get_gradient_edge(root)


def _implicit_seed(root: _Root) -> Tensor | None:
    if isinstance(root, GradientEdge):
        return None
    if root.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    return torch.ones_like(root)


class _Recomputation(TorchFunctionMode):
    """Sets the `.grad` of foreign leaves aside when a recomputation first uses them."""

    def __init__(self, taken: _StashedGradients) -> None:
        super().__init__()
        self._taken = taken

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, Tensor):
                    self._taken.take(item)
        if func is torch.autograd.backward:
            with self:
                return _backward_from_edges(*args, **kwargs)
        return func(*args, **kwargs)


class _StashedGradients:
    """Gradients of foreign leaves, set aside."""

    def __init__(self, foreign: Iterable[Tensor], own: Iterable[Tensor]) -> None:
        self._known = {id(leaf) for leaf in own}
        # Weak: a recomputation's own inputs are leaves too, and must not outlive it.
        self._taken: list[tuple[weakref.ref[Tensor], Tensor | None]] = []
        for tensor in foreign:
            self.take(tensor)

    def take(self, tensor: Tensor) -> None:
        """Set the gradient of a foreign leaf aside; later calls do nothing."""
        if id(tensor) in self._known or not (tensor.requires_grad and tensor.is_leaf):
            return
        self._known.add(id(tensor))
        self._taken.append((weakref.ref(tensor), tensor.grad))
        tensor.grad = None

    def restore(self) -> None:
        """Restore all gradients."""
        for reference, grad in self._taken:
            tensor = reference()
            if tensor is not None:
                tensor.grad = grad
