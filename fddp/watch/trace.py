"""Steps of all ranks as one trace for Perfetto."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from fddp.extend import MappingOf, Schema
from fddp.watch.phases import (
    BACKWARD,
    FORWARD,
    GC,
    HOOK,
    INPUT,
    OF_STEPS,
    SYNC,
    WAIT,
    StepRecord,
)

_THREADS = ("compute", "communication")

#: name, thread, start and end on the rank's clock, and numbers that are shown with it
_Span: TypeAlias = "tuple[str, int, float, float, Mapping[str, float]]"

#: spans of some steps, and the end of the last collective of each step by its number
STEPS: Schema = {
    "spans": [(str, int, float, float, MappingOf(float))],
    "ends_s": [(int, float)],
}


def trace_message(steps: Sequence[StepRecord]) -> dict[str, Any]:
    """Return steps of one rank in the form of `STEPS`."""
    ends_s = [
        (step, max((bucket.done_s for bucket in times.buckets), default=times.end_s))
        for step, _, times in steps
    ]
    return {"spans": [span for record in steps for span in _spans(record)], "ends_s": ends_s}


def chrome_trace(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return steps of all ranks as JSON in the Trace Event Format, for Perfetto
    (https://ui.perfetto.dev) and chrome://tracing.

    Each rank is a process of the trace, with one thread for its own work and one for communication.
    Waits for other ranks, and work of communication hooks and of the garbage collector, are nested
    in the phases in which they happened. The begin of a collective is not measured; see
    `StepTimes.to_timeline`.

    Clocks are aligned so that the last collectives of a step end together on all ranks, in the
    median over steps, as none can end before all ranks take part. Times on different ranks are
    comparable up to the latency of that end.

    Args:
        ranks: message of each rank. The clocks of ranks without a common step are not adjusted.

    Example:
        >>> from fddp.extend import StepTimes
        >>> def on_a_clock_from(s):
        ...     times = StepTimes((), s + 1.0, s + 3.0, s + 4.5, begun_s=s)
        ...     return trace_message([StepRecord(0, {}, times)])
        >>> trace = json.loads(chrome_trace([on_a_clock_from(100.0), on_a_clock_from(7.0)]))
        >>> for event in trace["traceEvents"]:
        ...     if event["ph"] == "X" and event["pid"] == 1:
        ...         print(event["name"], event["ts"], event["dur"])
        forward 0.0 1000000.0
        backward 1000000.0 2000000.0
        sync 3000000.0 1500000.0
    """
    offsets = _offsets([dict(message["ends_s"]) for message in ranks])
    spans = [
        (rank, name, thread, start_s - offsets[rank], end_s - start_s, args)
        for rank, message in enumerate(ranks)
        for name, thread, start_s, end_s, args in message["spans"]
    ]
    origin_s = min((start_s for _, _, _, start_s, _, _ in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank in range(len(ranks)):
        meta = {"ph": "M", "pid": rank}
        name, order = {"name": f"rank {rank}"}, {"sort_index": rank}
        events.append({"name": "process_name", **meta, "tid": 0, "args": name})
        events.append({"name": "process_sort_index", **meta, "tid": 0, "args": order})
        for thread, title in enumerate(_THREADS):
            events.append({"name": "thread_name", **meta, "tid": thread, "args": {"name": title}})
    for rank, name, thread, start_s, length_s, args in spans:
        kind, ts = _THREADS[thread > 0], (start_s - origin_s) * 1e6
        event = {"name": name, "cat": kind, "ph": "X", "ts": ts, "dur": length_s * 1e6}
        events.append({**event, "pid": rank, "tid": thread, "args": args})
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _offsets(ends_s: Sequence[Mapping[int, float]]) -> list[float]:
    """Return the offset of each rank's clock from that of the first rank."""
    offsets = []
    for of in ends_s:
        differences = [of[step] - ends_s[0][step] for step in of.keys() & ends_s[0].keys()]
        offsets.append(statistics.median(differences) if differences else 0.0)
    return offsets


def _spans(record: StepRecord) -> Iterator[_Span]:
    times, step = record.times, {"step": record.step}
    named_s = {p: s for p, s in record.phases_s.items() if p not in OF_STEPS}
    before_s = times.begun_s
    if INPUT in record.phases_s:  # the phases add up to the time since the previous step
        before_s = min(before_s, times.end_s - sum(record.phases_s.values()))
    named_ms = {f"{name}_ms": s * 1e3 for name, s in named_s.items()}
    for name, start_s, end_s in (
        (INPUT, before_s, times.begun_s),
        (FORWARD, times.begun_s, times.backward_start_s),
        (BACKWARD, times.backward_start_s, times.backward_end_s),
        (SYNC, times.backward_end_s, times.end_s),
        *((HOOK, *span) for span in times.hooks),
        *((GC, *span) for span in times.collections),
        *((WAIT, *span) for span in times.waits),
    ):
        if end_s > start_s:
            yield name, 0, start_s, end_s, step | (named_ms if name == INPUT else {})
    nbytes = {bucket.bucket: bucket.nbytes for bucket in times.buckets}
    for span in times.to_timeline().spans:
        if span.bucket >= 0:
            start_s, end_s = (s + times.backward_start_s for s in (span.start_s, span.end_s))
            own = {"bucket": span.bucket, "bytes": nbytes[span.bucket]}
            yield span.label, 1, start_s, max(start_s, end_s), step | own
