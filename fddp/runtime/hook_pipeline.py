"""Reductions by communication hooks, as a pipeline of stages.

[Note: stages in one order]
Ranks must issue collectives in the same order. The second collective of a hook can only start when
its first has finished, and ranks observe this at different times. The order is therefore fixed:
after the first stage of a bucket comes one further stage of each earlier bucket that has one,
latest first. Before an operation that needs a bucket's result come rounds of one stage of each
unfinished bucket. During backward nothing blocks: if a stage needs a result that is not available,
the pipeline stops and resumes there when the next bucket is full. After backward it blocks.

The collectives of raw hooks are not visible here, and a thread of the backend may issue them. The
next bucket is therefore started only when the previous one has finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
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
        transport: transport of the collectives.
        program: has this rank's place on each axis.
        axes: axes of the collectives.
        bucket: number of the bucket.
        what: description of the bucket, for errors.
        record_time: True to record when collectives finish.

    Attributes:
        nbytes: bytes that this rank has passed to collectives.
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
        self._topology = program.schedule.topology
        self._axes = axes
        self._bucket = bucket
        self._what = what
        self._record_time = record_time
        self._works: list[Work] = []

    def __call__(self, tensor: Tensor) -> Future[Tensor]:
        self._check_equal("all_reduce", tensor)
        work = self._transport.all_reduce(tensor, axes=self._axes, record_time=self._record_time)
        return self._started(work, tensor, tensor)

    def all_gather(self, tensor: Tensor) -> Future[Tensor]:
        self._check_equal("all_gather", tensor)
        everyones = tensor.new_empty((self.world_size, *tensor.shape))
        everyones[self.rank].copy_(tensor)
        work = self._transport.all_gather_in_place(
            everyones.view(-1), axes=self._axes, record_time=self._record_time
        )
        return self._started(work, tensor, everyones)

    def _check_equal(self, kind: str, tensor: Tensor) -> None:
        """Compare the operation over the ranks that take part, unless it is the same as at this
        position of an earlier step: backends abort the process if sizes differ.

        Other ranks have other shards, of which the hook may send more or fewer tensors.

        Raises:
            DesyncError: ranks issue different operations; on all that take part.
        """
        transport = self._transport
        if transport.name in ("shm", "loopback") and tensor.is_cpu:
            return  # these transports detect differences themselves
        place = (self._axes, self._bucket, len(self._works))
        own = f"{kind} of {tensor.dtype} {tuple(tensor.shape)}"
        if transport.size_cache.get(place) == own:
            return
        received = transport.exchange(own.encode(), "hook operations", self._axes)
        if any(text != received[0] for text in received):
            ranks = self._topology.group(self._axes, transport.rank)
            raise _mismatch_error(self._what, transport, dict(zip(ranks, received, strict=True)))
        transport.size_cache[place] = own

    @property
    def done_s(self) -> float | None:
        """Time at which the last collective finished, as `Work.done_s`."""
        return self._works[-1].done_s if self._works else None

    def _started(self, work: Work, given: Tensor, result: Tensor) -> Future[Tensor]:
        self._works.append(work)
        self.nbytes += given.nbytes

        def take() -> Tensor:
            work.wait(self._what)
            return result

        return Future.started(lambda: work.done, take)


def _mismatch_error(
    what: str, transport: Transport, operations: Mapping[int, bytes]
) -> DesyncError:
    """Return the error of a hook whose operations differ, given as text by rank."""
    texts = {rank: text.decode(errors="replace") for rank, text in operations.items()}
    (rank, first), *others = texts.items()
    other, theirs = next((other, text) for other, text in others if text != first)
    return DesyncError(
        f"{what} on rank {transport.rank} of {transport.world_size}: hooks are about to issue "
        f"different operations: rank {rank} {first}, rank {other} {theirs}; a hook must pass "
        f"tensors of the same size and dtype on every rank"
    )


class StagePipeline:
    """Reductions by the hook in one step; see [Note: stages in one order]."""

    def __init__(self) -> None:
        self._launched: list[HookWork] = []
        self._due: deque[HookWork] = deque()

    def join(self, work: HookWork) -> None:
        """Add a reduction whose first stage was started, and queue a stage of each earlier one."""
        self._due.extend(reversed(self._launched))
        self._launched.append(work)

    @property
    def last(self) -> HookWork | None:
        """Reduction that was launched last."""
        return self._launched[-1] if self._launched else None

    def advance(self, *, block: bool) -> bool:
        """Start the queued stages. Return False if one has to wait for a result."""
        while self._due:
            if not self._due[0].advance(block=block):
                return False
            self._due.popleft()
        return True

    def run_out(self, work: HookWork, *, block: bool) -> bool:
        """Start all remaining stages of a reduction. Return False as `advance`."""
        while self.advance(block=block):
            if not work.pending:
                return True
            self._due.extend(self._launched)
        return False


class HookWork:
    """A hook's reduction of one bucket in flight.

    Args:
        future: future that the hook returned.
        collectives: collectives that the hook was given.
        op: the operation that it replaces.
        own: the operation's memory, shape `(n,)`.
        what: description of the bucket, for errors.
        spans: receives the times of the hook's stages; None if they are not recorded.

    Attributes:
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
        self._collectives = collectives

    @property
    def pending(self) -> bool:
        """True if a stage has not been started."""
        return self._future.pending

    @property
    def done(self) -> bool:
        """True if all stages were started and the result is available."""
        return not self.pending and self._future.done

    @property
    def nbytes(self) -> int:
        """Bytes that this rank has passed to collectives."""
        return self._collectives.nbytes

    @property
    def done_s(self) -> float | None:
        """Time at which the last collective finished, as `Work.done_s`."""
        return self._collectives.done_s

    def advance(self, *, block: bool) -> bool:
        """Start the next stage, if there is one; see `Future.advance`."""
        if not self.pending:
            return True
        try:
            with torch.no_grad():
                return self._timed(lambda: self._future.advance(block=block))
        except (RankLostError, SyncTimeoutError) as error:
            error.bucket = self.op.bucket  # may differ from the step's current bucket
            raise

    def take(self) -> Any:
        """Return the result, and release it; to be called once."""
        self.settled = True
        future, self._future = self._future, Future.of(None)
        try:
            return self._timed(future.wait)
        except (RankLostError, SyncTimeoutError) as error:
            error.bucket = self.op.bucket
            raise

    def _timed(self, stage: Callable[[], T]) -> T:
        if self._spans is None:
            return stage()
        start_s = perf_counter()
        try:
            return stage()
        finally:
            self._spans.append((start_s, perf_counter()))
