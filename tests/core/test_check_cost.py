"""Cost of `check_schedule`: independent of the number of ranks."""

from __future__ import annotations

import sys
from typing import get_args

import pytest

from fddp.core import check
from fddp.core.check import check_schedule
from fddp.core.plan.plan import BucketPlan, LeafSpec
from fddp.core.schedule.builder import Algorithm, make_schedule
from fddp.core.schedule.piggyback import with_separate_word
from fddp.core.schedule.schedule import Schedule, Topology
from fddp.errors import ScheduleError
from tests.support.schedules import SMALL, flat, plan_of, with_op_of, without


def calls_of(schedule: Schedule) -> int:
    """Return the number of Python function calls of a proof."""
    check_schedule(schedule)  # properties of the schedule and plan are worked out once
    count = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        check_schedule(schedule)
    finally:
        sys.setprofile(before)
    return count


def wide_plan(buckets: int) -> BucketPlan:
    return plan_of(*(LeafSpec(f"p{i:04}", (1000,), "float32") for i in range(buckets)))


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
def test_the_number_of_ranks_costs_nothing(algorithm: Algorithm) -> None:
    plan = wide_plan(20)
    small, large = (
        with_separate_word(make_schedule(plan, topology, algorithm=algorithm))
        for topology in (Topology(host=2, local=4), Topology(host=12500, local=8))
    )
    # Which terms of a set are compared depends on hashes, which differ from process to process.
    assert calls_of(large) == pytest.approx(calls_of(small), rel=0.01)


def test_errors_cost_nothing_either() -> None:
    topology = Topology(host=2**20, local=2**10)
    schedule = with_op_of(flat(topology), "all_reduce", axes=("host",))
    with pytest.raises(ScheduleError, match=r"ranks 1, 2, 3, \.\.\. are missing"):
        check_schedule(schedule)


def test_cost_grows_with_the_number_of_buckets() -> None:
    few, many = (
        calls_of(make_schedule(wide_plan(n), SMALL, algorithm="hierarchical")) for n in (50, 200)
    )
    assert many < 4.2 * few


@pytest.mark.parametrize("batch", [1, 7, 10**6])
def test_buckets_may_be_judged_in_batches(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_BATCH", batch)
    schedule = make_schedule(wide_plan(5), SMALL, algorithm="hierarchical")
    check_schedule(schedule)
    last = max(i for i, op in enumerate(schedule.ops) if op.kind == "add")
    with pytest.raises(ScheduleError, match=r"^op \d+ \(unpack of bucket 4, leaf 'p0004'\)"):
        check_schedule(without(schedule, last))
