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

from fddp.extend import mirrored
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
        ranks: number of ranks that the step seems to run on.
    """

    step: Callable[..., Any]
    replicated: dict[str, Any]
    varying: dict[str, Any]
    takes_group: bool
    ranks: int

    @property
    def causes(self) -> tuple[str, ...]:
        """Names of the inputs and sources that may differ between ranks."""
        return (*self.varying, RANK, RANDOM)

    def run(
        self,
        others: frozenset[str],
        *,
        earlier: Sequence[Collective] = (),
        factor: float | None = None,
        sums: int = 1,
        reads: Reads | None = None,
        lines: Lines | None = None,
    ) -> Outcome:
        """Run the step on copies of its inputs.

        Args:
            others: causes of which this run has others than usual.
            earlier: collectives of a run whose results this one gets.
            factor: factor on the inputs among `others`; None for inputs of another rank.
            sums: factor on the results of `psum`.
            reads: observer of numbers that Python reads.
            lines: observer of lines.
        """
        transfers, error, result = Transfers(earlier, sums), None, None
        call = self.step if lines is None else _through(lines, self.step)
        rank = int(RANK in others)
        with mirrored(rank, self.ranks, transfers) as group, _seeded(int(RANDOM in others)):
            replicated, varying = self.inputs(others, factor)
            more = {"group": group} if self.takes_group else {}
            try:
                with reads if reads is not None else nullcontext():
                    result = call(*replicated.values(), *varying.values(), **more)
            except Exception as raised:
                error = raised
        values, buffers = _outputs(replicated, result)
        log = [] if reads is None else reads.reads
        return Outcome(values, buffers, transfers.collectives, log, error)

    def inputs(
        self, others: frozenset[str] = frozenset(), factor: float | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Copies of the inputs, replicated and varying; see `run`."""
        functions = {name for name, value in self.varying.items() if inspect.isroutine(value)}
        given = {name: value for name, value in self.varying.items() if name not in functions}
        replicated, given = copy.deepcopy((self.replicated, given))
        varying = {}
        for name, value in self.varying.items():
            is_other = name in others
            own = value(int(is_other and factor is None)) if name in functions else given[name]
            if is_other and factor is not None:
                own = changed(own, partial(scale_, factor=factor), factor)
            elif is_other and name not in functions:
                own = _of_another_rank(name, own)
            varying[name] = own
        return replicated, varying


def program(
    step: Callable[..., Any], replicated: Sequence[Any], varying: Sequence[Any], ranks: int
) -> Program:
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
        ranks,
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
