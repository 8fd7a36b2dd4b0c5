"""Collectives of a communication hook in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fddp.core.protocol.differences import check_equal
from fddp.errors import DesyncError
from fddp.hooks.future import Future
from fddp.hooks.hook import AllReduce
from fddp.runtime.program import Program
from fddp.transport.base import Transport, Work

_ALIKE = "a hook must pass tensors of the same size and dtype on every rank"


class Issued(NamedTuple):
    """A collective that a hook has started: the method of `Collectives`, and its tensor."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device


class Collectives(AllReduce):
    """Issues a hook's collectives of one bucket, along some axes.

    Attributes:
        nbytes: bytes that this rank has passed to collectives.
        issued: the collectives, by stage.
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
        self.issued: list[list[Issued]] = [[]]
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
        return self._started("__call__", work, tensor, tensor)

    def all_gather(self, tensor: Tensor) -> Future[Tensor]:
        self._check_equal("all_gather", tensor)
        everyones = tensor.new_empty((self.world_size, *tensor.shape))
        everyones[self.rank].copy_(tensor)
        work = self._transport.all_gather_in_place(
            everyones.view(-1), axes=self._axes, record_time=self._record_time
        )
        return self._started("all_gather", work, tensor, everyones)

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
        return self._started("all_to_all", work, tensor, tensor)

    def start_zeros(self, expected: Sequence[Sequence[Issued]]) -> Future[Any]:
        """Start the collectives that are left of the `expected` ones, stage by stage, on zeros."""

        def start(operations: Sequence[Issued]) -> Future[Any]:
            futures = [
                getattr(self, each.kind)(
                    torch.zeros(each.shape, dtype=each.dtype, device=each.device)
                )
                for each in operations
            ]
            return Future.started(
                lambda: all(future.ready for future in futures),
                lambda: [future.wait() for future in futures],
            )

        stage = len(self.issued) - 1
        future = start(expected[stage][len(self.issued[stage]) :])
        for operations in expected[stage + 1 :]:
            future = future.then(lambda _, operations=operations: start(operations))  # type: ignore[misc]
        return future

    def release(self) -> None:
        """Forget the collectives. The error of one leads to the step, which the garbage collector
        can't free while the executor leads back."""
        self._works.clear()

    def _check_equal(self, kind: str, tensor: Tensor) -> None:
        """Compare the operation over the ranks that take part, unless it is the same as at this
        position of an earlier step: backends abort the process if sizes differ. If so, DesyncError
        is raised on all of them; if only some have changed, after the timeout, because the others
        issue the operation itself. Other ranks have other shards, of which the hook may send more
        or fewer tensors."""
        transport = self._transport
        if transport.name in ("shm", "loopback") and tensor.is_cpu:
            return  # these transports detect differences themselves
        place = (self._axes, self._bucket, len(self._works))
        own = f"{kind} of {tensor.dtype} {tuple(tensor.shape)}"
        before = transport.size_cache.get(place)
        if before == own:
            return
        subject = (
            f"{self._what} on rank {transport.rank} of {transport.world_size}: the next operation "
            f"of the hook"
        )
        try:
            received = transport.exchange(own.encode(), "hook operations", self._axes)
        except DesyncError as error:
            if before is None:
                raise
            raise DesyncError(
                f"{subject} is {own} and was {before}, which has not changed on all ranks; "
                f"{_ALIKE} ({error})"
            ) from error
        check_equal(
            subject,
            [text.decode(errors="replace") for text in received],
            _ALIKE,
            DesyncError,
            self._topology.group(self._axes, transport.rank),
        )
        transport.size_cache[place] = own

    @property
    def done_s(self) -> float | None:
        """Time at which the last collective finished, as `Work.done_s`."""
        return self._works[-1].done_s if self._works else None

    def _started(self, kind: str, work: Work, given: Tensor, result: Tensor) -> Future[Tensor]:
        self._works.append(work)
        self.issued[-1].append(Issued(kind, given.dtype, tuple(given.shape), given.device))
        self.nbytes += given.nbytes

        def take() -> Tensor:
            work.wait(self._what)
            return result

        return Future.started(lambda: work.done, take)
