"""Timelines of one step, measured or simulated, and their overlap with backward."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from fddp.core.tables import plain_table
from fddp.core.timeline_svg import timeline_svg

Interval: TypeAlias = tuple[float, float]
"""Start and end, in seconds."""

COMPUTE = "compute"
"""Lane of a rank's local work. Every other lane belongs to a group of ranks."""


class Span(NamedTuple):
    """One operation on a timeline; seconds since the start of the step.

    Attributes:
        op: position in the schedule; -1 for backward or without a schedule.
        kind: kind of the operation, or "backward".
        bucket: index of the bucket, or -1.
        lane: `COMPUTE`, or the name of the group: its axes joined by "+".
        label: short text for display.
        launch_s: time at which this rank launched the operation.
        start_s: time at which it began: all ranks of the group have launched it, and the group's
            earlier operations have finished.
        end_s: time at which it finished.
    """

    op: int
    kind: str
    bucket: int
    lane: str
    label: str
    launch_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """One step on one rank; seconds since the start of the step.

    Attributes:
        spans: backward, then the operations in launch order.
        backward_end_s: end of backward on this rank.
        step_s: end of the step on this rank.
        rank: rank shown; in a simulation, the last rank to finish.
        rank_steps_s: `step_s` of each rank, or one value if all ranks have the same.

    Example:
        >>> times = BucketTimes(0, 4, ready_s=11.0, launch_s=11.0, done_s=13.0)
        >>> timeline = StepTimes((times,), 10.0, backward_end_s=12.5, end_s=13.0).to_timeline()
        >>> timeline
        Timeline(rank 0, step 3000.000 ms, backward 2500.000 ms, exposed 500.000 ms, 75% hidden)
    """

    spans: tuple[Span, ...]
    backward_end_s: float
    step_s: float
    rank: int
    rank_steps_s: tuple[float, ...]

    @property
    def communication_s(self) -> float:
        """Time with at least one collective running."""
        return _covered(self._collectives(), self.step_s)

    @property
    def hidden_s(self) -> float:
        """Part of `communication_s` that overlaps with backward."""
        return _covered(self._collectives(), self.backward_end_s)

    @property
    def exposed_s(self) -> float:
        """Time from the end of backward to the end of the step."""
        return self.step_s - self.backward_end_s

    @property
    def hidden_fraction(self) -> float:
        """Fraction of the communication that overlaps with backward; 0 without communication."""
        total_s = self.communication_s
        return self.hidden_s / total_s if total_s > 0.0 else 0.0

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes in order of first use."""
        return tuple(dict.fromkeys(span.lane for span in self.spans))

    def to_chrome_trace(self) -> str:
        """Return JSON in the Trace Event Format, for Perfetto (https://ui.perfetto.dev) and
        chrome://tracing. The rank is shown as a process, each lane as a thread.

        Example:
            >>> span = Span(1, "all_reduce", 0, "world", "all_reduce 0", 0.0, 0.001, 0.003)
            >>> trace = Timeline((span,), 0.002, 0.003, 0, (0.003,)).to_chrome_trace()
            >>> event = json.loads(trace)["traceEvents"][-1]
            >>> event["name"], event["ph"], event["ts"], event["dur"]
            ('all_reduce 0', 'X', 1000.0, 2000.0)
        """
        threads = {lane: number for number, lane in enumerate(self.lanes)}
        events = [_name_event("process_name", self.rank, 0, f"rank {self.rank}")]
        for lane, thread in threads.items():
            events.append(_name_event("thread_name", self.rank, thread, lane))
        events.extend(_span_event(span, self.rank, threads[span.lane]) for span in self.spans)
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})

    def __repr__(self) -> str:
        return (
            f"Timeline(rank {self.rank}, step {_ms(self.step_s)}, "
            f"backward {_ms(self.backward_end_s)}, exposed {_ms(self.exposed_s)}, "
            f"{self.hidden_fraction:.0%} hidden)"
        )

    def _repr_svg_(self) -> str:
        shown = {
            lane: [
                (span.label, span.start_s, span.end_s)
                for span in self.spans
                if span.lane == lane and span.end_s > span.start_s
            ]
            for lane in self.lanes
        }
        return timeline_svg([*shown.items()], self.backward_end_s, self.step_s, repr(self))

    def __str__(self) -> str:
        """Table of the lanes."""
        header = ("lane", "spans", "busy", "first start", "last end")
        rows = []
        for lane in self.lanes:
            spans = [span for span in self.spans if span.lane == lane]
            busy_s = _covered([(span.start_s, span.end_s) for span in spans], self.step_s)
            first_s, last_s = min(s.start_s for s in spans), max(s.end_s for s in spans)
            rows.append((lane, str(len(spans)), _ms(busy_s), _ms(first_s), _ms(last_s)))
        return f"{self!r}\n{plain_table(header, rows, numeric=range(1, len(header)))}"

    def _collectives(self) -> list[Interval]:
        return [(span.start_s, span.end_s) for span in self.spans if span.lane != COMPUTE]


@dataclass(frozen=True)
class BucketTimes:
    """One bucket of one step; seconds on the clock of `time.perf_counter`.

    Attributes:
        bucket: index of the bucket in the step's plan.
        nbytes: size of the bucket on the wire, in bytes.
        ready_s: time at which its last gradient was ready (or backward ended).
        launch_s: time at which its collective was launched.
        done_s: time at which its collective finished.
    """

    bucket: int
    nbytes: int
    ready_s: float
    launch_s: float
    done_s: float


@dataclass(frozen=True)
class StepTimes:
    """One step; seconds on the clock of `time.perf_counter`.

    Attributes:
        buckets: one record per bucket, in plan order.
        backward_start_s: start of backward.
        backward_end_s: end of backward; later communication is exposed.
        end_s: time at which the synchronised gradients were ready.
        leaves_s: time of the last gradient of each leaf of the plan on this rank; NaN without a
            gradient.
        begun_s: start of the call, that is, of the forward pass; NaN if unknown.
        waits: intervals in which this rank waited for other ranks, in order.
        hooks: intervals in which its communication hook ran or waited, in order.
        collections: intervals in which Python's garbage collector ran, in order; of steps that a
            `fddp.watch.Monitor` has observed.
    """

    buckets: tuple[BucketTimes, ...]
    backward_start_s: float
    backward_end_s: float
    end_s: float
    leaves_s: tuple[float, ...] = ()
    begun_s: float = math.nan
    waits: tuple[Interval, ...] = ()
    hooks: tuple[Interval, ...] = ()
    collections: tuple[Interval, ...] = ()

    @property
    def ready_times_s(self) -> tuple[float, ...]:
        """Seconds from the start of backward to the last gradient of each leaf: an input of
        `simulate` and `plan_optimal`."""
        return tuple(time_s - self.backward_start_s for time_s in self.leaves_s)

    @property
    def exposed_s(self) -> float:
        """Time from the end of backward to the synchronised gradients."""
        return self.end_s - self.backward_end_s

    @property
    def hidden_fraction(self) -> float:
        """Fraction of the communication that overlaps with backward; 0 without communication.

        Example:
            >>> times = BucketTimes(0, 4, ready_s=1.0, launch_s=1.0, done_s=3.0)
            >>> StepTimes((times,), 0.0, backward_end_s=2.5, end_s=3.0).hidden_fraction
            0.75
        """
        return self.to_timeline().hidden_fraction

    def _repr_svg_(self) -> str:
        return self.to_timeline()._repr_svg_()

    def to_timeline(self, rank: int = 0) -> Timeline:
        """Return the step as a timeline that starts with backward.

        The start of a collective is not measured. It is set to its launch or to the end of the
        collectives launched before it, whichever is later: collectives of one group run in order.
        """
        origin_s = self.backward_start_s
        backward_end_s, step_s = self.backward_end_s - origin_s, self.end_s - origin_s
        spans = [backward_span(backward_end_s)]
        before_s = -origin_s
        for times in sorted(self.buckets, key=lambda times: (times.launch_s, times.done_s)):
            launch_s, done_s = times.launch_s - origin_s, times.done_s - origin_s
            start_s = min(max(launch_s, before_s), done_s)
            before_s = max(before_s, done_s)
            label, number = f"bucket {times.bucket}", times.bucket
            spans.append(Span(-1, "bucket", number, "group", label, launch_s, start_s, done_s))
        return Timeline(tuple(spans), backward_end_s, step_s, rank, rank_steps_s=(step_s,))


def backward_span(end_s: float) -> Span:
    """Return the span of a backward that starts with the step."""
    return Span(-1, "backward", -1, COMPUTE, "backward", 0.0, 0.0, end_s)


def _covered(spans: Iterable[Interval], until_s: float) -> float:
    """Length of the union of the spans, up to `until_s`."""
    total_s, reached_s = 0.0, -math.inf
    for start_s, end_s in sorted(spans):
        end_s = min(end_s, until_s)
        total_s += max(0.0, end_s - max(start_s, reached_s))
        reached_s = max(reached_s, end_s)
    return total_s


def _name_event(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


def _span_event(span: Span, rank: int, thread: int) -> dict[str, Any]:
    return {
        "name": span.label,
        "cat": span.kind,
        "ph": "X",
        "ts": span.start_s * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "pid": rank,
        "tid": thread,
        "args": {"op": span.op, "bucket": span.bucket, "launch_us": span.launch_s * 1e6},
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
