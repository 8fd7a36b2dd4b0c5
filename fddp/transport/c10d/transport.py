"""Transport over any backend of `torch.distributed`.

Each transport has its own communicators: one over all ranks, and one for each of its subgroups. A
failure in one of them closes the transport on all ranks.

gloo and nccl communicators are built directly on a prefix of the group's store. `new_group` would
need every process of the job or, with local synchronisation, group names that diverge between
overlapping groups. Other backends go through `new_group`, which all members call.

On NCCL the host does not wait for buckets. Failures surface through torch's watchdog, as configured
by `TORCH_NCCL_ASYNC_ERROR_HANDLING`.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fddp.core.text import counted
from fddp.errors import ClosedError, FddpError, InternalError, SyncTimeoutError
from fddp.transport.base import Transport, Work
from fddp.transport.c10d.backends import Communicator, CommunicatorSpec, connect
from fddp.transport.c10d.peer_monitor import PeerMonitor
from fddp.transport.lifetime import threads
from fddp.transport.lifetime.finalizer import on_finalize
from fddp.transport.lifetime.fork import check_not_inherited, register_fork_owner
from fddp.transport.liveness import status_store
from fddp.transport.liveness.bounded_store import client_of
from fddp.transport.liveness.failure import to_error
from fddp.transport.liveness.failure_detector import FailureDetector
from fddp.transport.liveness.interrupts import from_user_code
from fddp.transport.liveness.membership import Membership, Report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fddp.transport.c10d.backends import PendingCollective
    from fddp.transport.liveness.failure import Failure
    from fddp.transport.operation import Operation

_MAX_WORKS = 256  # works remembered before finished ones are removed
_FREEING_S = 1.0  # longest that `close` waits for the backend to end


class C10dTransport(Transport):
    """Private communicators over a `torch.distributed` group.

    Attributes:
        lock: held while a failure is handled.
        on_failure: called with the description of a failed operation before its cause is known,
            with `lock` held.
        peers: the other ranks.
    """

    name = "c10d"
    reason = "it was requested"

    def __init__(
        self, group: dist.ProcessGroup, timeout_s: float | None = None, title: str = "transport"
    ) -> None:
        check_not_inherited(group)
        self._group = weakref.ref(group)  # [Note: communicators of groups]
        self._backends = _backends(group)
        devices = [torch.device(device) for device in self._backends]
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.control_device = next((d for d in devices if d.type == "cpu"), devices[0])
        self.timeout_s = _group_timeout_s(group, devices[0]) if timeout_s is None else timeout_s
        self._global_ranks = dist.get_process_group_ranks(group)
        self.lock = threading.RLock()
        self.on_failure: Callable[[str], None] | None = None
        self._failure: Failure | None = None
        self._communicators: dict[tuple[int, ...], dict[str, Communicator]] = {}
        self._works: list[weakref.ref[_C10dWork]] = []  # in issue order, some finished
        store = group.get_group_store()
        self._membership = Membership(store, self.rank, self.world_size, client_of(group))
        self.status, board_ranks = status_store.register(group, self.timeout_s)
        self.status.read_step_failure = self._membership.read_step_failure
        self._detector = FailureDetector(
            self._membership, self.status, board_ranks, self._global_ranks, self.timeout_s
        )
        self.peers = PeerMonitor(self._membership, self._detector, self.status, self.timeout_s)
        self._cancel_finalizer: Callable[[], None] = lambda: None
        register_fork_owner(self)  # [Note: forks]
        try:
            self._cancel_finalizer = on_finalize(
                self, partial(self.status.board.leave, self.status)
            )
            self._open(title)
        except FddpError:
            self.close()
            raise
        except BaseException:
            self.abandon("its opening was interrupted")
            raise

    def _open(self, title: str) -> None:
        what = f"the opening of a {title}"
        self.status.begin(what)
        group_key = self.status.key

        def set_key(count: int) -> None:
            self.status.key = f"{group_key}/{count}"

        check = partial(self.peers.check, what, self.peers.begin_wait(), check_failures=False)
        try:
            absent = self._membership.open(self.timeout_s, check, set_key)
        except RuntimeError as error:
            raise self.fail(what, error, self._everyone) from error
        if absent:
            statuses = self._detector.describe_status(absent, self.status.since)
            self.status.fail(what)
            self.status.board.publish()
            raise SyncTimeoutError(
                f"opening a {title} on rank {self.rank} of {self.world_size}: "
                f"{self._detector.names(absent)} did not open theirs within "
                f"timeout_s={self.timeout_s}; every rank of the group must, in the same order. "
                f"Status of the ranks: {statuses}",
                absent,
            )
        self._detector.refresh_processes()  # while the store is reachable
        self._connect([self._everyone])

    def set_title(self, title: str) -> None:
        """Set the label to `title` and a number. All ranks must have agreed on the title."""
        device = self.control_device.type
        self._membership.forget(self._communicators[self._everyone][device].addresses)
        try:
            self.status.label = f"{title} #{self._membership.number(title, self.timeout_s)}"
        except RuntimeError as error:
            raise self.fail(f"the opening of a {title}", error, self._everyone) from error
        self.status.finish("the opening")

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self._global_ranks)

    def _connect(self, groups: Sequence[tuple[int, ...]]) -> None:
        for ranks in groups:
            if ranks in self._communicators:
                continue
            group = self._group()
            if group is None:
                raise ClosedError(
                    f"the process group of rank {self.rank} is gone; open a new transport"
                )
            what = f"opening a communicator of {counted(len(ranks), 'rank')}"
            check_peers = partial(self.peers.check, what, self.peers.begin_wait())
            spec = CommunicatorSpec(
                group, self.rank, ranks, self._membership, self.timeout_s, check_peers
            )
            try:
                self._communicators[ranks] = connect(spec, self._backends)
            except RuntimeError as error:
                raise self.fail(what, error, ranks) from error
            wait = self.status.waits
            if wait is not None and wait.what == what:
                self.status.finish(what)

    def _start(self, operation: Operation) -> Work:
        communicator = self._communicators[operation.ranks].get(operation.tensor.device.type)
        if communicator is None:
            raise ValueError(
                f"{operation.kind} on rank {self.rank}: the tensor is on "
                f"{operation.tensor.device} and the group serves {sorted(self._backends)}; "
                "move the tensor, or initialise the group with a backend for that device"
            )
        try:
            work = _C10dWork(self, communicator, operation)
        except RuntimeError as error:
            raise self.fail(str(operation), error, operation.ranks) from error
        if len(self._works) == _MAX_WORKS:
            self._works = [ref for ref in self._works if _is_open(ref)]
        self._works.append(weakref.ref(work))
        return work

    def first_mismatch(self, pending: _PendingOperation) -> _PendingOperation:
        """Return the first failed operation of the same ranks.

        Where ranks diverge, later operations fail only because this one did.
        """
        for ref in self._works:
            work = ref()
            other = None if work is None else work.pending
            if other is None or other.communicator is not pending.communicator:
                continue
            if not other.collective.arrived_well and other.place < pending.place:
                return other
        return pending

    def publish_step_failure(self, step: int, text: str) -> None:
        self._membership.publish_step_failure(step, text)

    def abandon(self, reason: str) -> None:
        try:
            if not self.closed_by:
                self.report_departure()
        finally:
            self.close(reason)

    def report_departure(self) -> None:
        """Report to waiting ranks that this one will not take part in further operations."""
        # gloo's connections live as long as its operations, which the step's error refers to.
        self.peers.report(Report("dead", (self.rank,)))

    def _release(self) -> None:
        self._cancel_finalizer()
        self.status.board.leave(self.status)
        failed = self._failure is not None
        made = {c for some in list(self._communicators.values()) for c in some.values()}
        over = threading.Event()
        freeing = [communicator.free(failed=failed, over=over) for communicator in made]
        # On a separate thread, see [Note: freeing waits]. Without a failure this is short.
        thread = threads.start_thread(partial(_finish, freeing), "fddp-c10d-close", over.set)
        if not failed:
            thread.join(_FREEING_S)

    def _await(self, pending: _PendingOperation, what: str) -> None:
        if self.closed_by and not pending.collective.arrived:
            raise RuntimeError(f"the transport was closed ({self.closed_by})")
        operation = pending.operation
        # The source of a broadcast may exit once it has sent its data.
        among = () if operation.kind == "broadcast" else operation.ranks
        check_peers = partial(self.peers.check, what, self.peers.begin_wait(), among=among)
        pending.communicator.wait(pending.collective, check_peers)
        self.status.finish(what)

    def fail(
        self, what: str, error: Exception, ranks: tuple[int, ...], at: tuple[int, str] = (-1, "")
    ) -> FddpError:
        """Close after a failure of the backend and return the error of `what`.

        Args:
            what: description of the operation.
            error: raised by the backend.
            ranks: participants of the operation.
            at: its position among the operations of these ranks, and its description.

        Raises:
            RuntimeError: `error` itself, if it comes from user code.
        """
        if from_user_code(error):
            raise error
        with self.lock:
            if self._failure is None:
                if self.closed_by:
                    return ClosedError(f"{what} on rank {self.rank} of {self.world_size}: {error}")
                if self.on_failure is not None:
                    self.on_failure(what)
                self._end(what, self.peers.diagnose(error, ranks, at))
            return self.to_error(what)

    def end(self, what: str, failure: Failure) -> None:
        """Close after a failure outside the backend, and report it to ranks that wait here."""
        with self.lock:
            if self._failure is None:
                self._end(what, self.peers.adopt(failure))

    def to_error(self, what: str) -> FddpError:
        if self._failure is None:
            raise InternalError(f"{what} failed for an unknown reason")
        where = f"{what} on rank {self.rank} of {self.world_size}"
        return to_error(self._failure, where, self._detector.names, self.timeout_s)

    @property
    def failed(self) -> bool:
        return self._failure is not None

    @property
    def serves_others(self) -> bool:
        """True if callers may pass tensors on other devices than the CPU."""
        others = [device for device in self._backends if device != "cpu"]
        return bool(others) and torch.accelerator.is_available()

    def _end(self, what: str, failure: Failure) -> None:
        self.status.fail(what)
        self.status.board.publish()
        self._failure = failure
        self.closed_by = f"{what} failed"
        self._release()


class _C10dWork(Work):
    def __init__(
        self, transport: C10dTransport, communicator: Communicator, operation: Operation
    ) -> None:
        self._transport = transport
        self.pending: _PendingOperation | None = _PendingOperation(
            communicator, communicator.issue(operation), operation, communicator.issued
        )
        self._error: FddpError | None = None
        self._watch = communicator.watch(self.pending.collective) if operation.record_time else None

    @property
    def done(self) -> bool:
        pending = self.pending
        return pending is None or bool(self._transport.closed_by) or pending.collective.arrived

    @property
    def done_s(self) -> float | None:
        return None if self._watch is None else self._watch()

    def _wait(self, what: str) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            try:
                self._transport._await(pending, what)
            except RuntimeError as error:
                ranks, first = pending.operation.ranks, self._transport.first_mismatch(pending)
                at = first.place, str(first.operation)
                self._error = self._transport.fail(what, error, ranks, at)
                self._error.__cause__ = error
        if self._error is not None:
            raise self._error


def _finish(freeing: Sequence[Callable[[], None]]) -> None:
    for finish in freeing:
        finish()


def _is_open(ref: weakref.ref[_C10dWork]) -> bool:
    work = ref()
    return work is not None and work.pending is not None


class _PendingOperation(NamedTuple):
    communicator: Communicator
    collective: PendingCollective
    operation: Operation  # refers to the tensor
    place: int  # position among the operations of its ranks


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Backend names by device type, such as {"cpu": "gloo", "cuda": "nccl"}."""
    config = dist.get_backend_config(group)
    return dict(entry.split(":", 1) for entry in config.split(","))


def _group_timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """Timeout of the group, for which torch has no public accessor."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", distributed_c10d.default_pg_timeout)
    return float(timeout.total_seconds())
