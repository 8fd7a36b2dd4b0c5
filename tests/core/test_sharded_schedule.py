"""Sharded schedules: their proof, mutants that it rejects, and their simulation."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fddp
from fddp.core.plan.leaf import LeafSpec
from fddp.core.plan.plan import BucketPlan, plan_leaves
from fddp.core.schedule.builder import make_schedule
from fddp.core.schedule.sharded import (
    ShardedSchedule,
    ShardEvent,
    gather_launches,
    make_sharded_schedule,
)
from fddp.core.sim.cost import CostModel
from fddp.core.sim.sharded import ComputeTimes, ShardedTimeline, simulate_sharded
from fddp.core.sim.simulator import simulate
from fddp.core.timeline import COMPUTE
from fddp.errors import ScheduleError
from tests.support.schedules import TOPOLOGIES

LINK = CostModel(1e-4, 1e-8)


def plan_of(numels: list[int], per_bucket: int = 1) -> BucketPlan:
    """One leaf after the other, the last first, as backward reaches them."""
    leaves = [LeafSpec(f"leaf{i}", (numel,), "float32") for i, numel in enumerate(numels)]
    order = range(len(leaves))[::-1]
    return plan_leaves(leaves, order=order, caps_bytes=[4 * per_bucket])


@st.composite
def schedules(draw: st.DrawFn) -> ShardedSchedule:
    """Right schedules over several axes, of split buckets, and with any order of use."""
    numels = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    plan = plan_of(numels, draw(st.integers(1, 50)))
    reduce = make_schedule(
        plan,
        draw(st.sampled_from(TOPOLOGIES)),
        algorithm="reduce_scatter",
        split_mb=draw(st.sampled_from([None, 3e-5])),
    )
    order = draw(st.none() | st.permutations(range(len(numels))))
    gather = draw(st.sampled_from(["next_forward", "step_end"]))
    return make_sharded_schedule(reduce, gather, forward_order=order)


@given(schedules())
def test_built_schedules_are_proved(schedule: ShardedSchedule) -> None:
    fddp.check_schedule(schedule)


@given(schedules())
def test_each_bucket_is_gathered_once_between_its_update_and_its_use(
    schedule: ShardedSchedule,
) -> None:
    """Replayed over three steps, from whole parameters."""
    version = dict.fromkeys(range(len(schedule.plan.buckets)), 0)  # of the shards
    whole = dict(version)
    in_flight: set[int] = set()
    for step in range(3):
        for kind, bucket in schedule.events:
            if kind == "update":
                assert bucket not in in_flight
                version[bucket] += 1
            elif kind == "gather":
                assert bucket not in in_flight
                assert whole[bucket] == version[bucket] - 1
                in_flight.add(bucket)
            elif kind == "wait" and (step or bucket not in schedule.crossing):
                in_flight.remove(bucket)
                whole[bucket] = version[bucket]
            elif kind == "use":
                assert whole[bucket] == version[bucket] == step
    assert in_flight == {*schedule.crossing}


def test_buckets_are_gathered_in_the_order_of_their_first_use() -> None:
    reduce = make_schedule(plan_of([8, 8, 8]), 2, algorithm="reduce_scatter")
    assert make_sharded_schedule(reduce).order("gather") == (2, 1, 0)
    tied = make_sharded_schedule(reduce, forward_order=[2, 0, 1])
    assert tied.order("use") == tied.order("gather") == (0, 2, 1)
    assert gather_launches(tied.gather) == [0, 2, 1]
    assert tied.crossing == (0, 2, 1)
    assert make_sharded_schedule(reduce, "step_end").crossing == ()


@pytest.mark.parametrize("world_size", [2, 8])
def test_the_word_precedes_the_gathers_which_precede_the_unpacks(world_size: int) -> None:
    """Else the first use would wait for the last all-gather."""
    plan = plan_of([8, 8, 8])
    reduce = make_schedule(plan, world_size, algorithm="reduce_scatter")
    kinds = [op.kind for op in make_sharded_schedule(reduce).gather.ops]
    assert kinds == ["pack"] * 3 + ["control"] + ["all_gather"] * 3 + ["unpack"] * 3


@given(schedules())
def test_schedules_are_values(schedule: ShardedSchedule) -> None:
    copies = [
        ShardedSchedule.from_json(schedule.to_json()),
        pickle.loads(pickle.dumps(schedule)),
        dataclasses.replace(schedule),
    ]
    assert {schedule, *copies} == {schedule}
    assert all(str(copy) == str(schedule) for copy in copies)
    assert repr(schedule) in schedule._repr_html_()


@given(schedules(), st.data())
def test_mutants_are_rejected(schedule: ShardedSchedule, data: st.DataObject) -> None:
    events = [*schedule.events]
    number = data.draw(st.integers(0, len(events) - 1))
    event = events[number]
    kind = data.draw(st.sampled_from(["leave out", "twice", "other kind", "other bucket", "swap"]))
    if kind == "leave out":
        del events[number]
    elif kind == "twice":
        events.insert(data.draw(st.integers(0, len(events))), event)
    elif kind == "other kind":
        kinds = {"wait", "use", "reduce", "update", "gather"} - {event.kind}
        events[number] = event._replace(kind=data.draw(st.sampled_from(sorted(kinds))))
    elif kind == "other bucket":
        bucket = data.draw(st.integers(0, len(schedule.plan.buckets) - 1))
        if bucket == event.bucket:
            return
        events[number] = event._replace(bucket=bucket)
    else:
        other = data.draw(st.integers(0, len(events) - 1))
        first, second = event, events[other]
        if first == second:
            return
        if first.kind == second.kind in ("use", "update"):
            return  # the order within forward, or of updates, is free
        events[number], events[other] = second, first
        if kinds_are_free(schedule, events):
            return
    mutant = dataclasses.replace(schedule, events=tuple(events))
    with pytest.raises(ScheduleError):
        fddp.check_schedule(mutant)


def kinds_are_free(schedule: ShardedSchedule, events: list[ShardEvent]) -> bool:
    """True if a swap has changed no order that matters: those within a bucket (as a circle),
    within collectives and waits, and of phases."""

    def circle(found: tuple[ShardEvent, ...], bucket: int) -> list[str]:
        kinds = [event.kind for event in found if event.bucket == bucket]
        start = kinds.index("use") if "use" in kinds else 0
        return kinds[start:] + kinds[:start]

    def order(found: tuple[ShardEvent, ...], *kinds: str) -> list[ShardEvent]:
        return [event for event in found if event.kind in kinds]

    mutant, own = tuple(events), schedule.events
    return (
        all(circle(mutant, b) == circle(own, b) for b in range(len(schedule.plan.buckets)))
        and all(order(mutant, k) == order(own, k) for k in ("wait", "reduce", "gather"))
        and [e.kind for e in order(mutant, "use", "reduce", "update")]
        == [e.kind for e in order(own, "use", "reduce", "update")]
        and order(mutant, "update", "gather")[: len(schedule.plan.buckets)]
        == order(own, "update", "gather")[: len(schedule.plan.buckets)]
    )


def edited(*changes: tuple[int, ShardEvent | None]) -> ShardedSchedule:
    reduce = make_schedule(plan_of([8, 8]), 2, algorithm="reduce_scatter")
    events: list[ShardEvent | None] = [*make_sharded_schedule(reduce).events]
    # wait 1, use 1, wait 0, use 0, reduce 0, reduce 1, update 0, update 1, gather 1, gather 0
    for number, event in changes:
        events[number] = event
    kept = tuple(event for event in events if event is not None)
    return dataclasses.replace(make_sharded_schedule(reduce), events=kept)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (
            edited((0, ShardEvent("use", 1)), (1, ShardEvent("wait", 1))),
            r"event 0 \(use of bucket 1, leaf 'leaf0'\): its all-gather is in flight \(on all 2",
        ),
        (
            edited((8, None)),
            r"bucket 1, leaf 'leaf0': at the end of a step its shards are updated, and the whole "
            r"parameters are those of the last step; its events must",
        ),
        (
            edited((6, ShardEvent("gather", 0)), (9, ShardEvent("update", 0))),
            r"event 6 \(gather of bucket 0.*\): its gradients are reduced, and its shards are not",
        ),
        (
            edited((8, ShardEvent("gather", 0)), (9, ShardEvent("gather", 1))),
            r"the order of 'gather' events is \[0, 1\], and that of the all-gathers of its",
        ),
        (
            edited(
                (2, ShardEvent("reduce", 1)),
                (3, ShardEvent("wait", 0)),
                (4, ShardEvent("use", 0)),
                (5, ShardEvent("reduce", 0)),
            ),
            r"event 4 \(use of bucket 0.*\): a later phase of the step has begun",
        ),
    ],
)
def test_errors_name_event_bucket_and_leaf(schedule: ShardedSchedule, text: str) -> None:
    with pytest.raises(ScheduleError, match=text):
        fddp.check_schedule(schedule)


def test_shards_that_are_gathered_must_be_those_that_are_left() -> None:
    plan = plan_of([8])
    whole, split = (
        make_sharded_schedule(make_schedule(plan, 2, algorithm="reduce_scatter", split_mb=split_mb))
        for split_mb in (None, 16 / 2**20)
    )
    fddp.check_schedule(split)
    mutant = dataclasses.replace(whole, gather=split.gather)
    with pytest.raises(ScheduleError, match="a rank would send elements that it does not own"):
        fddp.check_schedule(mutant)


def test_arguments_are_checked() -> None:
    reduce = make_schedule(plan_of([8, 8]), 2, algorithm="reduce_scatter")
    with pytest.raises(ValueError, match="gather must be one of next_forward, step_end, got 'x'"):
        make_sharded_schedule(reduce, "x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="forward_order must hold each of the 2 leaves"):
        make_sharded_schedule(reduce, forward_order=[0, 0])
    with pytest.raises(TypeError, match="reduce must be a Schedule, got a BucketPlan"):
        make_sharded_schedule(plan_of([8]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must have the result 'sharded_mean'"):
        make_sharded_schedule(make_schedule(plan_of([8]), 2))
    schedule = make_sharded_schedule(reduce)
    with pytest.raises(ValueError, match=r"events\[0\] is of bucket 2, and there are 2 buckets"):
        dataclasses.replace(schedule, events=(ShardEvent("use", 2),))
    with pytest.raises(ValueError, match=r"events\[0\] is no event: 'use'"):
        dataclasses.replace(schedule, events=("use",))
    with pytest.raises(ValueError, match="steps must be an int from 2 to 1000, got 1"):
        simulate_sharded(schedule, LINK, ComputeTimes(0.1, [0.0, 0.0], [0.1, 0.1]), steps=1)
    with pytest.raises(ValueError, match="use_times_s must be from 0 to"):
        simulate_sharded(schedule, LINK, ComputeTimes(0.1, [0.0, -1.0], [0.1, 0.1]))
    with pytest.raises(ValueError, match="update_s must be from 0"):
        ComputeTimes(0.1, [0.0, 0.0], [0.1, 0.1], update_s=-1.0)


# Simulation


def simulated(count: int, gather: str, layer_s: float, link: CostModel) -> ShardedTimeline:
    """Equal layers, whose backward takes as long as their forward."""
    reduce = make_schedule(plan_of([250_000] * count), 2, algorithm="reduce_scatter")
    ready = [layer_s * (count - layer) for layer in range(count)]
    uses = [layer_s * layer for layer in range(count)]
    schedule = make_sharded_schedule(reduce, gather)  # type: ignore[arg-type]
    return simulate_sharded(schedule, link, ComputeTimes(layer_s * count, uses, ready))


def test_only_the_ends_are_exposed_where_compute_is_larger() -> None:
    link = CostModel(0.0, 2e-9)  # 1 ms for one of 4 equal buckets, in either direction
    at_end = simulated(4, "step_end", 2e-3, link)
    crossing = simulated(4, "next_forward", 2e-3, link)
    assert at_end.compute_s == crossing.compute_s == pytest.approx(16e-3)
    assert at_end.communication_s == crossing.communication_s == pytest.approx(8e-3, rel=1e-3)
    assert at_end.step_s == pytest.approx(16e-3 + 1e-3 + 4e-3, rel=1e-3)
    assert crossing.step_s == pytest.approx(16e-3 + 1e-3 + 1e-3, rel=1e-3)


def test_compute_disturbs_collectives() -> None:
    found = simulated(2, "next_forward", 10e-3, CostModel(0.0, 2e-9, overlap=0.5))
    took = {
        (span.kind, span.bucket): span.end_s - span.start_s
        for span in found.spans
        if span.launch_s >= found.begins_s[1] and span.end_s > span.start_s
    }
    # Undisturbed at the end of backward and at the beginning of forward.
    assert took["reduce_scatter", 0] == pytest.approx(2e-3)
    assert took["reduce_scatter", 1] == pytest.approx(1e-3)
    assert took["all_gather", 0] == pytest.approx(2e-3)


def test_the_link_is_never_idle_where_communication_is_larger() -> None:
    found = simulated(8, "next_forward", 1e-3, CostModel(0.0, 8e-9))
    assert found.communication_s == pytest.approx(64e-3, rel=1e-3)
    # Idle while the first gradients are computed, and while the last layer is.
    assert found.step_s == pytest.approx(64e-3 + 2e-3, rel=1e-3)


def test_further_all_gathers_start_as_forward_waits_for_an_earlier_bucket() -> None:
    topology = fddp.Topology(host=2, local=2)
    reduce = make_schedule(plan_of([250_000] * 4), topology, algorithm="reduce_scatter")
    times = ComputeTimes(8e-3, [0.0, 2e-3, 4e-3, 6e-3], [4e-3, 3e-3, 2e-3, 1e-3])
    found = simulate_sharded(make_sharded_schedule(reduce), CostModel(0.0, 2e-9), times)
    begin_s, end_s = found.begins_s[1:]
    launch_ms = {
        span.bucket: (span.launch_s - begin_s) * 1e3
        for span in found.spans
        if span.lane == "local" and span.kind == "all_gather" and span.launch_s < end_s
    }
    # The first waits for all of its own; then 2 and 1, and later 0, are found ready.
    assert launch_ms == pytest.approx({3: 1.0, 2: 2.0, 1: 2.0, 0: 4.0})
    uses_ms = [(s.start_s - begin_s) * 1e3 for s in found.spans if s.kind == "forward"][-4:]
    assert uses_ms == pytest.approx([2.0, 4.0, 6.0, 8.0])


@given(schedules(), st.data())
def test_steps_are_as_long_as_compute_and_communication_at_least(
    schedule: ShardedSchedule, data: st.DataObject
) -> None:
    count = len(schedule.plan.leaves)
    times = st.lists(st.floats(0.0, 0.01), min_size=count, max_size=count)
    ready, uses, forward_s = data.draw(times), data.draw(times), data.draw(st.floats(0.0, 0.01))
    overlap = data.draw(st.sampled_from([1.0, 0.5]))
    link = CostModel(1e-4, 1e-6, overlap=overlap)
    found = simulate_sharded(schedule, link, ComputeTimes(forward_s, uses, ready), steps=4)
    least_s = max(found.compute_s, found.communication_s)
    assert found.step_s >= least_s - 1e-12
    busy_s = sum(
        op.end_s - op.start_s for op in found.spans if op.lane != COMPUTE and op.end_s > op.start_s
    )
    # Each second is compute, or waiting for a collective.
    assert found.begins_s[-1] <= 4 * found.compute_s + busy_s + 1e-9
    durations = [b - a for a, b in zip(found.begins_s[1:], found.begins_s[2:], strict=False)]
    assert durations == pytest.approx([found.step_s] * 3)
    assert found.ratio >= 1.0 - 1e-9 or least_s == 0.0


@given(schedules(), st.floats(0.0, 0.01))
def test_gathers_at_the_end_of_steps_never_help(schedule: ShardedSchedule, layer_s: float) -> None:
    count = len(schedule.plan.leaves)
    ready = [layer_s * (count - leaf) for leaf in range(count)]
    uses = [layer_s * leaf for leaf in range(count)]
    found = [
        simulate_sharded(
            make_sharded_schedule(schedule.reduce, gather),
            LINK,
            ComputeTimes(layer_s * count, uses, ready),
        )
        for gather in ("next_forward", "step_end")
    ]
    assert found[0].step_s <= found[1].step_s + 1e-9


@pytest.mark.parametrize("world_size", [2, 5])
def test_backward_is_that_of_the_simulator_of_one_step(world_size: int) -> None:
    reduce = make_schedule(plan_of([50_000] * 5), world_size, algorithm="reduce_scatter")
    ready = [0.005, 0.004, 0.003, 0.002, 0.001]
    alone = simulate(reduce, LINK, ready)
    found = simulate_sharded(
        make_sharded_schedule(reduce, "step_end"), LINK, ComputeTimes(0.0, [0.0] * 5, ready)
    )
    own = [s for s in found.spans if s.kind in ("reduce_scatter", "control")]
    theirs = [s for s in alone.spans if s.kind in ("reduce_scatter", "control")]
    for mine, other in zip(own, theirs, strict=False):
        assert mine.label == other.label
        assert mine[5:] == pytest.approx(other[5:])
