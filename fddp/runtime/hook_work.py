"""A hook's reduction of one bucket in flight."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from fddp.core.schedule.op import Op
from fddp.core.timeline import Interval
from fddp.hooks.future import Future
from fddp.runtime.hook_collectives import Collectives

T = TypeVar("T")


class HookWork:
    """A hook's reduction of one bucket in flight.

    Attributes:
        collectives: collectives that the hook was given.
        op: the reduction that the hook carries out.
        own: memory of the reduction, shape `(n,)`.
        what: description of the bucket, for errors.
        settled: True once the result was taken.
        is_started: True once the first stage was started.
        is_declared: True unless the hook had stages that it has not declared.
    """

    def __init__(
        self,
        collectives: Collectives,
        op: Op,
        own: Tensor,
        what: str,
        spans: list[Interval] | None = None,
    ) -> None:
        self.settled, self.is_started, self.is_declared = False, False, True
        self._spans = spans
        self._future: Future[Any] = Future.of(None)
        self.op = op
        self.own = own
        self.what = what
        self.collectives = collectives

    def start(self, apply: Callable[[], Future[Any]]) -> None:
        """Start the first stage."""
        self._future = self._timed(apply)
        self.is_started = True

    @property
    def ready(self) -> bool:
        """True if the next stage could start at once, or without one the result is there."""
        return self._future.ready

    @property
    def done(self) -> bool:
        """True if all stages were started and the result is there."""
        return self._future.done

    def wait_ready(self) -> None:
        """Wait for the input of the next stage, if there is one."""
        if self._future.pending:
            with torch.no_grad():
                self._timed(self._future.wait_ready)

    @property
    def pending(self) -> bool:
        """True if a stage has not been started."""
        return self._future.pending

    def start_next(self) -> None:
        """Start the next stage, if there is one."""
        if self._future.pending:
            self.collectives.issued.append([])
            with torch.no_grad():
                self._timed(self._future.advance)

    def resolve(self) -> Any:
        """Wait for the result and return it; `take` returns it again."""
        value = self._wait()
        self._future = Future.of(value)
        return value

    def replace(self, future: Future[Any]) -> None:
        """Go on with another future, after the hook has raised."""
        self._future = future

    def take(self) -> Any:
        """Return the result, and release it; to be called once. Starts the stages that the hook has
        not declared."""
        self.settled = True
        return self._wait()

    def _wait(self) -> Any:
        self.is_declared = self.is_declared and not self._future.pending
        # Released first: an error keeps what its traceback leads to.
        future, self._future = self._future, Future.of(None)
        return self._timed(future.wait)

    def _timed(self, stage: Callable[[], T]) -> T:
        if self._spans is None:
            return stage()
        start_s = perf_counter()
        try:
            return stage()
        finally:
            self._spans.append((start_s, perf_counter()))
