"""Transport over any backend of `torch.distributed`.

Each transport has its own communicators: one over all ranks, and one for each group that it was
divided into. A failure in one of them closes the transport, and is told to all ranks.

For gloo and nccl they are built directly on a part of the group's store: `new_group` would need
every process of the job, or, with local synchronisation, names that come apart between overlapping
groups. Other backends go through `new_group`, which all members then call.

On NCCL the host does not wait for buckets, so failures there surface through torch's watchdog, as
`TORCH_NCCL_ASYNC_ERROR_HANDLING` directs.
"""

from __future__ import annotations

import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fddp.errors import ClosedError, FddpError, InternalError, SyncTimeoutError
from fddp.transport.base import Transport, Work
from fddp.transport.c10d.backends import Communicator, CommunicatorSpec, connect
from fddp.transport.c10d.diagnosis import diagnose
from fddp.transport.lifetime import threads
from fddp.transport.lifetime.finalizer import on_finalize
from fddp.transport.lifetime.fork import IN_A_FORK, check_not_inherited, register_fork_owner
from fddp.transport.liveness import status_store
from fddp.transport.liveness.bounded_store import client_of
from fddp.transport.liveness.failure import Failure, to_error
from fddp.transport.liveness.failure_detector import FailureDetector
from fddp.transport.liveness.interrupts import (
    PeerAbortedError,
    PeerFailureError,
    ProcessExitedError,
)
from fddp.transport.liveness.membership import Membership, Report
from fddp.transport.liveness.user_code import from_user_code, ignore_backend_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fddp.transport.c10d.backends import PendingCollective
    from fddp.transport.liveness.membership import Verdict
    from fddp.transport.operation import Operation

_CHECK_PROCESSES_AFTER_S = (
    1.0  # how long a rank has waited in an operation when it looks for processes
)
_MOST_WORKS = 256  # that are remembered before those that are over are dropped
_FREEING_S = 1.0  # how long `close` waits for the backend to end, which goes on after that


class C10dTransport(Transport):
    """Communicators of its own over a `torch.distributed` group.

    Attributes:
        lock: held while a failure is dealt with.
        on_failure: called with the operation that failed, before it is known why; `lock` is held.
    """

    name = "c10d"
    reason = "it was asked for"

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
        self._works: list[weakref.ref[_C10dWork]] = []  # in order, with some that are over
        self._began_s = 0.0  # the wait that is under way, or the last one
        store = group.get_group_store()
        self._membership = Membership(store, self.rank, self.world_size, client_of(group))
        self.status, board_ranks = status_store.register(group, self.timeout_s)
        self.status.read_step_failure = self._membership.read_step_failure
        self._detector = FailureDetector(
            self._membership, self.status, board_ranks, self._global_ranks, self.timeout_s
        )
        self._was_closed: Callable[[], None] = _nothing
        register_fork_owner(self)  # [Note: forks]
        try:
            self._was_closed = on_finalize(self, partial(self.status.board.leave, self.status))
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
        check_peers = partial(self.check_peers, what, self.begin_wait(), check_failures=False)
        try:
            absent = self._membership.open(
                self.timeout_s, check_peers, partial(self._set_key, self.status.key)
            )
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
                f"What each does: {statuses}",
                absent,
            )
        self._detector.refresh_processes()  # while the store answers
        self._connect([self._everyone])

    def _set_key(self, group_key: str, count: int) -> None:
        self.status.key = f"{group_key}/{count}"

    def begin_wait(self, ago_s: float = 0.0) -> float:
        """The time at which a wait begins, or has begun so long ago."""
        self._began_s = time.perf_counter() - ago_s
        return self._began_s

    def set_title(self, title: str) -> None:
        """Give it a name for errors, on which all ranks have agreed by an exchange, with a number
        behind it."""
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
            what = f"opening a communicator of {len(ranks)} ranks"
            check_peers = partial(self.check_peers, what, self.begin_wait())
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
        if len(self._works) == _MOST_WORKS:
            self._works = [ref for ref in self._works if _is_open(ref)]
        self._works.append(weakref.ref(work))
        return work

    def first_mismatch(self, pending: _PendingOperation) -> _PendingOperation:
        """The first operation of the same ranks that did not go well. Where ranks part, it is the
        one that tells; those behind it have just nobody to meet."""
        for ref in self._works:
            work = ref()
            other = None if work is None else work.pending
            if other is None or other.communicator is not pending.communicator:
                continue
            if not other.collective.arrived_well and other.place < pending.place:
                return other
        return pending

    def disown(self) -> None:
        """See [Note: forks]."""
        self.closed_by = self.closed_by or IN_A_FORK

    def publish_step_failure(self, step: int, text: str) -> None:
        self._membership.publish_step_failure(step, text)

    def abandon(self, reason: str) -> None:
        try:
            if not self.closed_by:
                self.publish_departure()
        finally:
            self.close(reason)

    def publish_departure(self) -> None:
        """Tell ranks that wait for this one that it will not come."""
        # gloo's connections last as long as its operations, which the error that ends a step holds.
        with ignore_backend_errors():
            self._membership.report(Report("dead", (self.rank,)))

    def _release(self) -> None:
        self._was_closed()
        self.status.board.leave(self.status)
        failed = self._failure is not None
        made = {c for some in list(self._communicators.values()) for c in some.values()}
        over = threading.Event()
        freeing = [communicator.free(failed=failed, over=over) for communicator in made]
        # On a thread of its own, for [Note: freeing waits]; in order it does not, or not for long.
        thread = threads.start_thread(partial(_finish, freeing), "fddp-c10d-close", over.set)
        if not failed:
            thread.join(_FREEING_S)

    def _await(self, pending: _PendingOperation, what: str) -> None:
        if self.closed_by and not pending.collective.arrived:
            raise RuntimeError(f"the transport was closed ({self.closed_by})")
        operation = pending.operation
        # Who has sent its part of a broadcast is done with it, and may end.
        among = () if operation.kind == "broadcast" else operation.ranks
        check_peers = partial(self.check_peers, what, self.begin_wait(), among=among)
        pending.communicator.wait(pending.collective, check_peers)
        self.status.finish(what)

    def check_peers(
        self,
        what: str,
        begin_s: float,
        *,
        check_failures: bool = True,
        among: tuple[int, ...] | None = None,
    ) -> None:
        """What a rank does now and then while it waits for `what`, since `begin_s`.

        Args:
            what: the operation in the caller's words.
            begin_s: by `time.perf_counter`.
            news: whether failures of this transport are to be asked for.
            among: ranks without which `what` can't be done; None for all.

        Raises:
            ToldError: another rank has met a failure.
            LeftError: another rank has failed the step that this one is in.
            EndedError: the process of another rank has ended.
        """
        wait = self.status.begin(what)
        if check_failures and self._membership.failed():
            raise PeerFailureError("another rank reported a failure")
        if (peer := self.status.board.step_failure(self.status)) is not None:
            raise PeerAbortedError(peer)
        now_s = time.perf_counter()
        if not check_failures or now_s - begin_s > _CHECK_PROCESSES_AFTER_S:
            self._detector.check_alive(
                self._everyone if among is None else among, refresh=not check_failures
            )
        if now_s - begin_s > self.timeout_s / 4:
            wait.query(self.status.board, now_s)

    def fail(
        self, what: str, error: Exception, ranks: tuple[int, ...], at: tuple[int, str] = (-1, "")
    ) -> FddpError:
        """Close after a failure that the backend raised; the error that `what` ends with.

        Args:
            what: the operation in the caller's words.
            error: what the backend raised.
            ranks: who took part.
            at: how many operations of these ranks came before it, and the operation itself.

        Raises:
            RuntimeError: `error` itself, where that is none of the backend's.
        """
        if from_user_code(error):
            raise error
        with self.lock:
            if self._failure is None:
                if self.closed_by:
                    return ClosedError(f"{what} on rank {self.rank} of {self.world_size}: {error}")
                if self.on_failure is not None:
                    self.on_failure(what)
                self._end(what, self._diagnosed(error, ranks, at))
            return self.to_error(what)

    def _diagnosed(self, error: Exception, ranks: tuple[int, ...], at: tuple[int, str]) -> Failure:
        """What ended an operation of `ranks`, once the others were told and heard."""
        peer = self.status.board.step_failure(self.status)
        if peer is not None:
            with ignore_backend_errors():
                self._membership.report(Report("told", ranks, *at))
            return Failure(str(error), late=False, silent=(), peer=peer)
        if isinstance(error, ProcessExitedError):
            with ignore_backend_errors():
                self._membership.report(Report("dead", error.ranks))
            return Failure(str(error), late=False, silent=error.ranks)
        waited_s, report = time.perf_counter() - self._began_s, Report("told", ranks, *at)
        failure = diagnose(self._membership, self._detector, error, report)
        if failure.store:
            return failure._replace(silent=self._detector.ended_or_stopped())
        if failure.gave_up:
            failure = failure._replace(waited_s=waited_s)
        return self._with_statuses(failure)

    def _with_statuses(self, failure: Failure) -> Failure:
        """With what the ranks do, those first that have said nothing, where some came late."""
        if not failure.late or failure.mismatch:
            return failure
        # Ranks that gave up before this one asked anything have said so then.
        since = self.status.since or (1 if failure.gave_up else 0)
        return failure._replace(statuses=self._detector.describe_status(failure.silent, since))

    def end(self, what: str, failure: Failure) -> None:
        """Close after a failure that was seen elsewhere, and tell those who wait here."""
        with self.lock:
            if self._failure is None:
                verdict: Verdict = "timeout" if failure.late else "dead"
                with ignore_backend_errors():
                    self._membership.report(Report(verdict, failure.silent))
                self._end(what, self._with_statuses(failure))

    def to_error(self, what: str) -> FddpError:
        """The error that `what` ends with, after a failure."""
        if self._failure is None:
            raise InternalError(f"{what} failed, and nothing tells why")
        where = f"{what} on rank {self.rank} of {self.world_size}"
        return to_error(self._failure, where, self._detector.names, self.timeout_s)

    def publish_mismatch(self, text: str) -> None:
        """Tell ranks for which it shows only later that they met in different operations."""
        self._membership.publish_mismatch(text)

    @property
    def mismatch(self) -> str:
        """What was told of that; empty if nothing was."""
        return self._membership.mismatch()

    @property
    def failed(self) -> bool:
        """Whether a failure has closed it."""
        return self._failure is not None

    @property
    def serves_others(self) -> bool:
        """Whether it may be handed tensors that are not on the CPU."""
        others = [device for device in self._backends if device != "cpu"]
        return bool(others) and torch.accelerator.is_available()

    @property
    def peer_failed(self) -> bool:
        """Whether another rank has told of a failure; asks the group's store."""
        return self._membership.failed()

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


def _nothing() -> None:
    """Is there to close before it is opened."""


def _finish(freeing: Sequence[Callable[[], None]]) -> None:
    for finish in freeing:
        finish()


def _is_open(ref: weakref.ref[_C10dWork]) -> bool:
    work = ref()
    return work is not None and work.pending is not None


class _PendingOperation(NamedTuple):
    """What must live for as long as an operation is in flight."""

    communicator: Communicator
    collective: PendingCollective
    operation: Operation  # holds the tensor
    place: int  # among the operations of its ranks


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Backend names by device type, for instance {"cpu": "gloo", "cuda": "nccl"}."""
    config = dist.get_backend_config(group)
    return dict(entry.split(":", 1) for entry in config.split(","))


def _group_timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """The timeout that the group was made with; torch has no public name for it."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", distributed_c10d.default_pg_timeout)
    return float(timeout.total_seconds())
