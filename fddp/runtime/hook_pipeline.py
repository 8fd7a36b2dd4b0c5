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

from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from fddp.core.protocol.differences import check_equal
from fddp.core.schedule.op import Op
from fddp.core.timeline import Interval
from fddp.errors import DesyncError, RankLostError, SyncTimeoutError
from fddp.hooks.future import Future
from fddp.hooks.hook import AllReduce
from fddp.runtime.program import Program
from fddp.transport.base import Transport, Work

T = TypeVar("T")


class Collectives(AllReduce):
    """Issues a hook's collectives of one bucket, along some axes.

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

    def all_to_all(self, tensor: Tensor) -> Future[Tensor]:
        self._check_equal("all_to_all", tensor)
        if len(tensor) != self.world_size:
            raise ValueError(
                f"{self._what}: all_to_all sends a row to each of {self.world_size} ranks, got a "
                f"tensor of shape {tuple(tensor.shape)}"
            )
        work = self._transport.all_to_all_in_place(
            tensor.view(-1), axes=self._axes, record_time=self._record_time
        )
        return self._started(work, tensor, tensor)

    def _check_equal(self, kind: str, tensor: Tensor) -> None:
        """Compare the operation over the ranks that take part, unless it is the same as at this
        position of an earlier step: backends abort the process if sizes differ. If so, DesyncError
        is raised on all of them. Other ranks have other shards, of which the hook may send more or
        fewer tensors."""
        transport = self._transport
        if transport.name in ("shm", "loopback") and tensor.is_cpu:
            return  # these transports detect differences themselves
        place = (self._axes, self._bucket, len(self._works))
        own = f"{kind} of {tensor.dtype} {tuple(tensor.shape)}"
        if transport.size_cache.get(place) == own:
            return
        received = transport.exchange(own.encode(), "hook operations", self._axes)
        check_equal(
            f"{self._what} on rank {transport.rank} of {transport.world_size}: the next operation "
            f"of the hook",
            [text.decode(errors="replace") for text in received],
            "a hook must pass tensors of the same size and dtype on every rank",
            DesyncError,
            self._topology.group(self._axes, transport.rank),
        )
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


class HookWork:
    """A hook's reduction of one bucket in flight.

    Attributes:
        collectives: collectives that the hook was given.
        op: the operation that the reduction replaces.
        own: the operation's memory, shape `(n,)`.
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
    def pending(self) -> bool:
        """True if a stage has not been started."""
        return self._future.pending

    @property
    def done(self) -> bool:
        """True if all stages were started and the result is available."""
        return not self.pending and self._future.done

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
