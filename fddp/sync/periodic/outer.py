"""Outer optimizers: pure pairs of functions that turn averaged outer gradients into updates."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fddp.collectives.replicas.check import check_replicas
from fddp.errors import DesyncError
from fddp.sync.transform import Transform
from fddp.tree.pytree import tree_map

if TYPE_CHECKING:
    from fddp.transport import Group


def sgd(lr: float = 0.7, *, momentum: float = 0.9, nesterov: bool = True) -> Transform:
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

    return Transform(init, update)


def updates_of(outer: Any, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Call the update of an outer optimizer. Those of torchopt write their arguments by default."""
    if "inplace" in inspect.signature(outer.update).parameters:
        updates, state = outer.update(grads, state, params=params, inplace=False)
    else:
        updates, state = outer.update(grads, state, params)
    return updates, state


def check_outer_updates(
    outer: Any, fragments: Sequence[Mapping[str, Any]], group: Group | None
) -> None:
    """Raise on every rank if ranks have different outer optimizers. A collective call.

    Compares two updates that each rank computes from the same gradients: learning rates show in the
    first, and most others of their settings in the second.

    Args:
        outer: outer optimizer of this rank.
        fragments: states before the first step, with equal "params" on all ranks.
        group: ranks to compare.

    Raises:
        DesyncError: the updates differ.
    """
    updates: dict[str, Any] = {}
    for number, fragment in enumerate(fragments):
        params, state = fragment["params"], fragment["outer"]
        for k in (1, 2):
            update, state = updates_of(outer, params, state, params)
            updates[f"update {k} of fragment {number}"] = update
    try:
        check_replicas(updates, group)
    except DesyncError as error:
        raise DesyncError(
            f"the outer optimizers of ranks differ: they make different updates of equal "
            f"gradients, first in leaf {error.path!r}; pass the same optimizer with the same "
            f"settings on all ranks. {error}",
            path=error.path,
            ranks=error.ranks,
        ) from error
