"""`check_schedule`: what it accepts is right, and what is right it accepts."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given

from fddp.core.check import check_schedule
from fddp.core.plan.plan import LeafSpec
from fddp.core.schedule.builder import make_schedule
from fddp.core.schedule.piggyback import with_separate_word
from fddp.core.schedule.schedule import Schedule, Topology
from fddp.errors import FddpError, ScheduleError
from tests.support.examples import examples
from tests.support.oracle import find_fault
from tests.support.schedules import (
    GRID,
    SMALL,
    built,
    chains,
    flat,
    plan_of,
    problem_of,
    right_chains,
    with_op,
    with_op_of,
    without,
)

# Against the oracle


@given(built())
def test_a_piggybacked_word_may_be_sent_apart(schedule: Schedule) -> None:
    own = with_separate_word(schedule)
    assert own.piggyback_op < 0
    assert with_separate_word(own) == own
    check_schedule(own)


@examples(60)
@given(built())
def test_built_schedules_pass_the_check(schedule: Schedule) -> None:
    check_schedule(schedule)
    assert find_fault(schedule, tries=1) is None
    assert Schedule.from_json(schedule.to_json()) == schedule


@given(right_chains())
def test_axes_may_be_taken_in_any_order(schedule: Schedule) -> None:
    check_schedule(schedule)
    assert find_fault(schedule, tries=0) is None


@examples(200)
@given(chains())
def test_random_chains_agree_with_the_oracle(schedule: Schedule) -> None:
    fault, problem = find_fault(schedule, tries=0), problem_of(schedule)
    assert (problem is None) is (fault is None), f"{problem}, {fault}\n{schedule}"


# Errors


def test_errors_have_a_location() -> None:
    schedule = with_op_of(flat(GRID), "all_reduce", axes=("local",))
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule)
    error = caught.value
    assert isinstance(error, FddpError)
    assert isinstance(error, ValueError)
    assert (error.op, error.bucket, error.paths) == (6, 0, ("w",))
    assert error.ranks == (0, 8, 16, 24)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.op, again.ranks) == (error.op, error.ranks)


def test_the_leaves_are_those_of_the_elements() -> None:
    leaves = [LeafSpec(name, (4,), "float32") for name in "abcd"]
    plan = plan_of(*leaves, cap_bytes=1000)
    # Two leaves in a piece.
    schedule = with_separate_word(make_schedule(plan, Topology(world=2), split_mb=2.0**-15))
    position = next(i for i, op in enumerate(schedule.ops) if op.region.start == 8)
    with pytest.raises(ScheduleError, match="leaves 'c' to 'd'") as caught:
        check_schedule(without(schedule, position))
    assert caught.value.paths == ("c", "d")


# By hand


def test_padding_is_in_proportion() -> None:
    schedule = flat()
    with pytest.raises(
        ScheduleError, match="0:1099511627776 exceed the 8 of its bucket by too much"
    ):
        check_schedule(with_op(schedule, 0, stop=2**40))
    with pytest.raises(ScheduleError, match="by too much"):
        check_schedule(with_op(schedule, 1, start=2**40, stop=2**40))


def test_buckets_may_be_ordered_through_each_other() -> None:
    plan = plan_of(LeafSpec("a", (8,), "float32"), LeafSpec("b", (16,), "float32"))
    schedule = make_schedule(plan, 2, piggyback=False)
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
    check_schedule(dataclasses.replace(schedule, ops=tuple(moved)))


def test_nothing_to_reduce() -> None:
    alone = make_schedule(plan_of(LeafSpec("steps", (2,), "int64")), SMALL)
    assert [op.kind for op in alone.ops] == ["control"]
    check_schedule(alone)
    empty = make_schedule(plan_of(LeafSpec("none", (0,), "float32")), SMALL)
    check_schedule(empty)
    for position, text in (0, "no operation packs it"), (-1, "no operation unpacks it"):
        with pytest.raises(ScheduleError, match=text):
            check_schedule(without(empty, range(len(empty.ops))[position]))
