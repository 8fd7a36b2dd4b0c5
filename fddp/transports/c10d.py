"""Transport over any backend of `torch.distributed`.

Each transport has its own communicator. For gloo and nccl it is built directly on a part of the
group's store: `new_group` would need every process of the job, or, with local synchronisation,
names that come apart between overlapping groups. Other backends go through `new_group`, which all
members then call.

On NCCL the host does not wait for buckets, so failures there surface through torch's watchdog, as
`TORCH_NCCL_ASYNC_ERROR_HANDLING` directs.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fddp.errors import ClosedError, FddpError, RankLostError, SyncTimeoutError
from fddp.transports.base import Operation, Transport, Work
from fddp.transports.communicators import Communicator, LateError, ToldError, connect
from fddp.transports.rollcall import RollCall

if TYPE_CHECKING:
    from fddp.transports.rollcall import Verdict

_GRACE_S = 2.0  # how long a failing rank waits for the others to say that they live
_FREEING_S = 1.0  # how long `close` waits for the backend to end, which goes on after that


class C10dTransport(Transport):
    """A communicator of its own over a `torch.distributed` group."""

    name = "c10d"

    def __init__(self, group: dist.ProcessGroup, timeout_s: float | None = None) -> None:
        backends = _backends(group)
        devices = [torch.device(device) for device in backends]
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.control_device = next((d for d in devices if d.type == "cpu"), devices[0])
        self.timeout_s = _group_timeout_s(group, devices[0]) if timeout_s is None else timeout_s
        self._global_ranks = dist.get_process_group_ranks(group)
        self._lock = threading.Lock()
        self._failure: _Failure | None = None
        self._communicators: dict[str, Communicator] = {}
        self._roll = RollCall(group.get_group_store(), self.rank, self.world_size)
        what = "opening a c10d transport"
        try:
            absent = self._roll.open(self.timeout_s)
            if not absent:
                self._communicators = connect(group, backends, self._roll, self.timeout_s)
        except RuntimeError as error:
            raise self._fail(what, error) from error
        if absent:
            raise SyncTimeoutError(
                f"{what} on rank {self.rank} of {self.world_size}: {self._names(absent)} did not "
                f"open theirs within timeout_s={self.timeout_s}; every rank of the group must, in "
                "the same order"
            )

    def _start(self, operation: Operation) -> Work:
        communicator = self._communicators.get(operation.tensor.device.type)
        if communicator is None:
            raise ValueError(
                f"{operation.kind} on rank {self.rank}: the tensor is on "
                f"{operation.tensor.device} and the group serves {sorted(self._communicators)}; "
                "move the tensor, or initialise the group with a backend for that device"
            )
        try:
            return _C10dWork(self, communicator, operation)
        except RuntimeError as error:
            raise self._fail(str(operation), error) from error

    def _release(self) -> None:
        # On a thread of its own, for [Note: freeing waits]; in order it does not, or not for long.
        thread = threading.Thread(target=self._free, name="fddp-c10d-close", daemon=True)
        thread.start()
        if self._failure is None:
            thread.join(_FREEING_S)

    def _free(self) -> None:
        for communicator in set(self._communicators.values()):
            communicator.free(failed=self._failure is not None)

    def _await(self, pending: _Pending) -> None:
        if self._closed is not None and not pending.work.is_completed():
            raise RuntimeError(f"the transport was closed ({self._closed})")
        pending.communicator.wait(pending.work)

    def _fail(self, what: str, error: Exception) -> FddpError:
        """Close after a failure that the backend raised; the error that `what` ends with."""
        with self._lock:
            if self._failure is None:
                if self._closed is not None:
                    return ClosedError(f"{what} on rank {self.rank} of {self.world_size}: {error}")
                self._failure = _diagnose(self._roll, error, min(_GRACE_S, self.timeout_s / 4))
                self._closed = f"{what} failed"
                self._release()
            return self._explain(what, self._failure)

    def _explain(self, what: str, failure: _Failure) -> FddpError:
        where = f"{what} on rank {self.rank} of {self.world_size}"
        if failure.reports is None:
            return RankLostError(
                f"{where}: {failure.text}; the group's store does not answer either, so the rank "
                "or agent that hosts it is gone: start the job again from a checkpoint"
            )
        silent = tuple(r for r in range(self.world_size) if r not in failure.reports)
        names = self._names(silent)
        if "timeout" in failure.reports.values():
            return SyncTimeoutError(
                f"{where}: not finished within timeout_s={self.timeout_s}; "
                f"{f'no word from {names}' if silent else 'every rank is alive'}. All ranks must "
                "issue the same operations in the same order; where one is only slow, raise "
                "timeout_s"
            )
        return RankLostError(
            f"{where}: {f'lost {names}' if silent else 'a connection broke'} ({failure.text}); "
            "start the job again from a checkpoint, or go on with a group of the ranks that are "
            "left",
            silent,
        )

    def _names(self, ranks: tuple[int, ...]) -> str:
        """Ranks as the user knows them: with the global number where that is another one."""
        return ", ".join(
            f"rank {rank}"
            + (f" (global {self._global_ranks[rank]})" if self._global_ranks[rank] != rank else "")
            for rank in ranks
        )


class _C10dWork(Work):
    def __init__(
        self, transport: C10dTransport, communicator: Communicator, operation: Operation
    ) -> None:
        super().__init__(operation.rows)
        self._transport = transport
        self._pending: _Pending | None = _Pending(
            communicator, communicator.issue(operation), operation
        )
        self._error: FddpError | None = None
        self._watch = communicator.watch(self._pending.work) if operation.stamp else None

    @property
    def done_s(self) -> float | None:
        return None if self._watch is None else self._watch()

    def wait(self, what: str) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                self._transport._await(pending)
            except RuntimeError as error:
                self._error = self._transport._fail(what, error)
                self._error.__cause__ = error
        if self._error is not None:
            raise self._error


class _Pending(NamedTuple):
    """What must live for as long as an operation is in flight."""

    communicator: Communicator
    work: dist.Work
    operation: Operation  # holds the tensors


class _Failure(NamedTuple):
    """What is known of the failure that closed a transport."""

    text: str  # the backend's, one line
    reports: dict[int, str] | None  # verdicts by rank; None where the store is gone too


def _diagnose(roll: RollCall, error: Exception, grace_s: float) -> _Failure:
    """Tell the others, and hear from them, how an operation that raised `error` ended."""
    # Without gloo's own source line in front and its general advice behind.
    text = re.sub(r"^\[[^\]]*\] |\. This is typically.*", "", str(error).split("\n", 1)[0])
    verdict: Verdict = "broken"
    if isinstance(error, ToldError):
        verdict = "told"
    elif isinstance(error, LateError) or re.search("timeout|timed out", text, re.IGNORECASE):
        verdict = "timeout"
    try:
        roll.report(verdict)
        return _Failure(text, roll.reports(grace_s))
    except RuntimeError:
        return _Failure(text, None)


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Backend names by device type, for instance {"cpu": "gloo", "cuda": "nccl"}."""
    config = dist.get_backend_config(group)
    return dict(entry.split(":", 1) for entry in config.split(","))


def _group_timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """The timeout that the group was made with; torch has no public name for it."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", distributed_c10d.default_pg_timeout)
    return float(timeout.total_seconds())
