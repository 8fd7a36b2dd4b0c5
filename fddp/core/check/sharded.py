"""Verification of sharded schedules: each bucket is gathered once between its update and its use.

The events do not depend on the rank, so all ranks launch collectives in one order. Both schedules
of operations are proved by themselves. What is left to prove concerns one list of events, which is
executed once from the state in which each step begins.
"""

from __future__ import annotations

from typing import Literal, NoReturn

from fddp.core.check.findings import everywhere, fail_bucket, nontrivial, paths_of
from fddp.core.schedule.op import Kind
from fddp.core.schedule.schedule import Schedule
from fddp.core.schedule.sharded import ShardedSchedule, ShardEventKind, gather_launches
from fddp.errors import ScheduleError

_State = Literal["whole", "used", "reduced", "updated", "in flight"]

_CYCLE: dict[ShardEventKind, tuple[_State, _State]] = {
    "use": ("whole", "used"),
    "reduce": ("used", "reduced"),
    "update": ("reduced", "updated"),
    "gather": ("updated", "in flight"),
    "wait": ("in flight", "whole"),
}
"""State of a bucket before and after each event."""

_FOUND: dict[_State, str] = {
    "whole": "its parameters are whole and were not used in this step",
    "used": "it was used, and its gradients are not reduced",
    "reduced": "its gradients are reduced, and its shards are not updated",
    "updated": "its shards are updated, and the whole parameters are those of the last step",
    "in flight": "its all-gather is in flight",
}

_PHASES: dict[ShardEventKind, int] = {"use": 0, "reduce": 1, "update": 2}
"""Phases of a step; an optimizer may need all gradients before the first update."""


def check_sharded_schedule(schedule: ShardedSchedule) -> None:
    """Prove the events of a sharded schedule, whose two schedules of operations are proved.

    See `fddp.check_schedule` for the properties.

    Raises:
        ScheduleError: the schedule is wrong; the text names the event, the bucket and its leaves.
    """
    _check_parts(schedule)
    _check_events(schedule)
    orders: tuple[tuple[ShardEventKind, list[int], str], ...] = (
        ("reduce", list(schedule.reduce.sequence), "the packs of its schedule"),
        ("gather", gather_launches(schedule.gather), "the all-gathers of its schedule"),
        ("wait", _unpacked(schedule.gather), "the unpacks of the all-gathers"),
    )
    for kind, launched, operations in orders:
        order = list(schedule.order(kind))
        if order != launched:
            raise ScheduleError(
                f"the order of {kind!r} events is {order}, and that of {operations} {launched}; "
                f"make the two equal{everywhere(schedule.reduce)}"
            )


def _check_parts(schedule: ShardedSchedule) -> None:
    reduce, gather = schedule.reduce, schedule.gather
    for name, part, result in (
        ("reduce", reduce, "sharded_mean"),
        ("gather", gather, "replicated"),
    ):
        if part.result != result:
            raise ScheduleError(f"{name} must have the result {result!r}, got {part.result!r}")
    if (reduce.plan, reduce.topology) != (gather.plan, gather.topology):
        raise ScheduleError(
            f"reduce and gather must have the same plan and topology, got {reduce!r} and {gather!r}"
        )
    owned, packed = _regions(reduce, "unpack"), _regions(gather, "pack")
    for bucket in range(len(reduce.plan.buckets)):
        if owned[bucket] != packed[bucket]:
            fail_bucket(
                reduce,
                bucket,
                f"gather packs the shards {sorted(packed[bucket])}, and reduce leaves "
                f"{sorted(owned[bucket])}; a rank would send elements that it does not own",
            )


def _regions(schedule: Schedule, kind: Kind) -> list[set[tuple[int, int, tuple[str, ...]]]]:
    """Return the regions of the operations of a kind, by bucket."""
    found: list[set[tuple[int, int, tuple[str, ...]]]] = [set() for _ in schedule.plan.buckets]
    for op in schedule.ops:
        if op.kind == kind:
            _, start, stop, shard = op.region
            found[op.bucket].add((start, stop, nontrivial(schedule, shard)))
    return found


def _unpacked(schedule: Schedule) -> list[int]:
    return list(dict.fromkeys(op.bucket for op in schedule.ops if op.kind == "unpack"))


def _check_events(schedule: ShardedSchedule) -> None:
    count = len(schedule.plan.buckets)
    crossing = {*schedule.crossing}
    states: list[_State] = ["in flight" if b in crossing else "whole" for b in range(count)]
    begin, phase = list(states), 0
    for number, (kind, bucket) in enumerate(schedule.events):
        before, after = _CYCLE[kind]
        if states[bucket] != before:
            _fail(schedule, number, _FOUND[states[bucket]])
        if kind in _PHASES:
            if _PHASES[kind] < phase:
                _fail(schedule, number, "a later phase of the step has begun")
            phase = _PHASES[kind]
        if kind == "gather" and phase < _PHASES["update"]:
            _fail(schedule, number, "the update of the step has not begun")
        states[bucket] = after
    known = {event.bucket for event in schedule.events}
    for bucket, (first, last) in enumerate(zip(begin, states, strict=True)):
        if first != last or bucket not in known:
            fail_bucket(
                schedule.reduce,
                bucket,
                f"at the end of a step {_FOUND[last]}; its events must be wait, use, reduce, "
                f"update and gather, once each",
            )


def _fail(schedule: ShardedSchedule, number: int, found: str) -> NoReturn:
    bucket = schedule.events[number].bucket
    raise ScheduleError(
        f"{schedule.describe(number)}: {found}{everywhere(schedule.reduce)}",
        op=number,
        bucket=bucket,
        paths=paths_of(schedule.reduce, bucket),
    )
