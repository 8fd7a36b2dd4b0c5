"""Runs of a training step on loopback ranks, and the values after each step."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

import fddp
from fddp.extend import LoopbackGroup, in_turns, tree_flatten
from fddp.testing.replication.leaves import copied, is_leaf, is_tuple, leaves_of, trees_of
from fddp.testing.replication.values import Opaque, snapshot

Values = dict[str, Any]
"""Snapshots of leaves by path."""


class Trial(NamedTuple):
    """A step with its state, to be run on batches.

    Attributes:
        step: the step.
        state: its state by name.
        takes_group: True if the step has a parameter `group`.
        steps: number of steps.
        is_double: True to compute in float64.
    """

    step: Callable[..., Any]
    state: dict[str, Any]
    takes_group: bool
    steps: int
    is_double: bool

    def run(
        self,
        batches: Sequence[Any],
        *,
        seed: int = 0,
        change_: Callable[[Any], None] = lambda state: None,
    ) -> list[list[Values]]:
        """Run the step on as many ranks as there are batches.

        Args:
            batches: tuple of the step's inputs, by rank.
            seed: of the global random numbers, the same on all ranks.
            change_: changes the state of a rank before the first step.

        Returns:
            The values by rank: before the first step, and after each.
        """

        def of_rank(group: LoopbackGroup) -> list[Values]:
            state, more = copied(self.state), {"group": group} if self.takes_group else {}
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            with _x64() if self.is_double else nullcontext():
                batch = batches[group.rank]
                if self.is_double:
                    state, batch = in_double(state), in_double(copy.deepcopy(batch))
                change_(state)
                found = [_values(state)]
                for _ in range(self.steps):
                    inputs = copy.deepcopy(batch)
                    result = self.step(*state.values(), *inputs, **more)
                    state, further = _after(state, result)
                    found.append(_values(state) | _floats(further))
            return found

        with _default_dtype(self.is_double):
            return in_turns(len(batches), of_rank)


def in_double(value: Any) -> Any:
    """Return a value with its floating-point numbers in float64. Tensors, modules and optimizers
    are changed in place, so that what refers to them follows."""

    def leaf_of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaf.data = leaf.data.double()
            if leaf.is_leaf and leaf.grad is not None:
                leaf.grad.data = leaf.grad.data.double()
        elif isinstance(leaf, torch.nn.Module):
            leaf.double()
        elif isinstance(leaf, torch.optim.Optimizer):
            for group in leaf.param_groups:
                in_double(group["params"])
            for own in leaf.state.values():
                in_double(own)
        elif hasattr(leaf, "astype") and leaf.dtype in (np.float16, np.float32):
            return leaf.astype("float64")
        return leaf

    return fddp.tree_map(leaf_of, value)


def buffers_of(state: dict[str, Any]) -> set[str]:
    """Paths of the buffers of modules."""
    modules = {name: v for name, v in state.items() if isinstance(v, torch.nn.Module)}
    return {f"{name}[{k!r}]" for name, module in modules.items() for k, _ in module.named_buffers()}


def _after(state: dict[str, Any], result: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state after a step with this result, and further results by name. Trees of the state are
    returned anew, first and in order, or written in place."""
    trees = trees_of(state)
    if len(trees) == 1 and _paths(result) == _paths(state[trees[0]]):
        if _may_follow(state[trees[0]], result):
            return state | {trees[0]: result}, {}
    elif (
        trees
        and is_tuple(result)
        and len(result) >= len(trees)
        and all(map(_may_follow, (state[name] for name in trees), result))
    ):
        further = {f"result[{k}]": v for k, v in enumerate(result) if k >= len(trees)}
        return state | dict(zip(trees, result, strict=False)), further
    return state, {"result": result}


def _may_follow(own: Any, result: Any) -> bool:
    """Return True unless an object would be followed by a value of another type, such as a loss."""
    return _paths(own) != ("",) or is_leaf(own) or type(result) is type(own)


def _paths(tree: Any) -> Any:
    return tree_flatten(tree)[1].paths


def _values(state: dict[str, Any]) -> Values:
    """Values of a state.

    Raises:
        TypeError: a leaf can't be compared.
    """
    found: Values = {}
    for name, value in state.items():
        leaves = [*leaves_of(name, value)]
        if isinstance(value, torch.nn.Module):
            leaves += [(f"{name}[{key!r}]", buffer) for key, buffer in value.named_buffers()]
        for path, leaf in leaves:
            found[path] = snapshot(leaf)
            if isinstance(found[path], Opaque):
                raise TypeError(
                    f"{path} of the state is a {type(leaf).__name__}, which can't be compared; "
                    f"pass trees of arrays and numbers, modules and optimizers"
                )
            if isinstance(leaf, Generator):  # how many numbers were drawn may depend on rows
                del found[path]
    return found


def _floats(results: dict[str, Any]) -> Values:
    """Floating-point numbers among results."""
    leaves = (pair for name, result in results.items() for pair in leaves_of(name, result))
    found = {path: snapshot(leaf) for path, leaf in leaves}
    return {
        path: value
        for path, value in found.items()
        if isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())
    }


def _x64() -> Any:
    """Context in which JAX computes in float64, if it is in use."""
    return sys.modules["jax"].enable_x64(True) if "jax" in sys.modules else nullcontext()


@contextmanager
def _default_dtype(is_double: bool) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if is_double else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
