"""Generated faults on real processes, held against what is promised; `make chaos` runs many more.

What the ranks do is in `chaos/program.py`, what is promised in `chaos/verdict.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.faults.chaos.driver import Nursery, carry_out, undisturbed, ways
from tests.faults.chaos.faults import STAGES, TRANSPORTS, WAYS, Fault, draw, parse
from tests.faults.chaos.verdict import Error, Run, Seen, problems, promise

SEED = 7
SIDE_BY_SIDE = 4


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_twenty_generated_faults(nursery: Nursery, part: int) -> None:
    faults = draw(SEED, 20)[part::2]
    digests = undisturbed(nursery, faults, SIDE_BY_SIDE)
    found = {
        fault.text: problems(fault, run, digests.get(ways(fault), ""))
        for fault, run in carry_out(faults, nursery, SIDE_BY_SIDE)
    }
    assert len(found) == 10
    assert not any(found.values()), {
        text: judgement for text, judgement in found.items() if judgement
    }


# The generator


def test_faults_are_drawn_alike_and_of_all_kinds() -> None:
    faults = draw(SEED, 270)
    assert faults == draw(SEED, 270)
    assert faults != draw(SEED + 1, 270)
    assert {fault.kind for fault in faults[: len(STAGES) + 1]} == set(STAGES)
    assert {(fault.kind, fault.transport, fault.stage) for fault in faults} == {
        (kind, transport, stage)
        for kind, stages in STAGES.items()
        for transport in TRANSPORTS
        for stage in stages
    }
    assert {(fault.kind, fault.way) for fault in faults} == {
        (kind, way) for kind in STAGES for way in WAYS
    }
    assert {fault.way for fault in faults[:20]} == set(WAYS)
    assert all(parse(fault.text) == fault for fault in faults)
    assert all(0 <= fault.rank < fault.world_size for fault in faults)


# The judge, on runs that are made up

FAULT = Fault("kill", 1, "first bucket", 2, "shm", 3)
RIGHT = Error(
    kinds=("RankLostError", "FddpError"),
    text="bucket 0 (w.first .. w.last) of step 2 on rank 0 of 3: lost rank 1 (it has ended); start",
    ranks=(1,),
    bucket=0,
    paths=("w.first", "w.last"),
    step=2,
    at_step=2,
    at_s=103.0,
    before="state",
    after="state",
)
SURVIVOR = Seen(exitcode=40, errors=(RIGHT,), digest="state", left=())
LOST = Seen(exitcode=-9, fault_s=100.0)


def judged(*, rank: int = 0, hung: tuple[int, ...] = (), children: int = 0, **seen: object) -> str:
    """Problems found after one rank's observations are changed."""
    ranks = [SURVIVOR, LOST, replace(SURVIVOR, exitcode=42)]
    ranks[rank] = replace(ranks[rank], **seen)  # type: ignore[arg-type]
    return "; ".join(problems(FAULT, Run(tuple(ranks), hung, children), "other"))


def test_a_run_as_promised_has_no_problems() -> None:
    assert judged() == ""


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"kinds": ("SyncTimeoutError",)}, "SyncTimeoutError instead of"),
        ({"ranks": (2,)}, "ranks=(2,)"),
        ({"ranks": ()}, "ranks=()"),
        ({"step": 1}, "step=1 in step 2"),
        ({"paths": ()}, "does not name ()"),
        ({"paths": ("w.first", "w.other")}, "does not name ('w.first', 'w.other')"),
        ({"bucket": 1}, "does not name bucket 1"),
        ({"bucket": None}, "no bucket or paths"),
        ({"bucket": -1}, "neither bucket nor word"),
        ({"text": RIGHT.text.replace("lost rank 1", "lost")}, "does not name the rank"),
        ({"text": RIGHT.text.replace("step 2", "step 1")}, "does not name the step"),
        ({"after": "another"}, "state changed"),
        ({"at_s": 100.0 + FAULT.timeout_s + 5.1}, "came after 8.1 s"),
    ],
)
def test_a_wrong_error_is_a_problem(change: dict[str, object], problem: str) -> None:
    wrong = replace(RIGHT, **change)  # type: ignore[arg-type]
    assert problem in judged(errors=(wrong,))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"exitcode": -6}, "exit code -6 instead of 40"),
        ({"left": ("1 files of ['socket']",)}, "left behind: 1 files"),
        ({"left": None}, "did not get to its end"),
        ({"crash": "Traceback"}, "Traceback"),
        ({"errors": ()}, "no error"),
        ({"hung": (0,)}, "rank 0 hung"),
        ({"children": 1}, "1 processes were left behind"),
        ({"rank": 1, "fault_s": None}, "never struck"),
        ({"rank": 1, "exitcode": 41}, "outlived its end"),
    ],
)
def test_a_wrong_end_is_a_problem(change: dict[str, object], problem: str) -> None:
    assert problem in judged(**change)  # type: ignore[arg-type]


def test_a_run_that_survives_a_fault_must_end_as_without_it() -> None:
    fault = replace(FAULT, kind="short stop")
    went_on = [replace(SURVIVOR, exitcode=40 + rank, errors=()) for rank in range(3)]
    went_on[1] = replace(went_on[1], fault_s=100.0)
    assert problems(fault, Run(tuple(went_on)), "state") == []
    assert problems(fault, Run(tuple(went_on)), "other") != []
    failed = [replace(SURVIVOR, exitcode=40 + rank) for rank in range(3)]
    failed[1] = replace(failed[1], fault_s=100.0)
    assert problems(fault, Run(tuple(failed)), "state") != []


def test_a_wrapped_module_promises_less_outside_of_backward() -> None:
    for kind, by_module in ("error in loss", "lost"), ("error in data", "lost"):
        fault = replace(FAULT, kind=kind, stage=STAGES[kind][0])
        assert promise(fault) == "reported"
        assert promise(replace(fault, way="module")) == by_module
    for kind in "no bucket memory", "kill", "long stop", "short stop", "closed socket":
        assert promise(replace(FAULT, kind=kind, way="module")) == promise(
            replace(FAULT, kind=kind)
        )
