"""Transport through shared memory, for tensors on the CPU and ranks of one host.

It is built on a c10d transport over the same ranks, which handles tensors on other devices and
operations across hosts. A hierarchical schedule thus runs through shared memory within each host
and through the group's own backend across hosts.

A failure in either of the two closes both, on all ranks. It is reported in the control blocks of
all shm groups of a rank, and through the store to ranks that wait for the backend.
"""

from __future__ import annotations

import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fddp.errors import ClosedError, FddpError
from fddp.native.usual_step import NativeCollectives, collectives_in_memory
from fddp.transport.base import Transport, Work
from fddp.transport.lifetime.fork import register_fork_owner
from fddp.transport.liveness.failure import CLOSED, Failure, mismatch_error
from fddp.transport.liveness.interrupts import PeerFailureError
from fddp.transport.operation import describe
from fddp.transport.shm.bindings import Status
from fddp.transport.shm.opening import open_shm_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from fddp.transport.c10d.transport import C10dTransport
    from fddp.transport.operation import Operation
    from fddp.transport.shm.bindings import ShmGroup, ShmWork
    from fddp.transport.shm.host_discovery import HostGroups

_OK = int(Status.OK)
_CHECK_INTERVAL_S = 0.25  # between two checks of the other ranks during a wait


class ShmTransport(Transport):
    """Groups of ranks that share memory, and a c10d transport for what they can't do.

    The constructor is a collective call of all ranks of `c10d`. It takes ownership of both
    arguments.
    """

    def __init__(self, c10d: C10dTransport, host_groups: HostGroups) -> None:
        self.rank, self.world_size = c10d.rank, c10d.world_size
        self.timeout_s, self.control_device = c10d.timeout_s, c10d.control_device
        self._c10d = c10d
        self._host_groups = host_groups
        self._arena = host_groups.arena
        self._checks_failures = len(host_groups.hosts) > 1
        self._shared = self.world_size == 1  # whether no CPU tensor needs the c10d transport
        self._divided_within = False  # whether some ranks, but not all, have an shm group
        self._problems = dict(host_groups.problems)
        self._shm_groups: dict[tuple[int, ...], _GroupEntry] = {}
        self.status = c10d.status
        # A weak reference: a transport dropped without close() must not be part of a cycle.
        c10d.on_failure = _weakly(weakref.WeakMethod(self._on_c10d_failure))
        register_fork_owner(self)  # [Note: forks]
        if self.world_size > 1 and host_groups.share_host(self._everyone):
            try:
                self._open_shm_groups([self._everyone])
            except BaseException:
                self.dismiss()
                raise

    @property
    def name(self) -> str:  # type: ignore[override]
        if self._shared:
            return "shm"
        return "shm+c10d" if self._divided_within else "c10d"

    @property
    def reason(self) -> str:  # type: ignore[override]
        if self._shared:
            return f"all {self.world_size} ranks share the memory of a host"
        text = self._host_groups.describe(self._problems)
        return text + ("; shm within a host, c10d across" if self._divided_within else "")

    @property
    def members(self) -> tuple[int, ...]:
        return self._c10d.members

    def dismiss(self) -> None:
        """Free the shared memory. The c10d transport stays open."""
        self.closed_by = "another transport was chosen"
        self._free()

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As the base class's: shared memory on the CPU, unless no pages can be reserved."""
        if device.type == "cpu" and self._arena is not None and self._shm_groups:
            shared = self._arena.empty(numel, dtype)
            if shared is not None:
                return shared
        return super().empty(numel, dtype, device)

    def all_reduce(
        self,
        tensor: Tensor,
        *,
        axes: tuple[str, ...] = (),
        average: bool = False,
        record_time: bool = False,
        wait_soon: bool = False,
    ) -> Work:
        # As the base class's, which takes as long as it takes to sum up some thousand numbers.
        entry = self._shm_groups.get(
            self._subgroups.ranks.get(axes, ()) if axes else self._everyone
        )
        if entry is not None:
            try:
                work = entry.shm_group.start(
                    "all_reduce", tensor, 0, average, (), wait_soon, record_time
                )
            except (TypeError, ValueError):
                pass  # the base class raises the precise error, or uses c10d
            else:
                return _ShmWork(self, entry, work, record_time)
        return super().all_reduce(
            tensor, axes=axes, average=average, record_time=record_time, wait_soon=wait_soon
        )

    def native_collectives(self) -> NativeCollectives:
        entry = self._shm_groups.get(self._everyone)
        if entry is None:
            return super().native_collectives()
        adopt = partial(_ShmWork, self, entry, record_time=False)
        return collectives_in_memory(entry.shm_group, adopt)

    def _start(self, operation: Operation) -> Work:
        entry = self._shm_groups.get(operation.ranks)
        if entry is None or not operation.tensor.is_cpu:
            return self._c10d._start(operation)
        work = entry.shm_group.start(
            operation.kind,
            operation.tensor,
            operation.ranks.index(operation.src) if operation.kind == "broadcast" else 0,
            operation.average,
            operation.association,
            operation.wait_soon,
            operation.record_time,
            operation.tree,
        )
        return _ShmWork(self, entry, work, operation.record_time)

    def _connect(self, groups: Sequence[tuple[int, ...]]) -> None:
        devices = self._open_shm_groups(groups)
        self._c10d._connect([ranks for ranks in groups if ranks not in self._shm_groups or devices])

    def publish_step_failure(self, step: int, text: str) -> None:
        self._c10d.publish_step_failure(step, text)

    def abandon(self, reason: str) -> None:
        try:
            if not self.closed_by:
                self._c10d.report_departure()
        finally:
            self.close(reason)

    def _release(self) -> None:
        self._free()
        self._c10d.close()

    def _open_shm_groups(self, groups: Sequence[tuple[int, ...]]) -> bool:
        """Open an shm group for each of these groups of this rank whose ranks share a host; a
        collective call. Groups in which a rank fails are not opened on any rank. Returns True if
        some rank may have tensors that do not go through shm groups."""
        wanted = [
            ranks
            for ranks in groups
            if ranks not in self._shm_groups and self._host_groups.share_host(ranks)
        ]
        opened = open_shm_groups(
            self, self._host_groups, wanted, self.timeout_s, lambda: self._c10d.serves_others
        )
        for ranks, shm_group in opened.own.items():
            self._shm_groups[ranks] = _GroupEntry(shm_group, ranks)
        self._problems |= opened.problems
        self._shared |= self._everyone in opened.everywhere
        self._divided_within |= any(ranks != self._everyone for ranks in opened.everywhere)
        return any(opened.remarks)

    def _free(self) -> None:
        shm_groups, self._shm_groups = self._shm_groups, {}
        for entry in shm_groups.values():
            entry.shm_group.leave()
        if self._arena is not None:
            # Tensors still in use keep their own pages.
            self._arena.trim()
            self._arena.close_fd()
        self._arena = None
        self._host_groups = self._host_groups.close()
        self._c10d.on_failure = None

    def _error_of(self, what: str, entry: _GroupEntry, waited_s: float) -> FddpError:
        """The error that `what` ends with, whose table ended with a failure."""
        with self._c10d.lock:
            if self._c10d.failed:
                return self._c10d.to_error(what)
            if self.closed_by:
                return ClosedError(
                    f"{what} on rank {self.rank} of {self.world_size}: the transport was closed "
                    f"({self.closed_by})"
                )
            failure = _failure(entry, self.rank, waited_s)
            if failure is None:
                error = PeerFailureError("another rank reported a failure")
                return self._c10d.fail(what, error, ())
            if failure.text == CLOSED:
                # The other rank may have closed after a mismatch that this one sees only now.
                failure = failure._replace(mismatch=self._c10d.peers.mismatch())
            self.closed_by = f"{what} failed"
            self._propagate_failure(failure)
            self._c10d.end(what, failure)
            self._free()
            return self._c10d.to_error(what)

    def _on_c10d_failure(self, what: str) -> None:
        self.closed_by = f"{what} failed"
        self._propagate_failure(None)
        self._free()

    def _propagate_failure(self, failure: Failure | None) -> None:
        """Report a failure in the control blocks of all shm groups."""
        gone = () if failure is None else failure.silent
        for shm_group, ranks in self._shm_groups.values():
            members = [ranks.index(rank) for rank in gone if rank in ranks]
            if failure is None or not members:
                shm_group.fail(Status.PEER_FAILED, ())
            else:
                shm_group.fail(Status.TIMEOUT if failure.late else Status.LOST, members)


def _weakly(method: weakref.WeakMethod[Callable[[str], None]]) -> Callable[[str], None]:
    """Return a function that calls `method` while its object is alive."""

    def call(what: str) -> None:
        if (found := method()) is not None:
            found(what)

    return call


class _GroupEntry(NamedTuple):
    """An open shm group and its members."""

    shm_group: ShmGroup
    ranks: tuple[int, ...]  # its members


class _ShmWork(Work):
    _error: FddpError | None = None

    def __init__(
        self, transport: ShmTransport, entry: _GroupEntry, work: ShmWork, record_time: bool
    ) -> None:
        self._transport = transport
        self._entry = entry
        self._work = work
        self._record_time = record_time

    @property
    def done(self) -> bool:
        return self._work.done

    @property
    def done_s(self) -> float | None:
        return self._work.done_s if self._record_time else None

    def _wait(self, what: str) -> None:
        status = self._work.wait(_CHECK_INTERVAL_S)
        if status == _OK:
            self._transport.status.finish(what)
            return
        if self._error is None:
            waited_s = _CHECK_INTERVAL_S if status == Status.PENDING else 0.0
            self._error = self._outcome(what, waited_s)
        if self._error is not None:
            raise self._error

    def _outcome(self, what: str, waited_s: float) -> FddpError | None:
        transport = self._transport
        peers = transport._c10d.peers
        begin_s = peers.begin_wait(waited_s)
        while (status := self._work.wait(_CHECK_INTERVAL_S)) == Status.PENDING:
            try:
                # The shm group itself detects processes that have ended.
                peers.check(what, begin_s, check_failures=transport._checks_failures, among=())
            except RuntimeError as news:
                return transport._c10d.fail(what, news, ())
        if status == Status.OK:
            transport.status.finish(what)
            return None
        if status != Status.MISMATCH:
            return transport._error_of(what, self._entry, time.perf_counter() - begin_s)
        operations = [
            f"rank {rank} {_describe(descriptor, self._entry.ranks)}"
            for rank, descriptor in zip(self._entry.ranks, self._work.descriptors(), strict=True)
        ]
        mismatch = _first_mismatch(operations)
        peers.publish_mismatch(mismatch)
        where = f"{what} on rank {transport.rank} of {transport.world_size}"
        return mismatch_error(where, mismatch)


def _failure(entry: _GroupEntry, own_rank: int, waited_s: float) -> Failure | None:
    """Return the failure that ended an shm group; None if it was reported from outside of it."""
    status, members, _ = entry.shm_group.failure
    if status not in (Status.LOST, Status.TIMEOUT, Status.CORRUPT):
        return None
    ranks = tuple(entry.ranks[member] for member in members)
    if status == Status.TIMEOUT:
        others = tuple(rank for rank in entry.ranks if rank not in ranks)
        return Failure(
            "timed out",
            True,
            tuple(rank for rank in ranks if rank != own_rank),
            waited_s=waited_s,
            gave_up=others if own_rank in ranks else (),
        )
    if status == Status.CORRUPT:
        return Failure("what it wrote to shared memory makes no sense", False, ranks)
    left = any(entry.shm_group.states[member] == "left" for member in members)
    return Failure(CLOSED if left else "its process has ended", False, ranks)


def _describe(found: dict[str, Any], ranks: tuple[int, ...]) -> str:
    kind, place, src = found["kind"], found["src"], None
    if kind == "broadcast":
        src = ranks[place] if place < len(ranks) else "?"
    form = found["association"], found["dtype"], tuple(found["shape"])
    return describe(kind, src, found["average"], *form)


def _first_mismatch(descriptions: list[str]) -> str:
    first, *others = descriptions
    operation = first.split(" ", 2)[2]
    return f"{first}, {next((o for o in others if o.split(' ', 2)[2] != operation), others[0])}"
