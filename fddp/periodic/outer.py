"""Outer optimizers: pure pairs of functions that turn averaged outer gradients into updates."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from fddp import tree_map
from fddp.extend import entrance


class Outer(NamedTuple):
    """An outer optimizer, in the form of a gradient transformation of optax or torchopt."""

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


@entrance
def sgd(lr: float = 0.7, *, momentum: float = 0.9, nesterov: bool = True) -> Outer:
    """SGD as `torch.optim.SGD`, by default the outer optimizer of DiLoCo, as a pure pair like a
    gradient transformation of optax or torchopt.

    Args:
        lr: learning rate.
        momentum: momentum; 0 keeps no state.
        nesterov: True for Nesterov's momentum; without effect if `momentum` is 0.

    Returns:
        A pair `(init, update)`. `init(params)` returns the state: zeros as momentum, or {} without
        momentum. `update(grads, state, params)` returns updates, to be added to the parameters,
        and the new state. Neither writes its arguments.

    Example:
        >>> import torch
        >>> init, update = sgd(0.5, momentum=0.5)
        >>> params = {"w": torch.tensor(1.0)}
        >>> updates, state = update({"w": torch.tensor(2.0)}, init(params), params)
        >>> updates["w"].item(), state["momentum"]["w"].item()
        (-1.5, 2.0)
    """

    def init(params: Any) -> dict[str, Any]:
        return {"momentum": tree_map(lambda p: p * 0, params)} if momentum else {}

    def update(grads: Any, state: dict[str, Any], params: Any = None) -> tuple[Any, dict[str, Any]]:
        if not momentum:
            return tree_map(lambda g: g * -lr, grads), state
        kept = tree_map(lambda m, g: m * momentum + g, state["momentum"], grads)
        steps = tree_map(lambda g, m: g + m * momentum, grads, kept) if nesterov else kept
        return tree_map(lambda step: step * -lr, steps), {"momentum": kept}

    return Outer(init, update)


def updates_of(outer: Any, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Call the update of an outer optimizer. Those of torchopt write their arguments by default."""
    if "inplace" in inspect.signature(outer.update).parameters:
        updates, state = outer.update(grads, state, params=params, inplace=False)
    else:
        updates, state = outer.update(grads, state, params)
    return updates, state


def trial_updates(outer: Any, params: Any, state: Any) -> dict[str, Any]:
    """Return two updates from the parameters as gradients. Learning rates show in the first, and
    most other settings of an optimizer in the second."""
    first, state = updates_of(outer, params, state, params)
    second, _ = updates_of(outer, params, state, params)
    return {"first update": first, "second update": second}
