"""Records of the collectives that are issued."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import fddp
from fddp.transport.base import Transport, Work


class Issued(NamedTuple):
    """A collective, as a transport receives it."""

    kind: str
    dtype: str
    numel: int
    ranks: tuple[int, ...]


def record_issued(sync: fddp.GradSync) -> list[Issued]:
    """Return a list that receives each collective which `sync` issues from now on."""
    issued: list[Issued] = []
    transport = sync._engine.transport
    start = transport._start

    def note_and_start(operation: Any) -> Any:
        tensor = operation.tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        issued.append(Issued(operation.kind, dtype, tensor.numel(), operation.ranks))
        return start(operation)

    transport._start = note_and_start  # type: ignore[method-assign]
    return issued


def record_works(sync: fddp.GradSync) -> tuple[list[tuple[str, Work]], list[Work]]:
    """Return lists that receive each collective which `sync` starts, and each that is awaited."""
    started: list[tuple[str, Work]] = []
    awaited: list[Work] = []
    transport = sync._engine.transport
    start = transport._start

    def note_and_start(operation: Any) -> Work:
        work = start(operation)
        wait = work._wait

        def note_and_wait(what: str) -> None:
            awaited.append(work)
            wait(what)

        work._wait = note_and_wait  # type: ignore[method-assign]
        started.append((str(operation), work))
        return work

    transport._start = note_and_start  # type: ignore[method-assign]
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
