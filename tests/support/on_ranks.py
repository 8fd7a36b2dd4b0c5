"""Tests that are functions of one rank: what they assert holds on each of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from fddp.transport import loopback
from tests.support.ranks import RankPool

Fn = Callable[..., Any]


def on_threads(world_size: int) -> Callable[[Fn], Fn]:
    """Make a test of `fn(group, **fixtures)`, which runs on so many threads."""

    def decorate(fn: Fn) -> Fn:
        @functools.wraps(fn)
        def test(**fixtures: Any) -> None:
            loopback(world_size, lambda group: fn(group, **fixtures))

        return _taking(test, [*inspect.signature(fn).parameters][1:])

    return decorate


def on_processes(world_size: int) -> Callable[[Fn], Fn]:
    """Make a test of `fn(rank, world_size, **fixtures)`, which runs on so many processes."""

    def decorate(fn: Fn) -> Fn:
        @functools.wraps(fn)
        def test(ranks: RankPool, **fixtures: Any) -> None:
            ranks.run(world_size, _call_wrapped, test, fixtures)

        return _taking(test, ["ranks", *[*inspect.signature(fn).parameters][2:]])

    return decorate


def _taking(test: Any, names: list[str]) -> Fn:
    """Let pytest pass these fixtures and parameters."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    result: Fn = test
    return result


def _call_wrapped(rank: int, world_size: int, test: Any, fixtures: dict[str, Any]) -> None:
    """Processes know functions by their names, and that of the function is the test's."""
    test.__wrapped__(rank, world_size, **fixtures)
