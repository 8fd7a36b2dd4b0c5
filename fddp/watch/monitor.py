"""Monitoring of steps on all ranks: times of phases, and stragglers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fddp import Communicator, DistributedDataParallel, GradSync, SyncInfo
from fddp.extend import (
    Schema,
    communicator_of,
    entrance,
    exchange,
    optional,
    rank_names,
    waits_since,
)
from fddp.watch.links import SENT, Sent, link_times_s, sent_per_step, sent_so_far
from fddp.watch.pauses import collections_during
from fddp.watch.phases import (
    GC,
    HOOK,
    INPUT,
    MONITOR,
    SYNC,
    WAIT,
    StepRecord,
    overlap_s,
    step_phases,
    without,
)
from fddp.watch.report import MonitorReport
from fddp.watch.stragglers import COMMUNICATION, SUMMARY, RankSummary
from fddp.watch.trace import STEPS, chrome_trace, trace_message

if TYPE_CHECKING:
    from fddp.extend import Group

_OWN_NAMES = {HOOK, GC, SYNC, WAIT, MONITOR, COMMUNICATION, "step", "behind"}
_MOST = 1000  # measured parts that are kept between two steps

#: what each rank sends for a report
REPORT: Schema = {"summary": SUMMARY, "sent": SENT}


class Exporter(Protocol):
    """Receiver of a monitor's records; `TensorBoard` and `Prometheus` are two."""

    def step(self, info: SyncInfo, record: StepRecord) -> None:
        """Export one step of this rank."""

    def report(self, report: MonitorReport) -> None:
        """Export a report on all ranks."""


class Monitor:
    """Records steps on all ranks, and reports the times of phases and the straggler.

    Only durations are compared, never clocks of different ranks. Times are the host's: the time of
    an asynchronous accelerator appears in the phase in which the host waits for it.

    Construction, `report` and `trace` are collective calls, on the communicator of operators such
    as `fddp.pmean`. All ranks must call `observe` after each step, also in rounds of `fddp.uneven`
    without input.

    Args:
        sync_or_group: ranks to compare: a `GradSync`, a `Communicator`, or a group as for
            `GradSync`; None for the default group. A wrapped module
            (`fddp.DistributedDataParallel`) records its steps' times from then on.
        window: number of a rank's newest steps in a report and in a trace.
        exporters: receivers of all steps and reports.

    Raises:
        ValueError: `window` is below 1.
        TypeError: `sync_or_group` is no group.
        ClosedError: the `GradSync` is closed.

    Example:
        >>> import fddp, time, torch
        >>> def train(group):
        ...     params = {"w": torch.ones(2)}
        ...     def loss_fn(params):
        ...         time.sleep(0.03 * group.rank)  # rank 1 is slow
        ...         return params["w"].sum()
        ...     with fddp.GradSync(params, group=group) as sync:
        ...         step = sync.value_and_grad(loss_fn, with_info=True)
        ...         monitor = fddp.watch.Monitor(sync)
        ...         for _ in range(10):
        ...             loss, grads, info = step(params)
        ...             monitor.observe(info)
        ...         return monitor.report().straggler
        >>> found = fddp.loopback(2, train)[0]
        >>> found.rank, found.phase
        (1, 'forward')
    """

    @entrance
    def __init__(
        self,
        sync_or_group: GradSync | DistributedDataParallel | Group | Communicator | None = None,
        *,
        window: int = 100,
        exporters: Sequence[Exporter] = (),
    ) -> None:
        group: Any = sync_or_group
        if isinstance(group, GradSync):
            group = group.group
        elif isinstance(group, DistributedDataParallel):
            group.keep_sync_info()
            group = group.process_group
        self._ranks = communicator_of(group)
        _check_count("window", window)
        self._exporters = tuple(exporters)
        self._steps: deque[StepRecord] = deque(maxlen=window)
        self._newest: SyncInfo | None = None
        self._open: list[str] = []  # phases that are open, the innermost last
        self._since_s = 0.0  # begin of the innermost one's newest part
        # Separate, so that many named phases don't displace the monitor's own.
        self._named: deque[_Part] = deque(maxlen=_MOST)
        self._own: deque[_Part] = deque(maxlen=_MOST)
        self._collections = collections_during(self)
        self._sent = sent_so_far()  # as of the previous report
        self._since = 0  # steps since then

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._ranks.rank

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The newest steps of this rank, oldest first."""
        return tuple(self._steps)

    @entrance
    def observe(self, info: SyncInfo) -> None:
        """Record a step; to be called right after it. Communicates nothing.

        Args:
            info: `SyncInfo` of the step, or the wrapped module's `sync_info`. For `sync(grads)`,
                forward and backward are part of "input", unless `phase` measures them. An info
                that was observed before is ignored.

        Raises:
            TypeError: `info` is no `SyncInfo`.
            Exception: an error of an exporter.
        """
        if not isinstance(info, SyncInfo):
            raise TypeError(
                f"observe takes the SyncInfo of a step with with_info=True, got a "
                f"{type(info).__name__}"
            )
        if info is self._newest:
            return
        self._newest = info
        with self._measured(MONITOR):
            record = self._record(info)
            self._steps.append(record)
            self._since += 1
            for exporter in self._exporters:
                exporter.step(info, record)

    @contextmanager
    @entrance
    def phase(self, name: str) -> Iterator[None]:
        """Measure a part of the time between two steps, which is otherwise part of "input".

        The time of a nested phase counts for the nested phase only, waiting for other ranks (in
        `fddp.pmean`, for instance) as "wait", and the garbage collector as "gc". The newest 1000
        phases of a step are kept.

        Args:
            name: name of the phase, such as "update". The time of "input", "forward" and "backward"
                is added to that of the phase: before `sync(grads)`, only the caller knows it.

        Raises:
            TypeError: the name is no text.
            ValueError: the name is empty, or one of the monitor's own.
        """
        if not isinstance(name, str):
            raise TypeError(f"the name of a phase is a text, got {name!r:.80}")
        if not name or name in _OWN_NAMES:
            raise ValueError(f"{name!r} can't be a phase's name; choose another")
        with self._measured(name):
            yield

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        """Measure a phase. Time within several phases counts for the innermost one."""
        self._close_part()
        self._open.append(name)
        try:
            yield
        finally:
            self._close_part()
            self._open.pop()

    def _close_part(self) -> None:
        now_s = time.perf_counter()
        if self._open:
            parts = self._own if self._open[-1] == MONITOR else self._named
            parts.append(_Part(self._open[-1], self._since_s, now_s))
        self._since_s = now_s

    @entrance
    def report(self) -> MonitorReport:
        """Return the times of the newest steps' phases on each rank, and those of TCP connections
        since the previous report; a collective call.

        Returns:
            A report that is the same on all ranks; print it.

        Raises:
            ValueError: some rank has observed no step; on all ranks.
            DesyncError: a rank is in another collective call on the group.
            RankLostError, SyncTimeoutError: a rank did not make the call.
            Exception: an error of an exporter, after the report was made.
        """
        with self._measured(MONITOR):
            sent = sent_so_far()
            new = sent_per_step(self._sent, sent, self._since)
            self._sent, self._since = sent, 0
            own = None
            if self._steps:
                own = {"summary": asdict(RankSummary.of(self.rank, self._steps)), "sent": new}
            received = self._exchange(own, REPORT)
            links_s = link_times_s([[*map(Sent.from_message, of["sent"])] for of in received])
            summaries = [RankSummary.from_message(of["summary"]) for of in received]
            report = MonitorReport.of(
                replace(one, link_s=s) for one, s in zip(summaries, links_s, strict=True)
            )
            for exporter in self._exporters:
                exporter.report(report)
        return report

    @entrance
    def trace(self, steps: int = 10) -> str:
        """Return the newest steps of all ranks as a trace for Perfetto; a collective call.

        Args:
            steps: maximum number of steps.

        Returns:
            JSON in the Trace Event Format, the same on all ranks. Clocks of ranks are aligned so
            that the last collectives of a step end together, in the median over steps.

        Raises:
            TypeError, ValueError: `steps` is no int of at least 1; raised before communication.
            Exception: as `report`.
        """
        _check_count("steps", steps)
        with self._measured(MONITOR):
            own = trace_message([*self._steps][-steps:]) if self._steps else None
            return chrome_trace(self._exchange(own, STEPS))

    def _exchange(self, own: object, schema: Schema) -> list[Any]:
        """Return the values of all ranks, by rank; `ValueError` if one is None."""
        received = exchange(own, optional(schema), self._ranks, topic="monitor")
        silent = [rank for rank, value in enumerate(received) if value is None]
        if silent:
            raise ValueError(
                f"the monitor has observed no step on {rank_names(silent)}; call observe(info) on "
                f"every rank after each step"
            )
        return received

    def _record(self, info: SyncInfo) -> StepRecord:
        times = info.timeline
        phases_s: dict[str, float] = {}
        between_s: dict[str, float] = {}  # neither a phase's work nor the monitor's
        before = self._steps[-1] if self._steps else None
        is_next = before is not None and before.step + 1 == info.step
        end_s = before.times.end_s if before is not None and is_next else times.begun_s
        if times.begun_s < end_s:
            # The forward pass may begin before the end of the previous step. Count it from there
            # on, without the monitor's own time.
            ends = (part.end_s for part in self._own if part.end_s <= times.backward_start_s)
            begun_s = max((end_s, *ends))
            of_step = tuple(wait for wait in times.waits if wait[0] >= begun_s)
            times = replace(times, begun_s=begun_s, waits=of_step)
        found = [each for each in self._collections if end_s <= each[0] and each[1] <= times.end_s]
        times = replace(times, collections=tuple(found))
        if is_next:
            waits = tuple(wait for wait in waits_since(end_s) if wait[1] <= times.begun_s)
            collections = without(found, waits)

            def own_s(start_s: float, stop_s: float) -> float:
                apart_s = sum(overlap_s(each, start_s, stop_s) for each in (waits, collections))
                return stop_s - start_s - apart_s

            phases_s[MONITOR] = 0.0
            for name, start_s, stop_s in (*self._named, *self._own):
                if end_s <= start_s and stop_s <= times.begun_s:
                    phases_s[name] = phases_s.get(name, 0.0) + own_s(start_s, stop_s)
            rest_s = own_s(end_s, times.begun_s) - sum(phases_s.values())
            phases_s[INPUT] = phases_s.get(INPUT, 0.0) + max(0.0, rest_s)
            between_s[WAIT] = overlap_s(waits, end_s, times.begun_s)
            between_s[GC] = overlap_s(collections, end_s, times.begun_s)
            times = replace(times, waits=waits + times.waits)
        for parts in (self._named, self._own):
            while parts and parts[0].start_s < times.end_s:
                parts.popleft()
        while self._collections and self._collections[0][0] < times.end_s:
            self._collections.popleft()
        for name, seconds in step_phases(times).items():
            phases_s[name] = phases_s.get(name, 0.0) + between_s.get(name, 0.0) + seconds
        return StepRecord(info.step, phases_s, times)


class _Part(NamedTuple):
    """Part of a phase, on the clock of `time.perf_counter`."""

    name: str
    start_s: float
    end_s: float


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is a number of steps, got {value!r:.80}")
    if value < 1:
        raise ValueError(f"{name} must be 1 or more, got {value}")
