"""Runs of a training step in place of one rank, with inputs that other ranks may have."""

from __future__ import annotations

import copy
import inspect
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from fddp.extend import is_dtensor, mirrored, mirrored_process_group
from fddp.testing.replication.allowed import is_allowed
from fddp.testing.replication.inputs import of_another_rank, scaled
from fddp.testing.replication.leaves import (
    buffers_of,
    copied,
    gradients_of,
    is_tuple,
    leaves_of,
    trees_of,
)
from fddp.testing.replication.limits import NO_LIMIT, Limit, call_within
from fddp.testing.replication.lines import Lines
from fddp.testing.replication.observers import Collective, Read, Reads, Transfers
from fddp.testing.replication.values import (
    Part,
    digest,
    has_content,
    is_same,
    may_be_one_of,
    snapshot,
)

RANK, RANDOM = "group.rank", "random numbers"
"""Causes of differences, beside names of inputs."""


class Outcome(NamedTuple):
    """Outcome of a run.

    Attributes:
        values: snapshots of what must be equal on all ranks, by path.
        parts: those of DTensors of which each rank holds another part.
        buffers: those of buffers of modules.
        collectives, reads: in order.
        torch_calls: number of calls of functions of torch.
        error: error of the step, or that it exceeded a limit.
    """

    values: dict[str, Any]
    parts: dict[str, Any]
    buffers: dict[str, Any]
    collectives: list[Collective]
    reads: list[Read]
    torch_calls: int
    error: Exception | None

    def without(self, allow: Sequence[str]) -> Outcome:
        """This outcome without values that may differ."""
        values, parts = (
            {path: value for path, value in held.items() if not is_allowed(path, allow)}
            for held in (self.values, self.parts)
        )
        return self._replace(values=values, parts=parts)


class Program(NamedTuple):
    """A step with its inputs.

    Attributes:
        step: the step.
        replicated, varying: inputs by name.
        takes_group: True if the step has a parameter `group`.
        ranks: number of ranks that the step seems to run on.
        limit: limit of a run.
    """

    step: Callable[..., Any]
    replicated: dict[str, Any]
    varying: dict[str, Any]
    takes_group: bool
    ranks: int
    limit: Limit

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
        limit: Limit | None = None,
    ) -> Outcome:
        """Run the step on copies of its inputs.

        Args:
            others: causes of which this run has others than usual.
            earlier: collectives of a run whose results this one gets.
            factor: factor on the inputs among `others`; None for inputs of another rank.
            sums: factor on the results of `psum`.
            reads: observer of numbers that Python reads.
            lines: observer of lines.
            limit: of this run, if not the program's.
        """
        transfers, error, result = Transfers(earlier, sums), None, None
        torch_calls = 0
        call = self.step if lines is None else _through(lines, self.step)
        rank = int(RANK in others)
        with (
            mirrored(rank, self.ranks, transfers) as group,
            mirrored_process_group(group),
            _launched(rank, self.ranks),
            _seeded(int(RANDOM in others)),
        ):
            replicated, varying = self.inputs(others, factor)
            more = {"group": group} if self.takes_group else {}
            fn = partial(call, *replicated.values(), *varying.values(), **more)
            observer = nullcontext() if reads is None else reads
            try:
                result, torch_calls = call_within(limit or self.limit, fn, observer)
            except Exception as raised:
                error = raised
        values = _outputs(self.replicated, replicated, result)
        parts = {p: values.pop(p).local for p, v in [*values.items()] if isinstance(v, Part)}
        pairs = [pair for n, v in replicated.items() for pair in buffers_of(n, v)]
        buffers = {path: snapshot(buffer) for path, buffer in pairs}
        log = [] if reads is None else reads.reads
        return Outcome(values, parts, buffers, transfers.collectives, log, torch_calls, error)

    def inputs(
        self, others: frozenset[str] = frozenset(), factor: float | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Copies of the inputs, replicated and varying; see `run`."""
        functions = self.functions
        given = {name: value for name, value in self.varying.items() if name not in functions}
        replicated, given = _copies(self.replicated, given)
        varying = {}
        for name in self.varying:
            is_other = name in others
            function, own = functions.get(name), given.get(name)
            if function is not None:  # which may return what it keeps
                own = copy.deepcopy(function(int(is_other and factor is None)))
            if is_other and factor is not None:
                own = scaled(name, own, factor)
            elif is_other and not function:
                own = of_another_rank(name, own)
            varying[name] = own
        return replicated, varying

    @property
    def functions(self) -> dict[str, Callable[[int], Any]]:
        """Varying inputs that are functions of the rank."""
        return {
            name: value
            for name, value in self.varying.items()
            if inspect.isroutine(value) or isinstance(value, partial)
        }

    def check_functions(self) -> None:
        """Check that functions of the rank depend on it.

        Raises:
            ValueError: one does not.
        """
        for name, function in self.functions.items():
            with _seeded(0):
                one, two = digest(function(0)), digest(function(1))
            if one == two and one is not None:
                raise ValueError(
                    f"`{name}` has the same values for rank 0 and rank 1; pass a function whose "
                    f"result depends on the rank, or pass the values in replicated="
                )


def program(
    step: Callable[..., Any],
    replicated: Sequence[Any],
    varying: Sequence[Any],
    ranks: int,
    limit: Limit = NO_LIMIT,
) -> Program:
    """A step with its inputs, which have the names of its parameters."""
    parameters = inspect.signature(step).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count = len(replicated) + len(varying)
    names = [n for n in named if n != "group"][:count]
    names += [f"input {number}" for number in range(len(names), count)]
    for name, value in zip(names, (*replicated, *varying), strict=True):
        _check_is_of_no_group(name, value)
    return Program(
        step,
        dict(zip(names, replicated, strict=False)),
        dict(zip(names[len(replicated) :], varying, strict=True)),
        any(p.name == "group" for p in parameters),
        ranks,
        limit,
    )


def _check_is_of_no_group(name: str, value: Any) -> None:
    """Check that an input uses no process group, which would be one made before the check."""
    made = "was made before the check, on a process group that is not simulated"
    if isinstance(value, torch.nn.Module):
        for path, module in value.named_modules(prefix=name):
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                raise ValueError(
                    f"{path} is a DistributedDataParallel that {made}; pass its module, and wrap "
                    f"that within the step"
                )
    for path, leaf in leaves_of(name, value):
        if is_dtensor(leaf):
            raise ValueError(
                f"{path} is a DTensor that {made}; make the mesh and the DTensor within the step"
            )


def _copies(replicated: dict[str, Any], varying: dict[str, Any]) -> Any:
    """Copies of both, in which what they share stays shared."""
    try:
        return copied((replicated, varying))
    except Exception as error:
        raise ValueError(
            f"the inputs {', '.join(f'`{name}`' for name in (*replicated, *varying))} can't be "
            f"copied: {error!r}; make within the step what has no copies"
        ) from error


def _outputs(given: dict[str, Any], replicated: dict[str, Any], result: Any) -> dict[str, Any]:
    """Snapshots of what must be equal on all ranks: the replicated inputs after the step, and the
    results that take their place. Empty if the step has changed and returned nothing.

    Gradients count if nothing else has changed: other steps may leave their own.
    """
    before = {name: _snapshots(leaves_of(name, value)) for name, value in given.items()}
    found = {name: _snapshots(leaves_of(name, value)) for name, value in replicated.items()}
    in_place = {name for name in found if not _are_same(before[name], found[name])}
    trees = trees_of(replicated)
    after = {path: leaf for leaves in found.values() for path, leaf in leaves.items()}
    results: dict[str, Any] = {}
    if not replicated:
        results = _snapshots(leaves_of("result", result))
    elif is_tuple(result):
        values = [replicated[name] for name in trees]
        pairs = [*enumerate(zip(trees, result, strict=False))]
        states = [pair for pair in pairs if may_be_one_of(pair[1][1], values)]
        for number, (name, part) in states or pairs:
            if name not in in_place or _are_alike(replicated[name], part):
                results |= _snapshots(leaves_of(f"result[{number}]", part))
    elif any(n not in in_place or _are_alike(replicated[n], result) for n in trees):
        results = _snapshots(leaves_of("result", result))
    if in_place or any(map(has_content, results.values())):
        return after | results
    gradients = _snapshots(p for n, v in replicated.items() for p in gradients_of(n, v))
    return after | gradients if gradients else {}


def _snapshots(leaves: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {path: snapshot(leaf) for path, leaf in leaves}


def _are_same(leaves: dict[str, Any], others: dict[str, Any]) -> bool:
    same_paths = leaves.keys() == others.keys()
    return same_paths and all(is_same(leaf, others[path]) for path, leaf in leaves.items())


def _are_alike(value: Any, other: Any) -> bool:
    """Return True if two values have leaves with the same paths and shapes."""
    one, two = (
        [(path, getattr(leaf, "shape", ())) for path, leaf in leaves_of("", part)]
        for part in (value, other)
    )
    return one == two


def _through(lines: Lines, step: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: lines.call(step, *args, **kwargs)


@contextmanager
def _launched(rank: int, ranks: int) -> Iterator[None]:
    """Set the variables of the environment that torchrun sets; restore them afterwards."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    before = {name: os.environ.get(name) for name in numbers}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    try:
        yield
    finally:
        for name, text in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if text is None else {name: text})


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
