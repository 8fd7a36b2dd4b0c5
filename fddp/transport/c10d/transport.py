"""Transport over a group of `torch.distributed`.

Each transport has its own communicators: one for each device, over all ranks and over those of each
subgroup. On the CPU it is one in shared memory where these ranks share a host. A hierarchical
schedule thus runs through shared memory within each host and through the group's own backend across
hosts. A failure in one communicator closes the transport on all ranks.

fddp, gloo and nccl communicators are built directly on a prefix of the group's store. `new_group`
would need every process of the job or, with local synchronisation, group names that diverge between
overlapping groups, and torch would keep the group of a transport that is dropped. Other backends go
through `new_group`, which all members call.

On NCCL the host does not wait for buckets. Failures surface through torch's watchdog, as configured
by `TORCH_NCCL_ASYNC_ERROR_HANDLING`.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fddp.core.text import counted
from fddp.errors import (
    ClosedError,
    FddpError,
    InternalError,
    SyncTimeoutError,
    TransformError,
    error_text,
)
from fddp.native import extension
from fddp.transport.base import Transport, Work
from fddp.transport.c10d.bootstrap import Bootstrap, KeptCommunicator, bootstrap_of
from fddp.transport.c10d.communicator import Communicator, CommunicatorSpec, PendingWorks
from fddp.transport.c10d.communicators import new_communicators
from fddp.transport.c10d.group_probe import GroupProbe
from fddp.transport.c10d.host_memory import HostMemory
from fddp.transport.c10d.nccl import NcclBackends, shared_backends
from fddp.transport.c10d.peer_monitor import PeerMonitor
from fddp.transport.c10d.ranks_left import (
    announce_leave,
    drop,
    first_of,
    group_left,
    hold,
    ranks_leaving,
)
from fddp.transport.c10d.rendezvous import call_with_checks
from fddp.transport.c10d.shared_memory import ShmCommunicator
from fddp.transport.group_backend import backend_of
from fddp.transport.lifetime import threads
from fddp.transport.lifetime.finalizer import on_finalize
from fddp.transport.lifetime.fork import check_not_inherited, register_fork_owner
from fddp.transport.liveness import status_store
from fddp.transport.liveness.bounded_store import client_of
from fddp.transport.liveness.failure import Report, mismatch_error, to_error
from fddp.transport.liveness.failure_detector import FailureDetector
from fddp.transport.liveness.interrupts import (
    CommunicatorFailedError,
    OperationMismatchError,
    from_user_code,
    ignore_backend_errors,
    is_of_this_rank,
)
from fddp.transport.liveness.membership import Membership
from fddp.transport.operation import Operation
from fddp.transport.torch_private import process_groups, store_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import Tensor

    from fddp._C import CollectiveRange, Collectives
    from fddp.transport.c10d.communicator import Pending
    from fddp.transport.liveness.failure import Failure
    from fddp.transport.liveness.status import TransportStatus
    from fddp.transport.shm.host_discovery import HostGroups

_MAX_WORKS = 256  # works remembered before finished ones are removed
_CPU = torch.device("cpu")
_FREEING_S = 1.0  # longest that `close` waits for the backend to end


class C10dTransport(Transport):
    """Private communicators over a `torch.distributed` group.

    Args:
        group: the group.
        timeout_s: time limit of each operation; None for the group's own.
        title: as in `open_transport`.
        shares: True to share a communicator over nccl with other transports of the group for which
            this is True; see [Note: shared communicators].
        may_share_memory: True if `choose` may use shared memory, so that the communicator of an
            earlier opening may do for this one; see [Note: communicators of openings].
    """

    name = "c10d"
    reason = "it was requested"

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout_s: float | None = None,
        title: str = "transport",
        *,
        shares: bool = False,
        may_share_memory: bool = True,
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
        # Of the ranks, in errors.
        self._numbers = first_of(group).numbers
        self._lock = threading.RLock()  # held while a failure is handled
        self._failure: Failure | None = None
        self._communicators: dict[tuple[int, ...], dict[str, Communicator]] = {}  # by device
        self._opened: list[Communicator] = []
        # Communicator of the opening, until it has ended; see [Note: communicators of openings].
        self._opening: KeptCommunicator | None = None
        self._bootstrap = bootstrap_of(group)
        self._memory: HostMemory | None = None
        self._in_memory: dict[tuple[int, ...], ShmCommunicator] = {}
        self._works = _IssuedWorks()
        self._is_abandoned = False
        # Groups that `group_left` has returned, of which a later call may replace an earlier one's.
        self._left: list[weakref.ref[dist.ProcessGroup]] = []
        # Devices on which the communicators are connected, those of later groups at once.
        self._devices: list[torch.device] = []
        # Generation of the NCCL backends on which the ranks have agreed.
        self._generation = 0
        self._nccl = shared_backends(group) if shares else NcclBackends(is_shared=False)
        store = store_of(group)
        self._membership = Membership(store, self.rank, self.world_size, client_of(group))
        try:
            self.status, board_ranks = status_store.register(group, self.timeout_s)
        except BaseException as error:
            self._withdraw(error)
            raise
        self.status.read_step_failure = self._membership.read_step_failure
        self._detector = FailureDetector(
            self._membership, self.status, board_ranks, self._global_ranks, self.timeout_s
        )
        self._peers = PeerMonitor(self._membership, self._detector, self.status)
        self._cancel_finalizer: Callable[[], None] = lambda: None
        register_fork_owner(self)  # [Note: forks]
        try:
            self._cancel_finalizer = on_finalize(
                self, partial(_forget, self.status, self._bootstrap)
            )
            self._bootstrap.enter(self.status)
            self._open(group, title, may_share_memory)
        except BaseException as error:
            self.end_opening(error)
            raise

    def _open(self, group: dist.ProcessGroup, title: str, may_share_memory: bool) -> None:
        what = f"the opening of a {title}"
        self.status.begin(what)
        group_key = self.status.key

        def set_key(count: int) -> None:
            self.status.key = f"{group_key}/{count}"
            self._detector.listen(self.rank)

        kept = self._bootstrap.take() if may_share_memory else None
        if kept is not None:
            self._opened.append(kept.communicator)
        begin_s, probe = self._peers.begin_wait(), GroupProbe(group)
        check = partial(self._peers.check_opening, what, begin_s, probe.lost)
        try:
            number = 0 if kept is None else kept.number
            absent = self._membership.open(self.timeout_s, check, set_key, kept=number)
        except RuntimeError as error:
            raise self.fail(what, error, self._everyone) from error
        if absent:
            statuses = self._detector.describe(self._detector.statuses(absent))
            self.status.fail(what)
            self.status.board.publish(self.status.key)
            raise SyncTimeoutError(
                f"opening a {title} on rank {self.rank} of {self.world_size}: "
                f"{self._detector.names(absent)} did not open theirs within "
                f"timeout_s={self.timeout_s}; every rank of the group must, in the same order. "
                f"Status of the ranks: {statuses}",
                tuple(self._numbers[rank] for rank in absent),
            )
        self._detector.refresh_processes()  # of all ranks, before any goes on
        device = self.control_device.type
        if kept is not None and self._membership.all_kept:
            kept.communicator.set_timeout(self.timeout_s)
            self._communicators[self._everyone] = {device: kept.communicator}
            self._opening = kept
        elif self.world_size > 1:
            if kept is not None:
                self._opened.remove(kept.communicator)
                _free([kept.communicator])
            own = {device: name for device, name in self._backends.items() if name != "nccl"}
            self._connect_through_torch(self._everyone, own, probe.lost)
            communicator = self._communicators[self._everyone][device]
            self._opening = KeptCommunicator(self._membership.count, communicator)

    def end_opening(self, error: BaseException) -> None:
        """Close because of an error during the opening. Others that wait for this rank are told the
        error if it is this rank's own."""
        if not self.closed_by and is_of_this_rank(error):
            self._withdraw(error)
        self.closed_by = self.closed_by or "its opening was interrupted"
        self.close()

    def _withdraw(self, error: BaseException) -> None:
        with ignore_backend_errors():
            self._membership.withdraw(error_text(error))

    def set_title(self, title: str) -> None:
        """Set the label to `title` and a number. All ranks must have agreed on the title."""
        self._detector.stop_listening()  # all ranks have looked
        addresses: tuple[str, ...] = ()
        if self._opening is not None and not self._membership.all_kept:
            addresses = self._opening.communicator.addresses
        self._membership.forget([*addresses, self._detector.key])
        try:
            self.status.label = f"{title} #{self._membership.number(title, self.timeout_s)}"
        except RuntimeError as error:
            raise self.fail(f"the opening of a {title}", error, self._everyone) from error
        self.status.finish("the opening")

    @property
    def history(self) -> tuple[int, int]:
        """Generation and order of the NCCL backends."""
        return self._nccl.generation, self._nccl.order

    def open_nccl(self, histories: Sequence[tuple[int, int]]) -> None:
        """Open the communicator over nccl of all ranks. A shared one is replaced if its history is
        not the same on all ranks.

        Args:
            histories: `history` of each rank.
        """
        nccl = {device: name for device, name in self._backends.items() if name == "nccl"}
        newest = max(generation for generation, _ in histories)
        self._generation = newest if len(set(histories)) == 1 else newest + 1
        if nccl and self._generation > self._nccl.generation:
            end = self._nccl.replace(self._generation)
            threads.start_thread(end, "fddp-nccl-close", lambda: None)
        self._connect_through_torch(self._everyone, nccl)

    def connect(self, devices: Sequence[torch.device]) -> None:
        new = [device for device in devices if device not in self._devices]
        self._devices += new
        self._connect_on(new, [self._everyone])

    def _connect_on(
        self, devices: Sequence[torch.device], groups: Sequence[tuple[int, ...]]
    ) -> None:
        for ranks, device in itertools.product(groups, devices):
            communicator = self._communicators.get(ranks, {}).get(device.type)
            if communicator is None or device.type == "cpu" or len(ranks) == 1:
                continue
            what = f"connecting {counted(len(ranks), 'rank')} on {device}"
            check_peers = partial(self._peers.check, what, self._peers.begin_wait())
            try:
                call_with_checks(partial(communicator.connect, device), self.timeout_s, check_peers)
            except RuntimeError as error:
                raise self.fail(what, error, ranks) from error
            self.status.finish(what)

    def averages(self, device_types: Collection[str]) -> bool:
        return self._all_are(device_types, attrgetter("averages"))

    def orders_by_streams(self, device_types: Collection[str]) -> bool:
        return super().orders_by_streams(device_types) or self._all_are(
            device_types, attrgetter("uses_streams")
        )

    def _all_are(
        self, device_types: Collection[str], is_one: Callable[[Communicator], bool]
    ) -> bool:
        """Return True if `is_one` holds for the communicators of all ranks on these devices."""
        found = map(self._communicators[self._everyone].get, device_types)
        return all(each is not None and is_one(each) for each in found)

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self._global_ranks)

    def share_memory(self, host_groups: HostGroups) -> None:
        """Use shared memory where ranks share a host; a collective call. Takes ownership of the
        argument."""
        self._memory = HostMemory(host_groups, self.world_size)
        if self.world_size > 1 and host_groups.share_host(self._everyone):
            self._open_in_memory(self._memory, [self._everyone])
        self.name, self.reason = self._memory.name, self._memory.reason

    def end_bootstrap(self) -> None:
        """Connect the ranks on devices that memory does not serve. If no device of this transport
        uses the communicator of the opening, leave it to the next one."""
        opening, self._opening = self._opening, None
        if opening is None:
            return
        connected = self._communicators[self._everyone]
        needed = self._devices_through_torch(self._everyone)
        is_new = not self._membership.all_kept
        if is_new and any(connected[device] is opening.communicator for device in needed):
            return
        others = {d: c for d, c in connected.items() if c is not opening.communicator}
        self._communicators[self._everyone] = others
        missing = {device: name for device, name in needed.items() if device not in others}
        self._connect_through_torch(self._everyone, missing)
        self._opened.remove(opening.communicator)
        _free(self._bootstrap.keep(opening))

    def _devices_through_torch(self, ranks: tuple[int, ...]) -> dict[str, str]:
        """Backends of the devices on which these ranks need a communicator of torch, by device; the
        same on all ranks."""
        if ranks not in self._in_memory:
            return self._backends
        if self._memory is None or not self._memory.serves_others:
            return {}
        return {device: name for device, name in self._backends.items() if device != "cpu"}

    def dismiss_memory(self) -> None:
        """Free the shared memory, in which no communicator was opened."""
        if self._memory is not None:
            self._memory.free()
        self._memory = None

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
        ranks = self._subgroups.ranks.get(axes, ()) if axes else self._everyone
        communicator = self._in_memory.get(ranks)
        if communicator is not None:
            try:
                handle = communicator.backend.start(
                    "all_reduce", tensor, 0, average, wait_soon, record_time
                )
            except (TypeError, ValueError, RuntimeError):
                # The base class raises the precise error, or uses another communicator. Another
                # thread may have closed this one.
                pass
            else:
                work = _C10dWork(self, communicator, handle, ranks)
                if record_time:
                    work.record_time()
                return work
        return super().all_reduce(
            tensor, axes=axes, average=average, record_time=record_time, wait_soon=wait_soon
        )

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As the base class's: shared memory on the CPU, unless no pages can be reserved."""
        if self._memory is not None and device.type == "cpu":
            shared = self._memory.empty(numel, dtype)
            if shared is not None:
                return shared
        return super().empty(numel, dtype, device)

    def _connect(self, groups: Sequence[tuple[int, ...]]) -> None:
        new = [ranks for ranks in groups if ranks not in self._communicators]
        if self._memory is not None:
            self._open_in_memory(self._memory, new)
            self.name, self.reason = self._memory.name, self._memory.reason
        for ranks in new:
            self._connect_through_torch(ranks, self._devices_through_torch(ranks))
        self._connect_on(self._devices, new)

    def _open_in_memory(self, memory: HostMemory, groups: Sequence[tuple[int, ...]]) -> None:
        others = [device for device in self._backends if device != "cpu"]
        memory.open(self, groups, bool(others) and torch.accelerator.is_available())
        for ranks in groups:
            communicator = memory.communicators.get(ranks)
            if communicator is not None:
                self._opened.append(communicator)
                self._in_memory[ranks] = communicator
                self._communicators.setdefault(ranks, {})["cpu"] = communicator

    def _connect_through_torch(
        self,
        ranks: tuple[int, ...],
        backends: dict[str, str],
        lost: Callable[[], Sequence[int]] = lambda: (),
    ) -> None:
        """Connect ranks.

        Args:
            ranks: the ranks.
            backends: names by device type.
            lost: returns ranks that left the process group.
        """
        if backends:
            group = self._existing_group()
            what = f"opening a communicator of {counted(len(ranks), 'rank')}"
            check_peers = partial(
                self._peers.check_connecting, what, self._peers.begin_wait(), lost
            )
            spec = CommunicatorSpec(
                group, self.rank, ranks, self._membership, self.timeout_s, check_peers
            )
            try:
                connected = new_communicators(spec, backends, self._nccl, self._generation)
            except RuntimeError as error:
                if is_of_this_rank(error):
                    self.end_opening(error)
                    raise
                raise self.fail(what, error, ranks) from error
            self._opened += dict.fromkeys(connected.values())
            self._communicators[ranks] = {**connected, **self._communicators.get(ranks, {})}
            wait = self.status.waits
            if wait is not None and wait.what == what:
                self.status.finish(what)

    def native_collectives(
        self, accelerators: Collection[str], *, captured: bool = False
    ) -> Collectives:
        collectives = in_python = super().native_collectives(accelerators, captured=captured)
        if self.world_size == 1 or captured:
            return collectives

        def adopt(communicator: Communicator, pending: Pending) -> _C10dWork:
            return _C10dWork(self, communicator, pending, self._everyone)

        def adopt_work(communicator: Communicator, work: dist.Work) -> _C10dWork:
            return adopt(communicator, PendingWorks((work,)))

        def fail(tensor: Tensor, average: bool, error: BaseException) -> NoReturn:
            if not isinstance(error, RuntimeError):
                raise error
            operation = Operation("all_reduce", tensor, self._everyone, average=average)
            raise self.fail(str(operation), error, self._everyone) from error

        in_memory = self._in_memory.get(self._everyone)
        if in_memory is not None:
            collectives = in_memory.backend.collectives_of_steps(partial(adopt, in_memory))
        by_device = self._communicators[self._everyone]
        for device_type in accelerators:
            communicator = by_device.get(device_type)
            backend = None if communicator is None else communicator.stream_backend(device_type)
            if communicator is not None and backend is not None:
                collectives = extension.compiled.DeviceCollectives(
                    collectives,
                    in_python,
                    backend,
                    communicator.averages,
                    partial(adopt_work, communicator),
                    fail,
                )
        return collectives

    def _start(self, operation: Operation) -> Work:
        communicator = self._communicators[operation.ranks].get(operation.tensor.device.type)
        if communicator is None:
            raise ValueError(
                f"{operation.kind} on rank {self.rank}: the tensor is on "
                f"{operation.tensor.device} and the group serves {sorted(self._backends)}; "
                "move the tensor, or initialise the group with a backend for that device"
            )
        try:
            pending = communicator.issue(operation)
        except TransformError:  # on all ranks, before anything is sent
            raise
        except RuntimeError as error:
            raise self.fail(str(operation), error, operation.ranks) from error
        work = _C10dWork(self, communicator, pending, operation.ranks)
        work.operation, work.place = operation, communicator.issued
        if operation.record_time:
            work.record_time()
        if not isinstance(communicator, ShmCommunicator):
            self._works.add(work)
        return work

    def publish_step_failure(self, step: int, text: str) -> None:
        self._membership.publish_step_failure(step, text)

    def close(self, reason: str = "close() was called") -> None:
        if self.closed_by:  # others know of it
            super().close(reason)
            return
        # gloo's connections live as long as its operations.
        on_devices = any(communicator.in_flight for communicator in self._opened)
        self._end(reason, is_awaited=on_devices or self._works.in_flight)

    def abandon(self, reason: str) -> None:
        self._is_abandoned = True
        self._end(reason, is_awaited=True)

    def _end(self, reason: str, *, is_awaited: bool) -> None:
        """Close, and report it to the other ranks if they may wait for this one."""
        try:
            if is_awaited and not self.closed_by:
                self._peers.report(Report("dead", (self.rank,)))
        finally:
            super().close(reason)

    def group_left(self) -> dist.ProcessGroup | None:
        group = self._group()
        if group is None or group not in process_groups():
            return None
        begin_s = self._peers.begin_wait()
        left = group_left(
            group,
            partial(self._peers.find_lost, begin_s),
            self._detector.ended,
            self.timeout_s,
            _group_timeout_s(group, self.control_device),
        )
        self._left.append(weakref.ref(left))
        return left

    def hold_group(self) -> None:
        hold(self._existing_group(), self)

    def drop_groups(self) -> None:
        for reference in (self._group, *self._left):
            group = reference()
            if group is not None:
                drop(group, self)

    def announce_leave(self) -> None:
        announce_leave(self._existing_group(), self.timeout_s)

    def ranks_leaving(self) -> tuple[int, ...]:
        return ranks_leaving(self._existing_group())

    def _existing_group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise ClosedError(
                f"the process group of rank {self.rank} is gone; open a new transport"
            )
        return group

    def _release(self) -> None:
        self._cancel_finalizer()
        for communicator in self._opened:
            communicator.close_stream_backend()
        self._detector.stop_listening()
        self.status.board.leave(self.status)
        failed = self._failure is not None or self._is_abandoned
        over = threading.Event()
        unused = [*self._opened, *self._bootstrap.leave(self.status)]
        freeing = [communicator.free(failed=failed, over=over) for communicator in unused]
        self._in_memory = {}
        if self._memory is not None:
            self._memory.free()
        # On a separate thread, see [Note: freeing waits]. Without a failure this is short.
        try:
            thread = threads.start_thread(partial(_finish, freeing), "fddp-c10d-close", over.set)
        except threads.ThreadStartError:
            over.set()
            _finish(freeing)
            return
        if not failed:
            thread.join(_FREEING_S)

    def _await(self, work: _C10dWork, collective: Pending, what: str) -> None:
        if self.closed_by and not collective.done:
            raise RuntimeError("the transport was closed")
        communicator, operation = work.communicator, work.operation
        # The source of a broadcast may exit once it has sent its data.
        is_broadcast = operation is not None and operation.kind == "broadcast"
        soon_s = communicator.soon_s
        begin_s = self._peers.begin_wait(0.0 if soon_s == 0.0 or collective.done else soon_s)

        def check_peers() -> None:
            if self.closed_by:  # by another thread
                raise RuntimeError("the transport was closed")
            self._peers.check(
                what,
                begin_s,
                check_failures=not communicator.spreads_failures,
                among=() if is_broadcast or communicator.watches_members else work.ranks,
            )

        communicator.wait(collective, check_peers)

    def _fail_operation(self, what: str, error: RuntimeError, work: _C10dWork) -> FddpError:
        """As `fail`, of an operation in flight."""
        if isinstance(error, OperationMismatchError):
            self._peers.publish_mismatch(str(error))
            where = f"{what} on rank {self.rank} of {self.world_size}"
            return mismatch_error(where, str(error))
        return self.fail(what, error, work.ranks, self._works.first_failed(work))

    def fail(
        self, what: str, error: Exception, ranks: tuple[int, ...], at: tuple[int, str] = (-1, "")
    ) -> FddpError:
        """Close after a failure of a communicator and return the error of `what`.

        Args:
            what: description of the operation.
            error: raised by the communicator.
            ranks: participants of the operation.
            at: its position among the operations of these ranks, and its description.

        Raises:
            RuntimeError: `error` itself, if it comes from user code.
        """
        if from_user_code(error):
            raise error
        where = f"{what} on rank {self.rank} of {self.world_size}"
        with self._lock:
            if self._failure is None:
                if self.closed_by:
                    reason = f"the transport was closed ({self.closed_by})"
                    return ClosedError(f"{where}: {reason}")
                found = error.failure if isinstance(error, CommunicatorFailedError) else None
                for communicator in self._opened:
                    communicator.spread(found)
                if found is None:
                    failure = self._peers.diagnose(error, ranks, at)
                else:
                    failure = self._peers.adopt(found)
                self.status.fail(what)
                self.status.board.publish(self.status.key)
                self._failure = failure
                self.closed_by = self.closed_by or f"{what} failed"  # others know of it
                self.close()
        if self._failure is None:
            raise InternalError(f"{what} failed for an unknown reason")
        names, limit_s = self._detector.names, self.timeout_s
        return to_error(self._failure, where, names, limit_s, self._numbers)


class _C10dWork(Work):
    """An operation in flight.

    Attributes:
        collective: its handle; None once the operation is over.
        operation: refers to the tensor. None for an all-reduce that the extension has started.
        place: position among the operations of its ranks.
    """

    operation: Operation | None = None
    place = -1
    _watch: Callable[[], float | None] | None = None
    _error: FddpError | None = None

    def __init__(
        self,
        transport: C10dTransport,
        communicator: Communicator,
        collective: Pending,
        ranks: tuple[int, ...],
    ) -> None:
        self._transport = transport
        self.communicator = communicator
        self.collective: Pending | None = collective
        self.ranks = ranks

    @property
    def done(self) -> bool:
        collective = self.collective
        return collective is None or bool(self._transport.closed_by) or collective.done

    @property
    def done_s(self) -> float | None:
        return None if self._watch is None else self._watch()

    def end_range(self, range: CollectiveRange) -> None:
        assert self.collective is not None
        self.communicator.end_range(self.collective, range)

    def record_time(self) -> None:
        assert self.collective is not None
        # Operations without an object that are timed are on the CPU.
        device = _CPU if self.operation is None else self.operation.tensor.device
        self._watch = self.communicator.watch(self.collective, device)

    def _wait(self, what: str) -> None:
        collective = self.collective
        if collective is not None:
            transport = self._transport
            try:
                if transport.closed_by or not self.communicator.finishes_soon(collective):
                    transport._await(self, collective, what)
            except RuntimeError as error:
                self._error = transport._fail_operation(what, error, self)
                self._error.__cause__ = error
            else:
                transport.status.finish(what)
            self.collective = self.operation = None
        if self._error is not None:
            raise self._error


class _IssuedWorks:
    """Works in the order of issue, some finished."""

    def __init__(self) -> None:
        self._works: list[weakref.ref[_C10dWork]] = []

    def add(self, work: _C10dWork) -> None:
        if len(self._works) == _MAX_WORKS:
            self._works = [ref for ref in self._works if _is_open(ref)]
        self._works.append(weakref.ref(work))

    @property
    def in_flight(self) -> bool:
        """True if some operation has not finished."""
        works = [work for ref in [*self._works] if (work := ref()) is not None]
        return any(not work.done for work in works)

    def first_failed(self, failed: _C10dWork) -> tuple[int, str]:
        """Return position and description of the first failed operation of the same ranks.

        Where ranks diverge, later operations fail only because this one did.
        """
        for ref in self._works:
            work = ref()
            if work is None or work.communicator is not failed.communicator:
                continue
            collective = work.collective
            has_failed = isinstance(collective, PendingWorks) and not collective.succeeded
            if has_failed and work.place < failed.place:
                return work.place, str(work.operation)
        return failed.place, "" if failed.operation is None else str(failed.operation)


def _is_open(ref: weakref.ref[_C10dWork]) -> bool:
    work = ref()
    return work is not None and work.collective is not None


def _free(communicators: Sequence[Communicator]) -> None:
    """Free communicators without pending operations."""
    _finish([unused.free(failed=False, over=threading.Event()) for unused in communicators])


def _forget(status: TransportStatus, bootstrap: Bootstrap) -> None:
    """Free what a transport shares with others, if it was collected without having been closed."""
    status.board.leave(status)
    _free(bootstrap.leave(status))


def _finish(freeing: Sequence[Callable[[], None]]) -> None:
    for finish in freeing:
        finish()


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Backend names by device type, such as {"cpu": "gloo", "cuda": "nccl"}. Where the group has
    none for the CPU, gloo carries what the host reads, which would wait for the device there."""
    config = dist.get_backend_config(group)
    backends = dict(entry.split(":", 1) for entry in config.split(","))
    if "cpu" not in backends and dist.is_gloo_available():
        backends["cpu"] = "gloo"
    return backends


def _group_timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """Timeout of the group; torch's default where the backend has no options."""
    options = getattr(backend_of(group, device), "options", None)
    timeout = getattr(options, "_timeout", c10d.default_pg_timeout)
    return float(timeout.total_seconds())
