"""Monitoring of steps on all ranks: times of phases, and stragglers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch

from fddp.collectives.communicator import Communicator, communicator_of
from fddp.collectives.operators import all_gather
from fddp.core.protocol.differences import check_equal
from fddp.errors import ClosedError, PeerError
from fddp.sync.grad_sync import GradSync
from fddp.telemetry.flight.log import names
from fddp.telemetry.perfetto import chrome_trace, steps_from_json, steps_to_json
from fddp.telemetry.phases import INPUT, MONITOR, OF_STEPS, WAIT, IntervalIndex, step_phases
from fddp.telemetry.report import MonitorReport
from fddp.telemetry.step_info import SyncInfo
from fddp.telemetry.stragglers import RankSummary, StepRecord, summarize
from fddp.telemetry.waits import waits_since

if TYPE_CHECKING:
    from fddp.transport import Group

_OWN_NAMES = (INPUT, *OF_STEPS, MONITOR, "step", "behind")
_INVALID = -1  # in place of `every`, on a rank with invalid arguments
_MOST_NAMED = 1000  # phases that are kept between two steps


class Exporter(Protocol):
    """Receiver of a monitor's records; `fddp.telemetry.exporters` has implementations."""

    def step(self, info: SyncInfo, record: StepRecord) -> None:
        """Export one step of this rank."""

    def report(self, report: MonitorReport) -> None:
        """Export a report on all ranks."""


@runtime_checkable
class WrappedModule(Protocol):
    """Interface of `fddp.DistributedDataParallel` that a monitor uses."""

    process_group: Any

    def keep_sync_info(self) -> None:
        """Record a `SyncInfo` of every step from now on."""


class Monitor:
    """Records steps on all ranks, and reports the times of phases and the straggler.

    Only durations are compared, never clocks of different ranks. Times are the host's: the time of
    an asynchronous accelerator appears in the phase in which the host waits for it.

    Construction is a collective call, on the communicator of operators such as `fddp.pmean`. All
    ranks must pass the same `every`, and call `observe` after each step, also in rounds of
    `fddp.uneven` without input: a report waits for all ranks.

    Args:
        sync_or_group: ranks to compare: a `GradSync`, a `Communicator`, or a group as for
            `GradSync`; None for the default group. A wrapped module
            (`fddp.DistributedDataParallel`) records its steps' times from then on.
        every: number of steps between reports of `observe`; None to report only in `report`.
        window: number of a rank's newest steps in a report and in a trace.
        exporters: receivers of all steps and reports.

    Raises:
        ValueError: `every` or `window` is below 1.
        TypeError: there is no communicator, or an argument has another type.
        ClosedError: the `GradSync` is closed.
        PlanMismatchError: ranks passed different `every`.
        PeerError: another rank raised a ValueError or TypeError.

    Example:
        >>> import fddp, time, torch
        >>> def train(group):
        ...     params = {"w": torch.ones(2)}
        ...     def loss_fn(params):
        ...         time.sleep(0.03 * group.rank)  # rank 1 is slow
        ...         return params["w"].sum()
        ...     with fddp.GradSync(params, group=group) as sync:
        ...         step, monitor = sync.value_and_grad(loss_fn, with_info=True), fddp.Monitor(sync)
        ...         for _ in range(10):
        ...             loss, grads, info = step(params)
        ...             monitor.observe(info)
        ...         return monitor.report().straggler
        >>> found = fddp.loopback(2, train)[0]
        >>> found.rank, found.phase
        (1, 'forward')
    """

    def __init__(
        self,
        sync_or_group: GradSync | WrappedModule | Group | Communicator | None = None,
        *,
        every: int | None = None,
        window: int = 100,
        exporters: Sequence[Exporter] = (),
    ) -> None:
        group = sync_or_group
        if isinstance(group, GradSync):
            if group._engine.is_closed:
                raise ClosedError("this GradSync is closed; pass one that takes steps")
            group = group._engine.group
        elif isinstance(group, WrappedModule):
            group.keep_sync_info()
            group = group.process_group
        self._communicator = communicator_of(group, None)
        _agree_on(every, _problem(every, window, exporters), self._communicator)
        self._every = every
        self._exporters = tuple(exporters)
        self._steps: deque[StepRecord] = deque(maxlen=window)
        self._newest: SyncInfo | None = None
        self._named: deque[_Phase] = deque(maxlen=_MOST_NAMED)
        # Separate, so that many named phases don't displace the monitor's own.
        self._own_phases: deque[_Phase] = deque(maxlen=_MOST_NAMED)
        self._open: list[_NestedTimes] = []  # for each open phase, the times of phases within it

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._communicator.rank

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The newest steps of this rank, oldest first."""
        return tuple(self._steps)

    def observe(self, info: SyncInfo) -> MonitorReport | None:
        """Record a step; to be called right after it. Communicates only for a report.

        Args:
            info: `SyncInfo` of the step, or the wrapped module's `sync_info`. For `sync(grads)`,
                forward and backward are part of "input", unless `phase` measures them. An info
                that was observed before is ignored.

        Returns:
            A report after each `every` steps, as counted by `info.step`, on all ranks; else None.

        Raises:
            TypeError: `info` is no `SyncInfo`.
            Exception: as `report`, if one is due. Errors of exporters are raised after the report
                was made, so that other ranks receive theirs.
        """
        if not isinstance(info, SyncInfo):
            raise TypeError(
                f"observe takes the SyncInfo of a step with with_info=True, got a "
                f"{type(info).__name__}"
            )
        if info is self._newest:
            return None
        self._newest = info
        with self._measured(MONITOR, self._own_phases):
            record = self._record(info)
            self._steps.append(record)
            is_due = self._every is not None and (info.step + 1) % self._every == 0
            report = self._make_report() if is_due else None
            for exporter in self._exporters:
                exporter.step(info, record)
            if report is not None:
                self._export(report)
        return report

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a part of the time between two steps, which is otherwise part of "input".

        The time of a nested phase counts for the nested phase only, and waiting for other ranks
        (in `fddp.pmean`, for instance) as "wait". The newest 1000 phases of a step are kept.

        Args:
            name: name of the phase, such as "update".

        Raises:
            TypeError: the name is no text.
            ValueError: the name is empty, or one of the monitor's own.
        """
        if not isinstance(name, str):
            raise TypeError(f"the name of a phase is a text, got {name!r:.80}")
        if not name or name in _OWN_NAMES:
            raise ValueError(f"{name!r} can't be a phase's name; choose another")
        with self._measured(name, self._named):
            yield

    @contextmanager
    def _measured(self, name: str, into: deque[_Phase]) -> Iterator[None]:
        self._open.append(_NestedTimes())
        start_s = time.perf_counter()
        try:
            yield
        finally:
            end_s = time.perf_counter()
            within = self._open.pop()
            waited_s = IntervalIndex(waits_since(start_s)).within(start_s, end_s)
            own_s = end_s - start_s - within.lasted_s - (waited_s - within.waited_s)
            into.append(_Phase(name, start_s, end_s, own_s))
            if self._open:
                self._open[-1].lasted_s += end_s - start_s
                self._open[-1].waited_s += waited_s

    def report(self) -> MonitorReport:
        """Return the times of the newest steps' phases on each rank; a collective call.

        Returns:
            A report that is the same on all ranks; print it.

        Raises:
            ValueError: some rank has observed no step; on all ranks.
            DesyncError: a rank is in another collective call on the group.
            RankLostError, SyncTimeoutError: a rank did not make the call.
            Exception: an error of an exporter, after the report was made.
        """
        with self._measured(MONITOR, self._own_phases):
            report = self._make_report()
            self._export(report)
        return report

    def _make_report(self) -> MonitorReport:
        own = summarize(self.rank, self._steps).to_json() if self._steps else ""
        received = self._all_gather_text(own)
        ranks = [RankSummary.from_json(text, rank) for rank, text in enumerate(received)]
        return MonitorReport.of(ranks)

    def _export(self, report: MonitorReport) -> None:
        for exporter in self._exporters:
            exporter.report(report)

    def trace(self, steps: int = 10) -> str:
        """Return the newest steps of all ranks as a trace for Perfetto; a collective call.

        Args:
            steps: maximum number of steps.

        Returns:
            JSON in the Trace Event Format, the same on all ranks; see `chrome_trace`.

        Raises:
            TypeError, ValueError: `steps` is no int of at least 1; raised before communication.
            Exception: as `report`.
        """
        _check_count("steps", steps)
        with self._measured(MONITOR, self._own_phases):
            newest = list(self._steps)[-steps:]
            received = self._all_gather_text(steps_to_json(newest) if newest else "")
            return chrome_trace({r: steps_from_json(text, r) for r, text in enumerate(received)})

    def _record(self, info: SyncInfo) -> StepRecord:
        times = info.timeline
        phases_s: dict[str, float] = {}
        before = self._steps[-1] if self._steps else None
        waited_s = 0.0
        if before is not None and before.step + 1 == info.step:
            end_s = before.times.end_s
            if times.begun_s < end_s:
                # The forward pass may begin before the end of the previous step. Count it from
                # there on, without the monitor's own time.
                ends = (of.end_s for of in self._own_phases if of.end_s <= times.backward_start_s)
                begun_s = max((end_s, *ends))
                of_step = tuple(wait for wait in times.waits if wait[0] >= begun_s)
                times = replace(times, begun_s=begun_s, waits=of_step)
            phases_s[MONITOR] = 0.0
            for name, start_s, stop_s, own_s in (*self._named, *self._own_phases):
                if end_s <= start_s <= stop_s <= times.begun_s:
                    phases_s[name] = phases_s.get(name, 0.0) + own_s
            waits = tuple(wait for wait in waits_since(end_s) if wait[1] <= times.begun_s)
            waited_s = sum(stop_s - start_s for start_s, stop_s in waits)
            between_s = times.begun_s - end_s - waited_s
            phases_s[INPUT] = max(0.0, between_s - sum(phases_s.values()))
            times = replace(times, waits=waits + times.waits)
        _forget_(self._named, times.end_s)
        _forget_(self._own_phases, times.end_s)
        phases_s |= step_phases(times)
        phases_s[WAIT] += waited_s
        return StepRecord(info.step, phases_s, times)

    def _all_gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks, by rank; `ValueError` if one is empty."""
        payload = text.encode()
        lengths = _gathered(torch.tensor([len(payload)]), self._communicator)
        silent = [rank for rank, (length,) in enumerate(lengths) if length == 0]
        if silent:
            raise ValueError(
                f"the monitor has observed no step on {names(silent)}; call observe(info) on "
                f"every rank after each step"
            )
        padded = torch.zeros(max(length for (length,) in lengths), dtype=torch.uint8)
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        rows = _gathered(padded, self._communicator)
        pairs = zip(rows, lengths, strict=True)
        return [bytes(row[:length]).decode() for row, (length,) in pairs]


@dataclass
class _NestedTimes:
    """Total time of the phases within a phase, and the time spent waiting in them."""

    lasted_s: float = 0.0
    waited_s: float = 0.0


class _Phase(NamedTuple):
    """A measured phase, on the clock of `time.perf_counter`."""

    name: str
    start_s: float
    end_s: float
    own_s: float  # without nested phases and waiting


def _forget_(measured: deque[_Phase], before_s: float) -> None:
    """Remove phases that began before a time. In place: open phases will append to the deque."""
    later = [of for of in measured if of.start_s >= before_s]
    measured.clear()
    measured.extend(later)


def _gathered(tensor: torch.Tensor, communicator: Communicator) -> list[list[int]]:
    device = communicator.transport.control_device
    rows: list[list[int]] = all_gather(tensor.to(device), communicator).tolist()
    return rows


def _problem(
    every: object, window: object, exporters: Sequence[Exporter]
) -> TypeError | ValueError | None:
    try:
        if every is not None:
            _check_count("every", every)
        _check_count("window", window)
        for exporter in exporters:
            if not all(callable(getattr(exporter, name, None)) for name in ("step", "report")):
                raise TypeError(
                    f"an exporter has the methods step(info, record) and report(report), got "
                    f"{exporter!r:.80}"
                )
    except (TypeError, ValueError) as error:
        return error
    return None


def _agree_on(
    every: int | None, problem: TypeError | ValueError | None, communicator: Communicator
) -> None:
    """Compare `every` over ranks, which would otherwise wait for each other in different calls."""
    own = _INVALID if problem is not None else 0 if every is None else every
    received = [number for (number,) in _gathered(torch.tensor([own]), communicator)]
    if problem is not None:
        raise problem
    where = f"Monitor on rank {communicator.rank} of {len(received)}"
    for rank, number in enumerate(received):
        if number == _INVALID:
            raise PeerError(f"{where}: rank {rank} passed an invalid argument")
    passed = [number or None for number in received]
    check_equal(f"{where}: every", passed, "pass the same on every rank")


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is a number of steps, got {value!r:.80}")
    if not 1 <= value < 2**63:
        raise ValueError(f"{name} must be 1 or more, got {value}")
