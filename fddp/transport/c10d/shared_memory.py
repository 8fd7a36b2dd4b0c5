"""Communicator over shared memory, for tensors on the CPU and ranks of one host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fddp.native import extension
from fddp.transport.c10d.communicator import Communicator
from fddp.transport.liveness.failure import CLOSED, Failure
from fddp.transport.liveness.interrupts import (
    CommunicatorFailedError,
    OperationMismatchError,
    PeerFailureError,
)
from fddp.transport.liveness.membership import CHECK_INTERVAL_S
from fddp.transport.operation import describe

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    import torch

    from fddp._C import CollectiveRange, ShmBackend, ShmOperation
    from fddp.transport.operation import Operation


class ShmCommunicator(Communicator):
    """Ranks that have mapped each other's memory.

    A failure in one communicator of a transport is reported in the control blocks of all, so that
    ranks that wait in shared memory see it without polling the store.
    """

    soon_s = CHECK_INTERVAL_S
    watches_members = True
    _backend: ShmBackend | None

    def __init__(
        self, backend: ShmBackend, rank: int, ranks: tuple[int, ...], *, of_all_hosts: bool
    ) -> None:
        """Take ownership of a backend; `of_all_hosts`: all ranks of the transport share a host."""
        super().__init__(backend, rank, ranks)
        self.spreads_failures = of_all_hosts

    @property
    def backend(self) -> ShmBackend:
        backend: ShmBackend = super().backend
        return backend

    def issue(self, operation: Operation) -> ShmOperation:
        return self.backend.start(
            operation.kind,
            operation.tensor,
            self._ranks.index(operation.src) if operation.kind == "broadcast" else 0,
            operation.average,
            operation.wait_soon,
            operation.record_time,
            operation.tree,
        )

    def finishes_soon(self, collective: ShmOperation) -> bool:
        return collective.status_within(CHECK_INTERVAL_S) == extension.compiled.SHM_OK

    def wait(self, collective: ShmOperation, check_peers: Callable[[], None]) -> None:
        while (
            status := collective.status_within(CHECK_INTERVAL_S)
        ) == extension.compiled.SHM_PENDING:
            check_peers()
        if status != extension.compiled.SHM_OK:
            raise self._error(status, collective)

    def watch(self, collective: ShmOperation, device: torch.device) -> Callable[[], float | None]:
        return lambda: collective.done_s

    def end_range(self, collective: ShmOperation, range: CollectiveRange) -> None:
        collective.end_range(range)

    def free(self, *, failed: bool, over: threading.Event) -> Callable[[], None]:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.shutdown()
        return lambda: None

    def spread(self, failure: Failure | None) -> None:
        backend = self._backend
        if backend is None:
            return
        silent = () if failure is None else failure.silent
        members = [self._ranks.index(rank) for rank in silent if rank in self._ranks]
        if failure is None or not members:
            backend.fail(extension.compiled.SHM_PEER_FAILED, ())
        else:
            backend.fail(
                extension.compiled.SHM_TIMEOUT if failure.late else extension.compiled.SHM_LOST,
                members,
            )

    def _error(self, status: int, collective: ShmOperation) -> RuntimeError:
        if status == extension.compiled.SHM_MISMATCH:
            operations = [
                f"rank {rank} {self._describe(found)}"
                for rank, found in zip(self._ranks, collective.descriptors(), strict=True)
            ]
            return OperationMismatchError(_first_mismatch(operations))
        if status == extension.compiled.SHM_CLOSED:
            return RuntimeError("the communicator was closed")
        failure = self._failure()
        if failure is None:
            return PeerFailureError("another rank reported a failure")
        return CommunicatorFailedError(failure)

    def _failure(self) -> Failure | None:
        """Return the failure that ended the group; None if it was reported from outside of it."""
        status, members, _ = self.backend.failure
        ranks = tuple(self._ranks[member] for member in members)
        if status == extension.compiled.SHM_TIMEOUT:
            own = self._ranks[self._place]
            others = tuple(rank for rank in self._ranks if rank not in ranks)
            return Failure(
                "timed out",
                late=True,
                silent=tuple(rank for rank in ranks if rank != own),
                gave_up=others if own in ranks else (),
            )
        if status == extension.compiled.SHM_CORRUPT:
            return Failure("what it wrote to shared memory makes no sense", False, ranks)
        if status == extension.compiled.SHM_LOST:
            left = any(self.backend.states[member] == "left" for member in members)
            return Failure(CLOSED if left else "its process has ended", False, ranks)
        return None

    def _describe(self, found: dict[str, Any]) -> str:
        kind, place, src = found["kind"], found["src"], None
        if kind == "broadcast":
            src = self._ranks[place] if place < len(self._ranks) else "?"
        form = found["tree"], found["dtype"], tuple(found["shape"])
        return describe(kind, src, found["average"], *form)


def _first_mismatch(descriptions: list[str]) -> str:
    first, *others = descriptions
    operation = first.split(" ", 2)[2]
    return f"{first}, {next((o for o in others if o.split(' ', 2)[2] != operation), others[0])}"
