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

import contextlib
import re
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fddp.errors import ClosedError, FddpError, InternalError, SyncTimeoutError
from fddp.transports import desks
from fddp.transports.base import Transport, Work
from fddp.transports.communicators import (
    Communicator,
    LateError,
    LeftError,
    Seat,
    ToldError,
    connect,
)
from fddp.transports.endings import Failure, explain
from fddp.transports.rollcall import Report, RollCall
from fddp.transports.whereabouts import MOST_RANKS, in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fddp.transports.communicators import Flight
    from fddp.transports.operation import Operation
    from fddp.transports.rollcall import Verdict

_GRACE_S = 2.0  # how long a failing rank waits for the others to say that they live
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
        self._roll = RollCall(group.get_group_store(), self.rank, self.world_size)
        self.slot, self._at_desk = desks.enter(group, self.timeout_s)
        self.slot.alarm = self._roll.alarm
        weakref.finalize(self, self.slot.desk.drop, self.slot).atexit = False
        try:
            self._open(title)
        except BaseException:
            self.close()
            raise

    def _open(self, title: str) -> None:
        what = "opening a c10d transport"
        self.slot.begin(f"the opening of a {title}")
        look = partial(self.look, f"the opening of a {title}", time.perf_counter(), news=False)
        try:
            absent = self._roll.open(self.timeout_s, look)
        except RuntimeError as error:
            raise self.fail(what, error, self._everyone) from error
        self.slot.key += f"/{self._roll.count}"
        if absent:
            doings = self._doings(absent)
            self.slot.fail(f"the opening of a {title}")
            self.slot.desk.tell()
            raise SyncTimeoutError(
                f"{what} on rank {self.rank} of {self.world_size}: {self.names(absent)} did not "
                f"open theirs within timeout_s={self.timeout_s}; every rank of the group must, in "
                f"the same order. What each does: {doings}",
                absent,
            )
        self._connect([self._everyone])

    def call(self, title: str) -> None:
        """Give it a name for errors, on which all ranks have agreed, with a number behind it."""
        try:
            self.slot.label = f"{title} #{self._roll.number(title)}"
        except RuntimeError as error:
            raise self.fail(f"the opening of a {title}", error, self._everyone) from error
        self.slot.finish("the opening")

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
            seat = Seat(group, self.rank, ranks, self._roll, self.timeout_s)
            try:
                self._communicators[ranks] = connect(seat, self._backends)
            except RuntimeError as error:
                what = f"opening a communicator of {len(ranks)} ranks"
                raise self.fail(what, error, ranks) from error

    def _start(self, operation: Operation) -> Work:
        communicator = self._communicators[operation.ranks].get(operation.tensor.device.type)
        if communicator is None:
            raise ValueError(
                f"{operation.kind} on rank {self.rank}: the tensor is on "
                f"{operation.tensor.device} and the group serves {sorted(self._backends)}; "
                "move the tensor, or initialise the group with a backend for that device"
            )
        try:
            return _C10dWork(self, communicator, operation)
        except RuntimeError as error:
            raise self.fail(str(operation), error, operation.ranks) from error

    def raise_alarm(self, step: int, text: str) -> None:
        self._roll.raise_alarm(step, text)

    def abandon(self) -> None:
        if self._closed is None:
            self.tell_of_leaving()
        self.close()

    def tell_of_leaving(self) -> None:
        """Tell ranks that wait for this one that it will not come."""
        # gloo's connections last as long as its operations, which the error that ends a step holds.
        with contextlib.suppress(RuntimeError):
            self._roll.report(Report("dead", (self.rank,)))

    def _release(self) -> None:
        self.slot.desk.leave(self.slot)
        # On a thread of its own, for [Note: freeing waits]; in order it does not, or not for long.
        thread = threading.Thread(target=self._free, name="fddp-c10d-close", daemon=True)
        thread.start()
        if self._failure is None:
            thread.join(_FREEING_S)

    def _free(self) -> None:
        for communicators in list(self._communicators.values()):
            for communicator in set(communicators.values()):
                communicator.free(failed=self._failure is not None)

    def _await(self, pending: _Pending, what: str) -> None:
        if self._closed is not None and not pending.flight.arrived:
            raise RuntimeError(f"the transport was closed ({self._closed})")
        look = partial(self.look, what, time.perf_counter())
        pending.communicator.wait(pending.flight, look)
        self.slot.finish(what)

    def look(self, what: str, begin_s: float, *, news: bool = True) -> None:
        """What a rank does now and then while it waits for `what`, since `begin_s`.

        Args:
            what: the operation in the caller's words.
            begin_s: by `time.perf_counter`.
            news: whether failures of this transport are to be asked for.

        Raises:
            ToldError: another rank has met a failure.
            LeftError: another rank has failed the step that this one is in.
        """
        wait = self.slot.begin(what)
        if news and self._roll.failed():
            raise ToldError("another rank reported a failure")
        if (peer := self.slot.desk.doomed(self.slot)) is not None:
            raise LeftError(peer)
        now_s = time.perf_counter()
        if now_s - begin_s > self.timeout_s / 4:
            wait.ask(self.slot.desk, now_s)

    def fail(
        self, what: str, error: Exception, ranks: tuple[int, ...], at: tuple[int, str] = (-1, "")
    ) -> FddpError:
        """Close after a failure that the backend raised; the error that `what` ends with.

        Args:
            what: the operation in the caller's words.
            error: what the backend raised.
            ranks: who took part.
            at: how many operations of these ranks came before it, and the operation itself.
        """
        with self.lock:
            if self._failure is None:
                if self._closed is not None:
                    return ClosedError(f"{what} on rank {self.rank} of {self.world_size}: {error}")
                if self.on_failure is not None:
                    self.on_failure(what)
                self._end(what, self._diagnosed(error, ranks, at))
            return self.explain(what)

    def _diagnosed(self, error: Exception, ranks: tuple[int, ...], at: tuple[int, str]) -> Failure:
        """What ended an operation of `ranks`, once the others were told and heard."""
        peer = self.slot.desk.doomed(self.slot)
        if peer is not None:
            with contextlib.suppress(RuntimeError):
                self._roll.report(Report("told", ranks, *at))
            return Failure(str(error), late=False, silent=(), peer=peer)
        failure = _diagnose(self._roll, error, Report("told", ranks, *at), self._grace_s)
        return self._with_doings(failure)

    def _with_doings(self, failure: Failure) -> Failure:
        """With what the ranks do, those first that have said nothing, where some came late."""
        if not failure.late or failure.silent is None or failure.mismatch:
            return failure
        return failure._replace(doings=self._doings(failure.silent))

    def _doings(self, silent: tuple[int, ...]) -> str:
        """What ranks do, in words; those first that have said nothing."""
        asked = [*silent, *(rank for rank in self._everyone if rank not in silent)]
        some = sorted(asked[:MOST_RANKS])
        numbers = {rank: self._at_desk[rank] for rank in some}
        told = self.slot.desk.answers(list(numbers.values()), self.slot.since, self._grace_s)
        return in_words({self.names((rank,)): told.get(numbers[rank]) for rank in some})

    @property
    def _grace_s(self) -> float:
        return min(_GRACE_S, self.timeout_s / 4)

    def end(self, what: str, failure: Failure) -> None:
        """Close after a failure that was seen elsewhere, and tell those who wait here."""
        with self.lock:
            if self._failure is None:
                verdict: Verdict = "timeout" if failure.late else "dead"
                with contextlib.suppress(RuntimeError):
                    self._roll.report(Report(verdict, failure.silent or ()))
                self._end(what, self._with_doings(failure))

    def explain(self, what: str) -> FddpError:
        """The error that `what` ends with, after a failure."""
        if self._failure is None:
            raise InternalError(f"{what} failed, and nothing tells why")
        where = f"{what} on rank {self.rank} of {self.world_size}"
        return explain(self._failure, where, self.names, self.timeout_s)

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
    def told(self) -> bool:
        """Whether another rank has told of a failure; asks the group's store."""
        return self._roll.failed()

    def _end(self, what: str, failure: Failure) -> None:
        self.slot.fail(what)
        self.slot.desk.tell()
        self._failure = failure
        self._closed = f"{what} failed"
        self._release()

    def names(self, ranks: tuple[int, ...]) -> str:
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
        self._transport = transport
        self._pending: _Pending | None = _Pending(
            communicator, communicator.issue(operation), operation, communicator.issued
        )
        self._error: FddpError | None = None
        self._watch = communicator.watch(self._pending.flight) if operation.stamp else None

    @property
    def done(self) -> bool:
        pending = self._pending
        return pending is None or self._transport._closed is not None or pending.flight.arrived

    @property
    def done_s(self) -> float | None:
        return None if self._watch is None else self._watch()

    def wait(self, what: str) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                self._transport._await(pending, what)
            except RuntimeError as error:
                ranks, at = pending.operation.ranks, (pending.place, str(pending.operation))
                self._error = self._transport.fail(what, error, ranks, at)
                self._error.__cause__ = error
        if self._error is not None:
            raise self._error


class _Pending(NamedTuple):
    """What must live for as long as an operation is in flight."""

    communicator: Communicator
    flight: Flight
    operation: Operation  # holds the tensor
    place: int  # among the operations of its ranks


def _diagnose(roll: RollCall, error: Exception, report: Report, grace_s: float) -> Failure:
    """Tell the others, and hear from them, how the operation of `report` that raised `error` ended.

    Silent alone means little: a rank that takes no part in what failed may be busy elsewhere.
    """
    # Without gloo's own source line in front and its general advice behind.
    text = re.sub(r"^\[[^\]]*\] |\. This is typically.*", "", str(error).split("\n", 1)[0])
    verdict: Verdict = "broken"
    if isinstance(error, ToldError):
        verdict = "told"
    elif isinstance(error, LateError) or re.search("timeout|timed out", text, re.IGNORECASE):
        verdict = "timeout"
    try:
        roll.report(report._replace(verdict=verdict))
        reports = roll.reports(grace_s)
    except RuntimeError:
        return Failure(text, verdict == "timeout", None)
    awaited = {r for told in reports.values() if told.verdict != "told" for r in told.ranks}
    dead = {r for told in reports.values() if told.verdict == "dead" for r in told.ranks}
    return Failure(
        text,
        late=any(told.verdict == "timeout" for told in reports.values()),
        silent=tuple(sorted(dead or awaited - reports.keys())),
        mismatch="" if dead else _mismatch(reports, report),
    )


def _mismatch(reports: Mapping[int, Report], own: Report) -> str:
    """What ranks are in that met in one place with different operations; empty if none did."""
    met = {
        rank: told.operation
        for rank, told in sorted(reports.items())
        if told.place >= 0 and (told.ranks, told.place) == (own.ranks, own.place)
    }
    first = next(iter(met.values()), "")
    if all(operation == first for operation in met.values()):
        return ""
    return ", ".join(f"rank {rank} {operation}" for rank, operation in met.items())


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Backend names by device type, for instance {"cpu": "gloo", "cuda": "nccl"}."""
    config = dist.get_backend_config(group)
    return dict(entry.split(":", 1) for entry in config.split(","))


def _group_timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """The timeout that the group was made with; torch has no public name for it."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", distributed_c10d.default_pg_timeout)
    return float(timeout.total_seconds())
