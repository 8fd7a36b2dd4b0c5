"""Runs of a training step in place of one rank, with inputs that other ranks may have."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from fddp.extend import mirrored, tree_flatten
from fddp.testing.replication.lines import Lines
from fddp.testing.replication.observers import Collective, Read, Reads, Transfers
from fddp.testing.replication.values import changed, digest, leaves_of, scale_, shuffle_, snapshot

RANK, RANDOM = "group.rank", "random numbers"
"""Causes of differences, beside names of inputs."""

_SHRUNK = 0.9


class Outcome(NamedTuple):
    """Outcome of a run.

    Attributes:
        values: snapshots of what must be equal on all ranks, by path.
        buffers: those of buffers of modules.
        collectives, reads: in order.
        error: error of the step.
    """

    values: dict[str, Any]
    buffers: dict[str, Any]
    collectives: list[Collective]
    reads: list[Read]
    error: Exception | None


class Program(NamedTuple):
    """A step with its inputs.

    Attributes:
        step: the step.
        replicated, varying: inputs by name.
        takes_group: True if the step has a parameter `group`.
    """

    step: Callable[..., Any]
    replicated: dict[str, Any]
    varying: dict[str, Any]
    takes_group: bool

    @property
    def causes(self) -> tuple[str, ...]:
        """What may differ between ranks."""
        return (*self.varying, RANK, RANDOM)

    @property
    def draws(self) -> bool:
        """True if ranks have generators of random numbers of their own."""
        leaves = tree_flatten(list(self._inputs(frozenset())[1].values()))[0]
        return any(isinstance(leaf, torch.Generator) for leaf in leaves)

    def run(
        self,
        others: frozenset[str],
        ranks: int,
        *,
        earlier: Sequence[Collective] = (),
        factor: float = 1.0,
        reads: Reads | None = None,
        lines: Lines | None = None,
    ) -> Outcome:
        """Run the step on copies of its inputs.

        Args:
            others: causes of which this run has others than usual.
            ranks: number of ranks that there seem to be.
            earlier: collectives of a run whose results this one gets.
            factor: factor on varying inputs.
            reads: observer of numbers that Python reads.
            lines: observer of lines.
        """
        transfers, error, result = Transfers(earlier), None, None
        call = self.step if lines is None else _through(lines, self.step)
        rank = int(RANK in others)
        with mirrored(rank, ranks, transfers) as group, _seeded(int(RANDOM in others)):
            replicated, varying = self._inputs(others)
            if factor != 1.0:
                scaling_ = partial(scale_, factor=factor)
                varying = {n: changed(v, scaling_, factor) for n, v in varying.items()}
            more = {"group": group} if self.takes_group else {}
            try:
                with reads if reads is not None else nullcontext():
                    result = call(*replicated.values(), *varying.values(), **more)
            except Exception as raised:
                error = raised
        values, buffers = _outputs(replicated, result)
        log = [] if reads is None else reads.reads
        return Outcome(values, buffers, transfers.collectives, log, error)

    def _inputs(self, others: frozenset[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        made = {n: _made(v, n in others) for n, v in self.varying.items() if _is_function(v)}
        given = {n: v for n, v in self.varying.items() if n not in made}
        replicated, given = copy.deepcopy((self.replicated, given))
        made |= {n: _of_another_rank(n, v) if n in others else v for n, v in given.items()}
        return replicated, {name: made[name] for name in self.varying}


def program(step: Callable[..., Any], replicated: Sequence[Any], varying: Sequence[Any]) -> Program:
    """A step with its inputs, which have the names of its parameters."""
    parameters = inspect.signature(step).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count = len(replicated) + len(varying)
    names = [n for n in named if n != "group"][:count]
    names += [f"input {number}" for number in range(len(names), count)]
    return Program(
        step,
        dict(zip(names, replicated, strict=False)),
        dict(zip(names[len(replicated) :], varying, strict=True)),
        any(p.name == "group" for p in parameters),
    )


def _outputs(replicated: dict[str, Any], result: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Snapshots of what must be equal on all ranks: the replicated inputs after the step, and the
    results that take their place."""
    trees = [v for v in replicated.values() if not callable(getattr(v, "state_dict", None))]
    found = {path: leaf for n, v in replicated.items() for path, leaf in leaves_of(n, v)}
    if not replicated or (trees and not _is_tuple(result)):
        found |= dict(leaves_of("result", result))
    elif trees:
        for number, value in enumerate(result[: len(trees)]):
            found |= dict(leaves_of(f"result[{number}]", value))
    modules = {n: v for n, v in replicated.items() if isinstance(v, torch.nn.Module)}
    buffers = {f"{n}[{k!r}]": b for n, m in modules.items() for k, b in m.named_buffers()}
    return (
        {path: snapshot(leaf) for path, leaf in found.items()},
        {path: snapshot(leaf) for path, leaf in buffers.items()},
    )


def _through(lines: Lines, step: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: lines.call(step, *args, **kwargs)


def _is_tuple(result: Any) -> bool:
    return isinstance(result, tuple) and not hasattr(result, "_fields")


def _is_function(value: Any) -> bool:
    return inspect.isroutine(value)


def _of_another_rank(name: str, value: Any) -> Any:
    """Change an input.

    Raises:
        ValueError: it has no numbers to change.
    """
    before = digest(value)
    other = changed(value, shuffle_, _SHRUNK)
    if digest(other) == before:
        raise ValueError(
            f"`{name}` has no numbers that can be changed; pass a function of the rank for it"
        )
    return other


def _made(function: Callable[[int], Any], is_other: bool) -> Any:
    return function(int(is_other))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global sources of random numbers; restore them afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
