"""Records of the collectives that are issued."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isfunction
from typing import Any, NamedTuple

import pytest

import fddp
from fddp.collectives import operators
from fddp.transport.base import Transport, Work

OPERATORS = tuple(
    name
    for name, value in vars(operators).items()
    if isfunction(value) and value.__module__ == operators.__name__ and name[0] != "_"
)
"""Names of the public operators."""


class Issued(NamedTuple):
    """A collective, as a transport receives it."""

    kind: str
    dtype: str
    numel: int
    ranks: tuple[int, ...]


def on_start(
    sync: fddp.GradSync,
    before: Callable[[Any], None] = lambda operation: None,
    after: Callable[[Any, Work], None] = lambda operation, work: None,
) -> None:
    """Call functions around the start of each collective that `sync` issues from now on."""
    transport = sync._engine.transport
    start = transport._start

    def observed(operation: Any) -> Work:
        before(operation)
        work = start(operation)
        after(operation, work)
        return work

    transport._start = observed  # type: ignore[method-assign]


def record_issued(sync: fddp.GradSync) -> list[Issued]:
    """Return a list that receives each collective which `sync` issues from now on."""
    issued: list[Issued] = []

    def note(operation: Any) -> None:
        tensor = operation.tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        issued.append(Issued(operation.kind, dtype, tensor.numel(), operation.ranks))

    on_start(sync, before=note)
    return issued


def record_works(sync: fddp.GradSync) -> tuple[list[tuple[str, Work]], list[Work]]:
    """Return lists that receive each collective which `sync` starts, and each that is awaited."""
    started: list[tuple[str, Work]] = []
    awaited: list[Work] = []

    def note(operation: Any, work: Work) -> None:
        wait = work._wait

        def note_and_wait(what: str) -> None:
            awaited.append(work)
            wait(what)

        work._wait = note_and_wait  # type: ignore[method-assign]
        started.append((str(operation), work))

    on_start(sync, after=note)
    return started, awaited


def collectives_called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the name of each collective called on a rank of this process."""
    calls: list[str] = []
    for name in ("all_reduce", "reduce_scatter", "all_gather_in_place", "exchange"):
        method: Callable[..., Any] = getattr(Transport, name)

        def counted(self: Any, *args: Any, _name: str = name, _do: Any = method, **kw: Any) -> Any:
            calls.append(_name)
            return _do(self, *args, **kw)

        monkeypatch.setattr(Transport, name, counted)
    return calls
