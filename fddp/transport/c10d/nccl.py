"""Communicator over nccl."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fddp.transport.c10d.communicator import (
    Communicator,
    CommunicatorSpec,
    PendingWorks,
    bytes_of,
    reals_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from fddp.transport.operation import Operation


class NcclCommunicator(Communicator):
    """nccl, which connects at the first operation on the current device."""

    _averages = True
    _is_owner = True

    def __init__(self, spec: CommunicatorSpec) -> None:
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=spec.timeout_s)
        size = len(spec.ranks)
        backend = c10d.ProcessGroupNCCL(spec.store, spec.place, size, options)
        super().__init__(backend, spec.rank, spec.ranks)
        self._origin: tuple[torch.cuda.Stream, torch.cuda.Event, float] | None = None

    def _reduce_scatter(self, operation: Operation) -> PendingWorks:
        if operation.tree is not None:
            return super()._reduce_scatter(operation)
        options = c10d.ReduceScatterOptions()
        if operation.average:
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        own, whole = operation.chunks[self._place], operation.tensor
        work = self.backend._reduce_scatter_base(reals_of(own), reals_of(whole), options)
        return PendingWorks((work,))

    def _all_gather(self, operation: Operation) -> PendingWorks:
        own, whole = operation.chunks[self._place], operation.tensor
        options = c10d.AllgatherOptions()
        work = self.backend._allgather_base(bytes_of(whole), bytes_of(own), options)
        return PendingWorks((work,))

    def watch(self, collective: Any) -> Callable[[], float | None]:
        """Measure by the device's clock: a side stream waits for the works."""
        stream, origin, origin_s = self._origin = self._origin or _origin()
        with torch.cuda.stream(stream):
            for work in collective.works:
                work.wait()
            done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            done.record()

        def done_s() -> float:
            done.synchronize()
            return origin_s + float(origin.elapsed_time(done)) / 1e3

        return done_s

    def _end(self, backend: Any, *, failed: bool) -> None:
        if failed:
            backend.abort()
        else:
            backend.shutdown()


def _origin() -> tuple[torch.cuda.Stream, torch.cuda.Event, float]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    event.synchronize()
    return stream, event, time.perf_counter()
