"""Proofs by forms: the verdict of executing each bucket, without executing each bucket."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fddp.core.check import check_schedule, forms
from fddp.core.check.execution import check_by_execution
from fddp.core.check.forms import is_proved_by_forms
from fddp.core.plan.plan import LeafSpec, plan_leaves, rebucket
from fddp.core.schedule.builder import make_schedule
from fddp.core.schedule.op import Op, Region, are_ops, op_problem
from fddp.core.schedule.schedule import Schedule, Topology
from fddp.errors import ScheduleError
from tests.support.examples import examples
from tests.support.schedules import built, chains, problem_of, without

# Of sizes that can be cut into eight equal chunks: padding would add forms.
LEAVES = [LeafSpec(f"p{i:03}", (8 * (1 + i % 7),), "float32") for i in range(60)]
PLAN = plan_leaves(LEAVES, order=range(60), caps_bytes=[32, 512])
REBUILT = rebucket(PLAN, sorted(PLAN.order, key=lambda leaf: 3 * leaf % 61))
TOPOLOGY = Topology(host=2, local=4)


def problem_by_execution(schedule: Schedule) -> str | None:
    try:
        check_by_execution(schedule)
    except ScheduleError as error:
        return str(error)
    return None


@st.composite
def changed(draw: st.DrawFn) -> Schedule:
    """A schedule with an operation left out, moved or changed in a bound or dependency."""
    schedule: Schedule = draw(built())
    ops, position = list(schedule.ops), draw(st.integers(0, len(schedule.ops) - 1))
    op = ops[position]
    bound = st.integers(-1, 2 * op.region.stop + 2)
    change = draw(st.sampled_from(("nothing", "drop", "move", "bounds", "deps", "bucket")))
    if change == "drop":
        return without(schedule, position)
    if change == "move":
        ops.insert(draw(st.integers(0, len(ops) - 1)), ops.pop(position))
    elif change == "bounds":
        ops[position] = op._replace(region=op.region._replace(start=draw(bound), stop=draw(bound)))
    elif change == "deps":
        deps = draw(st.lists(st.integers(-1, len(ops)), max_size=2))
        ops[position] = op._replace(deps=(*op.deps[1:], *deps))
    elif change == "bucket":
        ops[position] = op._replace(bucket=draw(st.integers(-1, len(schedule.plan.buckets))))
    return dataclasses.replace(schedule, ops=tuple(ops))


@examples(100)
@given(st.one_of(changed(), chains()))
def test_the_verdict_is_that_of_execution(schedule: Schedule) -> None:
    assert problem_of(schedule) == problem_by_execution(schedule)


def test_buckets_of_one_form_are_executed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    executed = executions(monkeypatch)
    check_schedule(make_schedule(PLAN, TOPOLOGY, algorithm="hierarchical"))
    assert len(PLAN.buckets) > 10
    assert len(executed) <= 4


def executions(monkeypatch: pytest.MonkeyPatch) -> list[Schedule]:
    """Record the schedules that are executed from now on, without those known so far."""
    executed: list[Schedule] = []

    def recorded(schedule: Schedule) -> None:
        executed.append(schedule)
        check_by_execution(schedule)

    forms._is_correct.cache_clear()
    monkeypatch.setattr(forms, "check_by_execution", recorded)
    monkeypatch.setattr("fddp.core.check.check_by_execution", recorded)
    return executed


@pytest.mark.parametrize("algorithm", ["all_reduce", "hierarchical", "reduce_scatter"])
def test_a_rebuilt_schedule_is_not_executed_again(
    algorithm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed = executions(monkeypatch)
    check_schedule(make_schedule(PLAN, TOPOLOGY, algorithm=algorithm))
    executed.clear()
    assert len(REBUILT.buckets) != len(PLAN.buckets)
    check_schedule(make_schedule(REBUILT, TOPOLOGY, algorithm=algorithm))
    assert executed == []


def test_order_through_another_bucket_is_found_by_execution() -> None:
    plan = plan_leaves(LEAVES[:2], order=(0, 1), caps_bytes=[4])
    schedule = make_schedule(plan, 2, ride=False)
    sums = [i for i, op in enumerate(schedule.ops) if op.kind == "all_reduce"][:2]
    pack = schedule.ops[sums[0]].deps[0]
    # The second pack follows the first, and the first sum only the second pack.
    other = schedule.ops[sums[1]].deps[0]
    ops = list(schedule.ops)
    ops[other] = ops[other]._replace(deps=(pack,))
    order = [pack, other, *(i for i in range(len(ops)) if i not in (pack, other))]
    place = {old: new for new, old in enumerate(order)}
    ops[sums[0]] = ops[sums[0]]._replace(deps=(other,))
    moved = [
        ops[old]._replace(deps=tuple(sorted(place[dep] for dep in ops[old].deps))) for old in order
    ]
    through = dataclasses.replace(schedule, ops=tuple(moved))
    assert not is_proved_by_forms(through)
    check_schedule(through)


fields = st.sampled_from(
    ["pack", "always", "bucket", "", None, [], 1, -2, 2**63, True, (), ("a",), (1,)]
)


@given(
    st.lists(
        st.builds(
            Op,
            st.sampled_from(["pack", "add"]) | fields,
            st.integers(-1, 3) | fields,
            st.just(("a",)) | fields,
            st.builds(
                Region,
                st.just("bucket") | fields,
                st.integers(-1, 3) | fields,
                st.integers(-1, 3) | fields,
                st.just(()) | fields,
            )
            | fields,
            st.just((0, 1)) | fields,
            st.just("always") | fields,
        )
        | fields,
        max_size=3,
    )
)
def test_operations_are_judged_together_as_one_by_one(ops: list[Any]) -> None:
    assert are_ops(ops) == all(op_problem(op) is None for op in ops)


@given(built())
def test_operations_of_schedules_have_no_problem(schedule: Schedule) -> None:
    assert are_ops(schedule.ops)
