"""Hooks at work: between a step's operations and its transport.

[Note: stages in one order]
Collectives are matched by the order in which they are issued, and a hook's second collective can
start only when its first is done, which ranks see at different times. So the order is fixed
beforehand: after the first stage of a bucket comes one further stage of each bucket before it,
latest first, where it has one; and before an operation that needs a bucket's result, rounds of one
stage for each bucket that has any left. During backward nothing waits: where a stage builds on what
is not there, the line stops, and goes on from there at the next full bucket. From the end of
backward on it waits.

What a hook of torch's kind issues can't be seen, and stages of it may be issued by a thread of the
backend. So the next bucket leaves only when the one before is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from fddp.core.schedule.op import Op
from fddp.core.timeline import Interval
from fddp.errors import DesyncError, RankLostError, SyncTimeoutError
from fddp.hooks.future import Future
from fddp.hooks.hook import AllReduce
from fddp.runtime.program import Program
from fddp.transport.base import Transport, Work

T = TypeVar("T")


class Collectives(AllReduce):
    """Issues a hook's collectives of one bucket.

    Args:
        transport: carries them.
        program: knows this rank's place.
        axes: along which ranks meet.
        bucket: the bucket's number.
        what: the bucket in words, for errors.
        record_time: whether to record when they are done.

    Attributes:
        nbytes: bytes that this rank has given to them.
    """

    def __init__(
        self,
        transport: Transport,
        program: Program,
        axes: tuple[str, ...],
        bucket: int,
        what: str,
        *,
        record_time: bool,
    ) -> None:
        self.rank, self.world_size = 0, 1
        for axis in axes:
            size, place = program.places[axis]
            self.rank, self.world_size = self.rank * size + place, self.world_size * size
        self.nbytes = 0
        self._transport = transport
        self._axes = axes
        self._bucket = bucket
        self._what = what
        self._record_time = record_time
        self._works: list[Work] = []

    def __call__(self, tensor: Tensor) -> Future[Tensor]:
        self._check_alike("all_reduce", tensor)
        work = self._transport.all_reduce(tensor, axes=self._axes, record_time=self._record_time)
        return self._started(work, tensor, tensor)

    def all_gather(self, tensor: Tensor) -> Future[Tensor]:
        self._check_alike("all_gather", tensor)
        everyones = tensor.new_empty((self.world_size, *tensor.shape))
        everyones[self.rank].copy_(tensor)
        work = self._transport.all_gather_in_place(
            everyones.view(-1), axes=self._axes, record_time=self._record_time
        )
        return self._started(work, tensor, everyones)

    def _check_alike(self, kind: str, tensor: Tensor) -> None:
        """Compares what hooks are about to issue over ranks, where it is not what they issued in
        the same place of a step before: backends end the process where sizes differ.

        Raises:
            DesyncError: ranks issue different operations; on every rank.
        """
        transport = self._transport
        if transport.name in ("shm", "loopback") and tensor.is_cpu:
            return  # which tell them apart themselves
        place = (self._bucket, len(self._works))
        own = f"{kind} of {tensor.dtype} {tuple(tensor.shape)}"
        if transport.size_cache.get(place) == own:
            return
        texts = transport.exchange(own.encode(), "hook operations")
        told = [text.decode(errors="replace") for text in texts]
        for rank, theirs in enumerate(told):
            if theirs != told[0]:
                raise DesyncError(
                    f"{self._what} on rank {transport.rank} of {transport.world_size}: hooks are "
                    f"about to issue different operations: rank 0 {told[0]}, rank {rank} {theirs}; "
                    f"a hook must hand over tensors of one size and dtype on every rank"
                )
        transport.size_cache[place] = own

    @property
    def done_s(self) -> float | None:
        """When the last of them was done, as `Work.done_s`."""
        return self._works[-1].done_s if self._works else None

    def _started(self, work: Work, given: Tensor, result: Tensor) -> Future[Tensor]:
        self._works.append(work)
        self.nbytes += given.nbytes

        def take() -> Tensor:
            work.wait(self._what)
            return result

        return Future.started(lambda: work.done, take)


class StagePipeline:
    """Hooks' reductions of one step, in the order of their launch; see [Note: stages in one
    order]."""

    def __init__(self) -> None:
        self._launched: list[HookWork] = []
        self._due: deque[HookWork] = deque()

    def join(self, work: HookWork) -> None:
        """Takes in a reduction whose first stage has just been started; the others are due a
        further one."""
        self._due.extend(reversed(self._launched))
        self._launched.append(work)

    @property
    def last(self) -> HookWork | None:
        """What was launched last."""
        return self._launched[-1] if self._launched else None

    def go_on(self, *, block: bool) -> bool:
        """Starts the stages that are due; False if one builds on what is not there."""
        while self._due:
            if not self._due[0].advance(block=block):
                return False
            self._due.popleft()
        return True

    def run_out(self, work: HookWork, *, block: bool) -> bool:
        """Starts all stages that a reduction has left; False as for `go_on`."""
        while self.go_on(block=block):
            if not work.pending:
                return True
            self._due.extend(self._launched)
        return False


class HookWork:
    """A hook's reduction of one bucket in flight.

    Args:
        future: what the hook returned.
        collectives: what the hook was given.
        op: the operation that it takes the place of.
        own: the operation's memory, shape `(n,)`.
        what: the bucket in words, for errors.
        spans: takes when the hook's stages ran; None for where that is not wanted.

    Attributes:
        settled: whether the result was taken.
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
        self._collectives = collectives

    @property
    def pending(self) -> bool:
        """Whether a stage has not been started."""
        return self._future.pending

    @property
    def done(self) -> bool:
        """Whether nothing is left to start, and nothing to wait for."""
        return not self.pending and self._future.done

    @property
    def nbytes(self) -> int:
        """Bytes that this rank has given to collectives."""
        return self._collectives.nbytes

    @property
    def done_s(self) -> float | None:
        """When the last collective was done, as `Work.done_s`."""
        return self._collectives.done_s

    def advance(self, *, block: bool) -> bool:
        """Starts the next stage, if there is one; see `Future.advance`."""
        if not self.pending:
            return True
        try:
            with torch.no_grad():
                return self._timed(lambda: self._future.advance(block=block))
        except (RankLostError, SyncTimeoutError) as error:
            error.bucket = self.op.bucket  # which need not be the one that the session is at
            raise

    def take(self) -> Any:
        """The result, once, which is not kept."""
        self.settled = True
        future, self._future = self._future, Future.of(None)
        try:
            return self._timed(future.wait)
        except (RankLostError, SyncTimeoutError) as error:
            error.bucket = self.op.bucket
            raise

    def _timed(self, stage: Callable[[], T]) -> T:
        """What a stage gives, after taking note of when it ran."""
        if self._spans is None:
            return stage()
        start_s = perf_counter()
        try:
            return stage()
        finally:
            self._spans.append((start_s, perf_counter()))
