"""Export of several steps of all ranks as one trace for Perfetto."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fddp.core.protocol.messages import MappingOf, Schema
from fddp.core.timeline import COMPUTE, BucketTimes, StepTimes
from fddp.telemetry.decode import check_least, decode_from
from fddp.telemetry.phases import BACKWARD, FORWARD, HOOK, INPUT, OF_STEPS, SYNC, WAIT
from fddp.telemetry.stragglers import StepRecord

_THREADS = (COMPUTE, "communication")


def steps_to_json(steps: Sequence[StepRecord]) -> str:
    """Return steps of one rank as JSON, without the times of leaves."""
    return json.dumps(
        [
            (
                step,
                dict(phases_s),
                [list(vars(bucket).values()) for bucket in times.buckets],
                *(times.backward_start_s, times.backward_end_s, times.end_s, times.begun_s),
                times.waits,
                times.hooks,
            )
            for step, phases_s, times in steps
        ]
    )


def steps_from_json(text: str, rank: int) -> list[StepRecord]:
    """Decode the output of `steps_to_json`.

    Args:
        text: the message.
        rank: its sender.

    Raises:
        ValueError: the message is malformed; names the rank.
    """
    return decode_from(rank, "steps", text, _STEPS, lambda steps: list(map(_step, steps)))


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


def _step(entries: list[Any]) -> StepRecord:
    step, phases_s, buckets, start_s, end_s, done_s, begun_s, waits, hooks = entries
    check_least(0, {**phases_s, "step": step})
    for bucket, nbytes, *_ in buckets:
        check_least(0, {"bucket": bucket, "nbytes": nbytes})
    times = StepTimes(
        tuple(BucketTimes(*bucket) for bucket in buckets),
        start_s,
        end_s,
        done_s,
        begun_s=begun_s,
        waits=tuple(map(tuple, waits)),
        hooks=tuple(map(tuple, hooks)),
    )
    return StepRecord(step, phases_s, times)


def chrome_trace(steps: Mapping[int, Sequence[StepRecord]]) -> str:
    """Return steps of several ranks as JSON in the Trace Event Format, for Perfetto
    (https://ui.perfetto.dev) and chrome://tracing.

    Each rank is a process of the trace, with one thread for its own work and one for communication.
    Waits for other ranks, and work of communication hooks, are nested in the phases in which they
    happened. The begin of a collective is not measured; see `StepTimes.to_timeline`.

    Clocks are aligned so that the last collectives of a step end together on all ranks, in the
    median over steps, as none can end before all ranks take part. Times on different ranks are
    comparable up to the latency of that end.

    Args:
        steps: steps by rank. The clocks of ranks without a common step are not adjusted.

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
    """Return the offset of each rank's clock from that of the first rank."""
    ends = {rank: {r.step: _last_done_s(r.times) for r in of} for rank, of in steps.items()}
    first = next(iter(ends.values()), {})
    offsets = {}
    for rank, of in ends.items():
        differences = [of[step] - first[step] for step in of.keys() & first.keys()]
        offsets[rank] = statistics.median(differences) if differences else 0.0
    return offsets


def _last_done_s(times: StepTimes) -> float:
    return max((bucket.done_s for bucket in times.buckets), default=times.end_s)


def _begin_s(record: StepRecord) -> float:
    """Return the end of the previous step, or the best known bound."""
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
    named_ms = {f"{p}_ms": s * 1e3 for p, s in record.phases_s.items() if p not in OF_STEPS}
    for name, start_s, end_s in parts:
        if end_s > start_s:
            own = {**args, **named_ms} if name == INPUT else args
            yield _span(name, rank, 0, start_s - origin_s, end_s - origin_s, own)
    nbytes = {bucket.bucket: bucket.nbytes for bucket in times.buckets}
    for span in times.to_timeline(rank).spans:
        if span.lane != COMPUTE:
            moments_s = (span.start_s, span.end_s, span.launch_s)
            start_s, end_s, launch_s = (s + times.backward_start_s - origin_s for s in moments_s)
            own = {**args, "bucket": span.bucket, "launch_us": launch_s * 1e6}
            own["bytes"] = nbytes[span.bucket]
            yield _span(span.label, rank, 1, start_s, end_s, own)


def _span(
    name: str, rank: int, thread: int, start_s: float, end_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": _THREADS[thread],
        "ph": "X",
        "ts": max(0.0, start_s * 1e6),  # avoids -0.0 from rounding
        "dur": max(0.0, end_s - start_s) * 1e6,
        "pid": rank,
        "tid": thread,
        "args": args,
    }


def _name(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
