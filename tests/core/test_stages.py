"""Stages of communication hooks in schedules: their order, and wrong ones that are refused."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fddp
from fddp.core.check import check_schedule
from fddp.core.plan.plan import LeafSpec
from fddp.core.schedule.builder import make_schedule
from fddp.core.schedule.op import Op, Region
from fddp.core.schedule.schedule import Schedule, Topology
from fddp.core.schedule.stages import count_stages, with_stages
from fddp.core.sim.cost import CostModel
from fddp.core.sim.simulator import simulate
from fddp.errors import ScheduleError
from tests.support.schedules import plan_of

LEAVES = [LeafSpec(name, (6,), "float32") for name in "abcd"]
GRID = Topology(host=2, local=3)


def reductions(schedule: Schedule) -> dict[int, int]:
    """The all-reduce of each bucket."""
    return {
        op.bucket: position
        for position, op in enumerate(schedule.ops)
        if op.kind == "all_reduce" and op.when == "always"
    }


def base(topology: Topology | int = 2, count: int = 3, **options: Any) -> Schedule:
    return make_schedule(plan_of(*LEAVES[:count]), topology, piggyback=False, **options)


def staged(stages: int = 3, **options: Any) -> Schedule:
    schedule = base(**options)
    return with_stages(schedule, reductions(schedule), stages)


def launched(schedule: Schedule) -> list[tuple[int, int]]:
    """Bucket and number of each stage, the reduction included, in launch order."""
    counts: dict[int, int] = defaultdict(int)
    found = []
    for op in schedule.ops:
        if op.kind in ("stage", "all_reduce") and op.when == "always":
            found.append((op.bucket, counts[op.bucket]))
            counts[op.bucket] += 1
    return found


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_stages_of_buckets_are_interleaved(stages: int) -> None:
    due: list[tuple[int, int]] = []
    for bucket in range(4):
        due += [(bucket, 0), *((bucket - n, n) for n in range(1, stages) if bucket >= n)]
    for done in range(stages):  # rounds of what remains
        due += [(b, 4 - b + done) for b in range(4) if 4 - b + done < stages]
    assert launched(staged(stages, count=4)) == due


@given(
    st.integers(1, 5),
    st.sampled_from([Topology(world=3), GRID, Topology(world=1)]),
    st.integers(1, 4),
    st.sampled_from(["all_reduce", "hierarchical"]),
    st.booleans(),
)
def test_stages_are_proved(
    stages: int, topology: Topology, count: int, algorithm: Any, in_turn: bool
) -> None:
    if len(topology.axes) == 1:
        algorithm = "all_reduce"
    schedule = base(topology, count, algorithm=algorithm)
    found = with_stages(schedule, reductions(schedule), stages, in_turn=in_turn)
    check_schedule(found)
    assert count_stages(found) == (stages if stages > 1 else 0)
    assert Schedule.from_json(found.to_json()) == found
    # Nothing but the order of operations has changed.
    kinds = [sorted((op.kind, op.bucket, op.axes, op.region, op.when) for op in s.ops
                    if op.kind != "stage") for s in (schedule, found)]  # fmt: skip
    assert kinds[0] == kinds[1]
    assert len(found.ops) == len(schedule.ops) + (stages - 1) * count
    firsts = [
        op.bucket
        for op, before in zip(found.ops[1:], found.ops, strict=False)
        if before.kind == "pack" and before.when == "always" and op.bucket == before.bucket
    ]
    assert firsts == sorted(firsts)


def test_reductions_in_turn() -> None:
    schedule = with_stages(base(), reductions(base()), 1, in_turn=True)
    first, second, third = reductions(schedule).values()
    assert first in schedule.ops[second].deps
    assert second in schedule.ops[third].deps


def test_no_simulation_of_stages() -> None:
    with pytest.raises(ValueError, match="simulate the schedule without the hook"):
        simulate(staged(), CostModel(1e-6, 1e9), [0.0] * 3)


# Wrong schedules. Operations of `staged()`, by kind and bucket: stages 0 and 1, and the reduction.


def of(schedule: Schedule, bucket: int) -> list[int]:
    kinds = ("stage", "all_reduce")
    return [
        i
        for i, op in enumerate(schedule.ops)
        if op.bucket == bucket and op.kind in kinds and op.when == "always"
    ]


def changed(bucket: int, stage: int, /, **fields: Any) -> Schedule:
    schedule = staged()
    position = of(schedule, bucket)[stage]
    ops = list(schedule.ops)
    ops[position] = ops[position]._replace(**fields)
    return replace(schedule, ops=tuple(ops))


def rebuilt(schedule: Schedule, order: list[tuple[int, Op]]) -> Schedule:
    """A schedule of operations with their former positions, which dependencies name."""
    new = {old: position for position, (old, _) in enumerate(order) if old >= 0}
    ops = tuple(op._replace(deps=tuple(new[dep] for dep in op.deps)) for _, op in order)
    return replace(schedule, ops=ops)


def without(bucket: int, stage: int) -> Schedule:
    """The stage left out; who depends on it depends on what it depends on."""
    schedule = staged()
    position = of(schedule, bucket)[stage]
    gone = schedule.ops[position].deps
    order = [
        (i, op._replace(deps=tuple(e for d in op.deps for e in (gone if d == position else (d,)))))
        for i, op in enumerate(schedule.ops)
        if i != position
    ]
    return rebuilt(schedule, order)


def doubled(bucket: int, stage: int, *, chained: bool) -> Schedule:
    """The stage twice; the second waits for the first if `chained`, and is waited for."""
    schedule = staged()
    position = of(schedule, bucket)[stage]
    ops = list(schedule.ops)
    again = ops[position]._replace(deps=(position,)) if chained else ops[position]
    order = list(enumerate(ops))
    order.insert(position + 1, (-1, again))
    found = rebuilt(schedule, order)
    if not chained:
        return found
    follower = of(schedule, bucket)[stage + 1] + 1
    new = list(found.ops)
    new[follower] = new[follower]._replace(deps=(position + 1,))
    return replace(found, ops=tuple(new))


def swapped(bucket: int, one: int, other: int) -> Schedule:
    """Two stages that have changed their places, and what they do at each with them."""
    schedule = staged()
    positions = of(schedule, bucket)
    order = list(enumerate(schedule.ops))
    i, j = positions[one], positions[other]
    order[i], order[j] = order[j], order[i]
    new = {old: position for position, (old, _) in enumerate(order)}
    ops = tuple(op._replace(deps=tuple(new[dep] for dep in op.deps)) for _, op in order)
    return replace(schedule, ops=ops)


def independent(bucket: int, stage: int) -> Schedule:
    """A stage that depends on the packing alone."""
    schedule = staged()
    packed = next(i for i, op in enumerate(schedule.ops) if op[:2] == ("pack", bucket))
    return changed(bucket, stage, deps=(packed,))


def after_the_end() -> Schedule:
    """A stage behind the reduction."""
    schedule = staged()
    last = of(schedule, 2)[-1]
    order = list(enumerate(schedule.ops))
    order.insert(last + 1, (-1, schedule.ops[last]._replace(kind="stage", deps=(last,))))
    found = rebuilt(schedule, order)
    ops = [
        op._replace(deps=(*op.deps, last + 1)) if i > last + 1 and op.bucket == 2 else op
        for i, op in enumerate(found.ops)
    ]
    return replace(found, ops=tuple(ops))


def in_deterministic() -> Schedule:
    schedule = make_schedule(plan_of(LEAVES[0]), Topology(world=2), deterministic=True)
    return with_stages(schedule, {0: 1}, 2)


def sparse() -> Schedule:
    leaves = (LeafSpec("a", (6,), "float32"), LeafSpec("s", (6,), "float32", sparse=True))
    schedule = make_schedule(plan_of(*leaves), Topology(world=2))
    gather = next(i for i, op in enumerate(schedule.ops) if op.kind == "gather")
    return with_stages(schedule, {1: gather}, 2)


WHOLE = Region("bucket", 0, 6)
WRONG: dict[str, tuple[Callable[[], Schedule], str]] = {
    "first stage missing": (lambda: without(1, 0), "has 1; a hook has as many in each bucket"),
    "stage of the first bucket missing": (lambda: without(0, 0), r"leaf 'a', has 1; a hook"),
    "reduction missing": (lambda: changed(1, 2, kind="stage"), "of rank 1 are missing"),
    "doubled": (lambda: doubled(1, 0, chained=True), "one of 3 stages of its bucket"),
    "doubled at once": (lambda: doubled(1, 0, chained=False), "make it depend on op"),
    "reduction doubled": (lambda: doubled(1, 2, chained=False), "make it depend on op"),
    "first and second in the wrong order": (lambda: swapped(0, 0, 1), "which is launched later"),
    "second and reduction in the wrong order": (lambda: swapped(1, 1, 2), "launched later"),
    "second does not wait": (lambda: independent(1, 1), "may still be using the elements 0:6"),
    "reduction does not wait": (lambda: independent(0, 2), "may still be using the elements"),
    "first does not wait for the packing": (lambda: changed(1, 0, deps=()), "may still be using"),
    "on another bucket": (lambda: changed(1, 0, bucket=0), r"may still be using the elements"),
    "on no bucket": (lambda: changed(0, 0, bucket=7), "bucket must be an index"),
    "reduction on another bucket": (lambda: changed(1, 2, bucket=2), "of rank 1 are missing"),
    "behind the reduction": (after_the_end, "no reduction of its elements follows it"),
    "other elements": (
        lambda: changed(1, 1, region=Region("bucket", 0, 4)),
        "continues it on other elements or along other axes",
    ),
    "before anything is packed": (
        lambda: changed(1, 0, region=Region("repair", 0, 6)),
        r"its buffer and condition are \('repair', 'always'\)",
    ),
    "only when late": (lambda: changed(1, 0, when="late"), r"are \('bucket', 'late'\)"),
    "only again": (lambda: changed(1, 1, when="again"), r"are \('bucket', 'again'\)"),
    "without axes": (lambda: changed(1, 0, axes=()), "a collective needs axes"),
    "deterministic": (in_deterministic, "does not fix the order of its sums"),
    "sparse": (sparse, "its bucket is sparse"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_stages_are_refused(name: str) -> None:
    make, text = WRONG[name]
    with pytest.raises(ScheduleError, match=text) as caught:
        check_schedule(make())
    assert re.search(r"bucket \d", str(caught.value))


@pytest.mark.parametrize("deterministic", [False, True])
def test_all_reduces_are_not_deterministic(deterministic: bool) -> None:
    schedule = replace(base(), deterministic=deterministic)
    if not deterministic:
        check_schedule(schedule)
        return
    with pytest.raises(ScheduleError, match="its order of summation depends on the transport"):
        check_schedule(schedule)


def test_stages_along_other_axes_are_refused() -> None:
    schedule = staged(topology=GRID)
    position = of(schedule, 1)[0]
    ops = list(schedule.ops)
    ops[position] = ops[position]._replace(axes=("host",))
    with pytest.raises(ScheduleError, match="or along other axes"):
        check_schedule(replace(schedule, ops=tuple(ops)))


# In a GradSync


def test_a_schedule_keeps_the_stages_of_its_hook() -> None:
    import torch

    grads = {"a": torch.ones(8, 8), "b": torch.ones(8)}
    hook = fddp.hooks.power_sgd(1)

    def run(group: Any) -> Any:
        with fddp.GradSync(grads, group=group, hook=hook) as sync:
            schedule = sync.schedule
            mean, _ = sync.update(grads, sync.init_state())
        with fddp.GradSync(schedule, group=group, hook=hook) as sync:
            assert sync.schedule == schedule
            for other in (fddp.hooks.fp16_compress, None):
                with pytest.raises(ValueError, match="pass the"):
                    sync._engine.set_hook(other)
                assert sync._engine.hook is hook
            again, _ = sync.update(grads, sync.init_state())
        assert torch.equal(mean["a"], again["a"])
        with pytest.raises(ValueError, match="and there is no hook; pass the hook"):
            fddp.GradSync(schedule, group=group)
        with pytest.raises(ValueError, match="in 2 stages, and fp16_compress has 1; pass the"):
            fddp.GradSync(schedule, group=group, hook=fddp.hooks.fp16_compress)
        return count_stages(schedule)

    assert fddp.loopback(2, run) == [2, 2]
