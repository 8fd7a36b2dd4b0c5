"""Several steps of all ranks as one trace, to look at in Perfetto."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fddp.core.protocol.messages import MappingOf, Schema
from fddp.core.timeline import COMPUTE, BucketTimes, Interval, StepTimes
from fddp.telemetry.decode import check_least, decode_from
from fddp.telemetry.phases import BACKWARD, FORWARD, HOOK, INPUT, OF_STEPS, SYNC, WAIT
from fddp.telemetry.stragglers import StepRecord

_THREADS = (COMPUTE, "communication")


def steps_to_json(steps: Sequence[StepRecord]) -> str:
    """Steps of one rank as JSON, without the times of leaves."""
    return json.dumps(
        [
            (
                record.step,
                dict(record.phases_s),
                [list(vars(bucket).values()) for bucket in record.times.buckets],
                record.times.backward_start_s,
                record.times.backward_end_s,
                record.times.end_s,
                record.times.begun_s,
                record.times.waits,
                record.times.hooks,
            )
            for record in steps
        ]
    )


def steps_from_json(text: str, rank: int) -> list[StepRecord]:
    """What `steps_to_json` wrote.

    Args:
        text: what a rank told.
        rank: its number.

    Raises:
        ValueError: it is something else; names the rank, and says what.
    """
    return decode_from(rank, "steps", text, _STEPS, lambda read: [_step(*of) for of in read])


_INTERVALS: Schema = [(float, float)]
_STEPS: Schema = [
    (
        int,
        MappingOf(float),
        [(int, int, float, float, float)],
        *(float, float, float, float),
        _INTERVALS,
        _INTERVALS,
    )
]


def _step(
    step: int,
    phases_s: dict[str, float],
    buckets: list[list[Any]],
    start_s: float,
    end_s: float,
    done_s: float,
    begun_s: float,
    waits: list[list[float]],
    hooks: list[list[float]],
) -> StepRecord:
    check_least(0, {**phases_s, "step": step})
    for bucket, nbytes, *_ in buckets:
        check_least(0, {"bucket": bucket, "nbytes": nbytes})
    times = StepTimes(
        buckets=tuple(BucketTimes(*bucket) for bucket in buckets),
        backward_start_s=start_s,
        backward_end_s=end_s,
        end_s=done_s,
        begun_s=begun_s,
        waits=_intervals(waits),
        hooks=_intervals(hooks),
    )
    return StepRecord(step, phases_s, times)


def _intervals(read: list[list[float]]) -> tuple[Interval, ...]:
    return tuple((start_s, end_s) for start_s, end_s in read)


def chrome_trace(steps: Mapping[int, Sequence[StepRecord]]) -> str:
    """Steps of several ranks as JSON in the Trace Event Format, for Perfetto
    (https://ui.perfetto.dev) and chrome://tracing.

    A process of the trace stands for a rank, with a thread for what it does itself and one for
    communication. Waits for other ranks, and the work of communication hooks, lie within the phases
    in which they happened. When a collective began is not measured; see `StepTimes.to_timeline`.

    Clocks of ranks are set so that their last collectives of a step end together, in the median:
    none can end before all ranks take part. So moments on different ranks can be compared to within
    the time that the news of such an end takes.

    Args:
        steps: by rank; those of which ranks have none in common are as their clocks say.

    Example:
        >>> def on_a_clock_from(s):
        ...     buckets = (BucketTimes(0, 8, s + 2.0, s + 2.0, s + 4.0),)
        ...     waits = ((s + 3.0, s + 4.0),)
        ...     times = StepTimes(buckets, s + 1.0, s + 3.0, s + 4.5, begun_s=s, waits=waits)
        ...     phases_s = {"forward": 1.0, "backward": 2.0, "sync": 0.5, "wait": 1.0}
        ...     return [StepRecord(0, phases_s, times)]
        >>> trace = json.loads(chrome_trace({0: on_a_clock_from(100.0), 1: on_a_clock_from(7.0)}))
        >>> for event in trace["traceEvents"]:
        ...     if event["ph"] == "X" and event["pid"] == 1:
        ...         print(event["name"], event["ts"], event["dur"])
        forward 0.0 1000000.0
        backward 1000000.0 2000000.0
        sync 3000000.0 1500000.0
        wait 3000000.0 1000000.0
        bucket 0 2000000.0 2000000.0
    """
    offsets = _offsets(steps)
    moments = [
        _begin_s(record) - offsets[rank] for rank, records in steps.items() for record in records
    ]
    origin_s = min(moments, default=0.0)
    events: list[dict[str, Any]] = []
    for rank, records in steps.items():
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        events.append({**_name("process_sort_index", rank, 0, ""), "args": {"sort_index": rank}})
        events += [_name("thread_name", rank, t, name) for t, name in enumerate(_THREADS)]
        for record in records:
            events += _events(record, rank, origin_s + offsets[rank])
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _offsets(steps: Mapping[int, Sequence[StepRecord]]) -> dict[int, float]:
    """For each rank, how much later its clock reads than that of the first."""
    ends = {rank: {r.step: _met_s(r.times) for r in records} for rank, records in steps.items()}
    first = next(iter(ends.values()), {})
    offsets = {}
    for rank, of in ends.items():
        differences = [of[step] - first[step] for step in of.keys() & first.keys()]
        offsets[rank] = statistics.median(differences) if differences else 0.0
    return offsets


def _met_s(times: StepTimes) -> float:
    return max((bucket.done_s for bucket in times.buckets), default=times.end_s)


def _begin_s(record: StepRecord) -> float:
    """When the step before ended, as far as that is known."""
    begun_s = record.times.begun_s
    own_s = sum(s for p, s in record.phases_s.items() if p not in OF_STEPS)
    return begun_s - own_s - sum(e - s for s, e in record.times.waits if e <= begun_s)


def _events(record: StepRecord, rank: int, origin_s: float) -> Iterator[dict[str, Any]]:
    times, begin_s = record.times, _begin_s(record)
    args = {"step": record.step}
    parts = (
        (INPUT, begin_s, times.begun_s),
        (FORWARD, times.begun_s, times.backward_start_s),
        (BACKWARD, times.backward_start_s, times.backward_end_s),
        (SYNC, times.backward_end_s, times.end_s),
        *((HOOK, *span) for span in times.hooks),
        *((WAIT, *span) for span in times.waits),
    )
    for name, start_s, end_s in parts:
        if end_s > start_s:
            own = args if name != INPUT else {**args, **_named_ms(record)}
            yield _span(name, rank, 0, start_s - origin_s, end_s - origin_s, own)
    nbytes = {bucket.bucket: bucket.nbytes for bucket in times.buckets}
    for span in times.to_timeline(rank).spans:
        if span.lane != COMPUTE:
            start_s = span.start_s + times.backward_start_s - origin_s
            end_s = span.end_s + times.backward_start_s - origin_s
            launch_s = span.launch_s + times.backward_start_s - origin_s
            own = {**args, "bucket": span.bucket, "launch_us": launch_s * 1e6}
            own["bytes"] = nbytes[span.bucket]
            yield _span(span.label, rank, 1, start_s, end_s, own)


def _named_ms(record: StepRecord) -> dict[str, float]:
    """What lay between two steps, by name."""
    return {f"{p}_ms": s * 1e3 for p, s in record.phases_s.items() if p not in OF_STEPS}


def _span(
    name: str, rank: int, thread: int, start_s: float, end_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": _THREADS[thread],
        "ph": "X",
        "ts": max(0.0, start_s * 1e6),  # the first is 0 but for rounding
        "dur": max(0.0, end_s - start_s) * 1e6,
        "pid": rank,
        "tid": thread,
        "args": args,
    }


def _name(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
