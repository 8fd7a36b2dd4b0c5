"""`GradSync` as a gradient transformation of optax and torchopt."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fddp.core.entrance import entrance
from fddp.sync.grad_sync import GradSync
from fddp.tree.foreign import holds_foreign, is_foreign, to_array, to_tensor
from fddp.tree.pytree import check_paths, flatten, map_leaves


class Transform(NamedTuple):
    """A gradient transformation in the sense of optax and torchopt; made by `as_transform`.

    Attributes:
        init: `init(params) -> state`.
        update: `update(updates, state, params=None) -> (updates, state)`; a collective call.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


@entrance
def as_transform(sync: GradSync | Callable[[Any], Any]) -> Transform:
    """Return a gradient transformation for `torchopt.chain` and `optax.chain`.

    The state of the communication hook becomes part of the optimizer's state, and is saved with it.
    Transformations before this one in a chain receive this rank's own gradients; those after it,
    the mean over ranks.

    Args:
        sync: a `GradSync` for the tree of parameters; or a stateless function from a tree to its
            mean over ranks, such as `fddp.pmean`, to differentiate through an optimizer
            (`torchopt.MetaOptimizer`, `torchopt.FuncOptimizer`).

    Returns:
        A pair of functions, `(init, update)`. `init(params)` returns `GradSync.init_state()`, with
        JAX arrays if the parameters are some; it does not communicate. `update(updates, state)`
        returns the mean over ranks and the new state, and writes neither argument; `params`, and
        `inplace` of torchopt, are ignored. `update(..., weight=...)` sets the weight of this rank;
        chains of optax pass it on to
        `optax.GradientTransformationExtraArgs(*as_transform(sync))`.

    Raises:
        TypeError: `sync` is not callable.
        TreeMismatchError: the parameters of `init` are not those of the plan.
        Exception: an error of `GradSync.update`; on every rank.

    Example:
        >>> import fddp, torch
        >>> def two_steps(group):
        ...     grads = {"w": torch.tensor([4.0, 3.0])}
        ...     with fddp.GradSync(grads, group=group, hook=fddp.hooks.top_k(0.5)) as sync:
        ...         init, update = fddp.as_transform(sync)
        ...         first, state = update(grads, init(grads))
        ...         second, state = update(grads, state)
        ...         return first["w"].tolist(), second["w"].tolist(), state[0]["residual"].tolist()
        >>> fddp.loopback(2, two_steps)[0]
        ([4.0, 0.0], [0.0, 6.0], [4.0, 0.0])
    """
    if isinstance(sync, GradSync):
        return _of_sync(sync)
    if not callable(sync):
        raise TypeError(
            f"as_transform takes a GradSync, or a function that returns the mean of a tree over "
            f"ranks, got a {type(sync).__name__}"
        )
    return _of_function(sync)


def _of_sync(sync: GradSync) -> Transform:
    def init(params: Any) -> Any:
        check_paths(flatten(params)[1], sync.plan.paths, "parameters")
        return _like(params, sync.init_state())

    def update(
        updates: Any, state: Any, params: Any = None, *, weight: float = 1.0, **extra: Any
    ) -> tuple[Any, Any]:
        mean, new_state = sync.update(updates, map_leaves(_as_tensor, state), weight=weight)
        return mean, _like((mean, state), new_state)

    return Transform(init, update)


def _like(tree: Any, state: Any) -> Any:
    """Return a state with JAX arrays for tensors if the leaves of a tree are JAX arrays, because
    JAX's checkpointing supports no tensors."""
    if "jax" not in sys.modules or not flatten(state)[0] or not holds_foreign(flatten(tree)[0]):
        return state
    return map_leaves(lambda leaf: to_array(leaf) if isinstance(leaf, Tensor) else leaf, state)


def _as_tensor(leaf: Any) -> Any:
    """Return a leaf of a state as a tensor; loaded states may have NumPy arrays."""
    if isinstance(leaf, np.ndarray):
        return torch.from_numpy(leaf.copy())
    if not is_foreign(leaf):
        return leaf
    return to_tensor(leaf)


def _of_function(mean_of: Callable[[Any], Any]) -> Transform:
    def init(params: Any) -> tuple[()]:
        return ()

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return mean_of(updates), state

    return Transform(init, update)
