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
    """

    def __init__(
        self,
        future: Future[Any],
        collectives: Collectives,
        op: Op,
        own: Tensor,
        what: str,
        spans: list[Interval] | None = None,
    ) -> None:
        self.settled = False
        self._spans = spans
        self._future = future
        self.op = op
        self.own = own
        self.what = what
        self.collectives = collectives

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

    def advance(self) -> None:
        """Start the next stage, if there is one."""
        if self._future.pending:
            with torch.no_grad():
                self._timed(self._future.advance)

    def take(self) -> Any:
        """Return the result, and release it; to be called once. Starts the stages that the hook has
        not declared."""
        self.settled = True
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
