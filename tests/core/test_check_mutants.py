"""Schedules with one thing changed: the checker's verdict, against the oracle's.

A mutant that is accepted must do the same in the end: the oracle finds nothing wrong with it, and
`why_equal` says how it differs from what it was made of. One that is rejected must show a fault, or
break one of the rules that are stricter than need be (`STRICTER`).
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import pytest

from fddp.core.check import check_schedule
from fddp.core.schedule.op import Op
from fddp.core.schedule.schedule import Schedule
from tests.support.mutants import BASES, mutants
from tests.support.oracle import find_fault
from tests.support.schedules import problem_of

# Rules that leave no doubt about what runs, where the oracle may see nothing wrong.
STRICTER = {
    "a step that a rank does by itself has no group": r"a local operation must have no axes",
    "every bucket is packed, an empty one too": r"no operation packs it",
    "a collective names its group": r"a collective needs axes",
    "the control word has one form": r"its region must be Region\(buffer='control'",
    "what rides is waited for by its carrier alone": r"it depends on the control word, op \d+",
    "axes exist": r"'elsewhere'; the axes are",
    "formats hold the values, which the oracle has none of": r"the wire dtype \w+ can't hold its",
    "buffers go with conditions": r"its buffer and condition are",
    "padding is packed, too": r"the elements \d+:\d+ of the \w+ buffer are not packed",
    "what is stated of chunks is what holds": r"it expects the elements \d+:\d+ .*sharded",
    "what is joined was divided": r"it gathers chunks along",
    "a bucket has one kind of repair": r"its bucket is also reduced 'again' as a whole",
    "nothing is done twice": r"has already (pack|gather|unpack)ed the whole bucket",
    "chunks are of one kind": r"are results of different reductions",
    "bits depend on the topology alone": r"the schedule is deterministic",
    "chunks of several axes have one order": r"must be in topology order",
}


KILLED = "killed: a fault is shown"


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.nightly)])
def test_mutants_are_killed_or_equal(name: str, step: int) -> None:
    """Every seventh of them, and all by night."""
    original = BASES[name]
    check_schedule(original)
    assert find_fault(original) is None
    verdicts: Counter[str] = Counter()
    found = mutants(original)
    assert len(found) > 150
    for change, schedule in found[::step]:
        problem = problem_of(schedule)
        if problem is None:
            assert find_fault(schedule) is None, f"{change}\n{schedule}"
            reason = why_equal(original, schedule)
        elif find_fault(schedule, tries=0):
            reason = KILLED
        else:
            reason = next((why for why, text in STRICTER.items() if re.search(text, problem)), None)
            if reason is None and find_fault(schedule, tries=24):
                reason = KILLED
        assert reason, f"{change}: {problem}\n{schedule}"
        verdicts[reason] += 1
    print(name, verdicts)
    assert verdicts[KILLED] > 0.75 * verdicts.total()


def why_equal(original: Schedule, mutant: Schedule) -> str | None:
    """In what the two differ, if it is nothing that shows in the result."""
    if dataclasses.replace(mutant, scaling=original.scaling) == original:
        return "equal: division elsewhere"
    if dataclasses.replace(mutant, deterministic=original.deterministic) == original:
        return "equal: the association is not stated"
    if dataclasses.replace(mutant, wire_dtypes=original.wire_dtypes) == original:
        return "equal: a wider format"
    ours, theirs = (
        Counter(essence(schedule, op) for op in schedule.ops) for schedule in (original, mutant)
    )
    if ours == theirs:
        return "equal: other launch order, dependencies, padding or axes of one place"
    more = theirs - ours
    if (
        original.scaling == "average"
        and not ours - theirs
        and {op.kind for op in more} == {"all_reduce"}
    ):
        return "equal: the average of averages"
    return None


def essence(schedule: Schedule, op: Op) -> Op:
    """Return an operation without the parts that do not change the result."""
    sizes = dict(schedule.topology.axes)
    axes, shard = (
        tuple(axis for axis in axes if sizes[axis] > 1) for axes in (op.axes, op.region.shard)
    )
    region = op.region._replace(shard=shard)
    if op.kind != "control" and not shard and op.kind != "reduce_scatter":
        numel = schedule.plan.buckets[op.bucket].numel
        region = region._replace(stop=min(region.stop, numel))
    return op._replace(axes=axes, region=region, deps=())
