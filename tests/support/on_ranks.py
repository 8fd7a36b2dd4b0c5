"""Tests that are functions of one rank: what they assert holds on each of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fddp.transport import loopback
from tests.support.ranks import RankPool

Fn = Callable[..., Any]


def on_threads(world_size: int) -> Callable[[Fn], Fn]:
    """Make a test of `fn(group, **fixtures)`, which runs on so many threads."""

    def decorate(fn: Fn) -> Fn:
        def test(**fixtures: Any) -> None:
            loopback(world_size, lambda group: fn(group, **fixtures))

        return _named_as(fn, test, inspect.signature(fn).parameters.values(), leading=1)

    return decorate


def on_processes(world_size: int) -> Callable[[Fn], Fn]:
    """Make a test of `fn(rank, world_size, **fixtures)`, which runs on so many processes."""

    def decorate(fn: Fn) -> Fn:
        def test(ranks: RankPool, **fixtures: Any) -> None:
            ranks.run(world_size, _call_body, test, fixtures)

        test.body = fn  # type: ignore[attr-defined]
        pool = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        own = [*inspect.signature(fn).parameters.values()][2:]
        return _named_as(fn, test, [pool, *own], leading=0)

    return decorate


def _named_as(fn: Fn, test: Any, parameters: Any, leading: int) -> Fn:
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(test, name, getattr(fn, name))
    test.__signature__ = inspect.Signature([*parameters][leading:])
    result: Fn = test
    return result


def _call_body(rank: int, world_size: int, test: Any, fixtures: dict[str, Any]) -> None:
    """Processes know functions by their names, and that of the function is the test's."""
    test.body(rank, world_size, **fixtures)
