"""Communicators of `torch.distributed`, one class for each way of making, waiting and freeing one.

Collectives are called on the backend object itself: the functions of `torch.distributed` take only
groups that are registered there.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fddp.transports.base import Operation
    from fddp.transports.rollcall import RollCall

_LOOK_AROUND = timedelta(seconds=0.25)  # how often a waiting rank looks for the others' failures


class LateError(RuntimeError):
    """An operation did not finish in time."""


class ToldError(RuntimeError):
    """Another rank reported a failure while this one waited."""


class Communicator:
    """A backend (or process group) of torch that nothing else uses.

    [Note: freeing waits] gloo frees a backend only once its pending operations have ended, which a
    lost rank holds up until they time out. So `free` is called on a thread that may wait, and drops
    the only reference; works and tracebacks refer to the communicator, never to the backend.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def issue(self, operation: Operation) -> dist.Work:
        """Start `operation`; torch's own errors (RuntimeError) pass through."""
        tensor = operation.tensor
        if operation.kind == "all_reduce":
            wire = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            work = self._backend.allreduce([wire], c10d.AllreduceOptions())
        elif operation.kind == "all_gather":
            rows = [_bytes_of(row) for row in operation.rows]
            work = self._backend.allgather([rows], [_bytes_of(tensor)], c10d.AllgatherOptions())
        else:
            options = c10d.BroadcastOptions()
            options.rootRank = operation.src
            work = self._backend.broadcast([_bytes_of(tensor)], options)
        return work  # type: ignore[no-any-return]

    def wait(self, work: dist.Work) -> None:
        """Block until `work` has finished as seen from the current stream, or torch gives it up."""
        work.wait()

    def watch(self, work: dist.Work) -> Callable[[], float | None]:
        """A function that tells when `work` finished, once it has: `time.perf_counter()` seconds.

        The stamp is taken on the backend's thread, which may wait some milliseconds for Python.
        """
        stamps: list[float] = []
        work.get_future().add_done_callback(lambda _: stamps.append(time.perf_counter()))
        return lambda: stamps[0] if stamps else None

    def free(self, *, failed: bool) -> None:
        """Give up threads and connections; nothing may be issued any more.

        [Note: freeing waits]
        """
        self._backend = None


class GlooCommunicator(Communicator):
    """gloo, connected through `roll.store`. Blocks while the ranks connect to each other.

    [Note: news of a failure] gloo tells only the neighbours of a dead rank, and its `abort` does
    nothing: the other ranks would wait for the whole timeout. So a rank that meets a failure
    reports it in the store, and `wait` looks there now and then.
    """

    def __init__(self, roll: RollCall, rank: int, world_size: int, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        super().__init__(dist.ProcessGroupGloo(roll.store, rank, world_size, timeout))
        self._roll = roll
        self._timeout_s = timeout_s

    def wait(self, work: dist.Work) -> None:
        deadline_s = time.perf_counter() + self._timeout_s
        while not _finishes(work, _LOOK_AROUND):
            # [Note: news of a failure]
            if self._roll.failed():
                raise ToldError("another rank reported a failure")
            if time.perf_counter() > deadline_s:
                raise LateError(f"timed out after {self._timeout_s} s")


class NcclCommunicator(Communicator):
    """nccl; connects at the first operation on the current device."""

    def __init__(self, roll: RollCall, rank: int, world_size: int, timeout_s: float) -> None:
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        super().__init__(c10d.ProcessGroupNCCL(roll.store, rank, world_size, options))
        self._origin: tuple[torch.cuda.Stream, torch.cuda.Event, float] | None = None

    def watch(self, work: dist.Work) -> Callable[[], float | None]:
        """As for others, but by the device's clock: a side stream waits for the work."""
        stream, origin, origin_s = self._origin = self._origin or _origin()
        with torch.cuda.stream(stream):
            work.wait()
            done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            done.record()

        def done_s() -> float:
            done.synchronize()
            return origin_s + float(origin.elapsed_time(done)) / 1e3

        return done_s

    def free(self, *, failed: bool) -> None:
        if failed:
            self._backend.abort()
        else:
            self._backend.shutdown()
        super().free(failed=failed)


class GroupCommunicator(Communicator):
    """Any other backend, through `new_group`, which all members of `group` call."""

    def __init__(self, group: dist.ProcessGroup, backend: str, timeout_s: float) -> None:
        super().__init__(
            dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=timedelta(seconds=timeout_s),
                backend=backend,
                use_local_synchronization=group is not dist.group.WORLD,
            )
        )

    def free(self, *, failed: bool) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self._backend)
        super().free(failed=failed)


def connect(
    group: dist.ProcessGroup, backends: dict[str, str], roll: RollCall, timeout_s: float
) -> dict[str, Communicator]:
    """Communicators over the ranks of `group` by device type, one for each distinct backend."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    names = set(backends.values())
    if not names <= {"gloo", "nccl"}:
        config = ",".join(f"{device}:{backend}" for device, backend in backends.items())
        return dict.fromkeys(backends, GroupCommunicator(group, config, timeout_s))
    by_name: dict[str, Communicator] = {}
    if "gloo" in names:
        by_name["gloo"] = GlooCommunicator(roll, rank, world_size, timeout_s)
    if "nccl" in names:
        by_name["nccl"] = NcclCommunicator(roll, rank, world_size, timeout_s)
    return {device: by_name[backend] for device, backend in backends.items()}


def _bytes_of(tensor: Tensor) -> Tensor:
    """The same memory as flat bytes, so that any dtype moves."""
    return tensor.reshape(-1).view(torch.uint8)


def _finishes(work: dist.Work, within: timedelta) -> bool:
    """Whether `work` finishes `within` that time; raises what it failed with."""
    try:
        work.wait(within)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises what it failed with; returns if it finished just after `within`
    return True


def _origin() -> tuple[torch.cuda.Stream, torch.cuda.Event, float]:
    """A side stream of the current device, and one moment on its clock and on the host's."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    event.synchronize()
    return stream, event, time.perf_counter()
