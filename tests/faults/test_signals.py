"""Generated signals to real processes: all ranks stop after the same step, with a checkpoint that
loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.signals import (
    PHASES,
    WAYS,
    Scenario,
    Seen,
    Sender,
    Signal,
    draw,
    problems,
    stopped,
)
from tests.support.ranks import RankPool

SEED, RANKS = 11, 3


def check(ranks: RankPool, scenarios: list[Scenario], folder: Path) -> int:
    """Run scenarios; the number of signals that came."""
    sender = Sender(str(folder / "sender"))
    try:
        found = ranks.run(RANKS, stopped, scenarios, sender.path, str(folder), timeout_s=900.0)
    finally:
        sender.close()
    logs = [*zip(*found, strict=True)]
    wrong = {
        scenario: against
        for scenario, seen in zip(scenarios, logs, strict=True)
        if (against := problems(scenario, seen))
    }
    assert not wrong
    return sum(each.got is not None for seen in logs for each in seen)


def test_a_few_generated_signals(ranks: RankPool, tmp_path: Path) -> None:
    check(ranks, draw(SEED, 12, RANKS), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_a_thousand_generated_signals(seed: int, ranks: RankPool, tmp_path: Path) -> None:
    assert check(ranks, draw(seed, 200, RANKS), tmp_path) >= 200


def test_they_are_drawn_alike_and_of_all_kinds() -> None:
    drawn = draw(SEED, 400, RANKS)
    assert drawn == draw(SEED, 400, RANKS)
    assert drawn != draw(SEED + 1, 400, RANKS)
    assert {each.way for each in drawn} == {*WAYS}
    assert {len(each.signals) for each in drawn} == {1, 2, 3}
    assert {signal.phase for each in drawn for signal in each.signals} == {*PHASES}
    assert {signal.after_s == 0.0 for each in drawn for signal in each.signals} == {True, False}


# The verdict

ASKED = Scenario("functional", (Signal(1, 2, "backward", 0.0),))


def logs(number: int, at: tuple[int, str] | None = (2, "backward"), **of_rank_1: Any) -> list[Seen]:
    """Logs of two ranks that took so many steps, of which the second got a signal."""
    first = Seen(None, number, 0.5, (number, 0.5))
    return [first, first._replace(got=at, **of_rank_1)]


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (logs(3), ""),
        (logs(4), ""),  # told by the next step
        (logs(2), "signals came at [None, (2, 'backward')], and ranks took 2 steps"),
        (logs(5), "and ranks took 5 steps"),
        (logs(3, (2, "saving")), "and ranks took 3 steps"),  # before it was said
        (logs(4, (2, "saving")), ""),
        (logs(4, steps=3, saved=(3, 0.5)), "ranks took [4, 3] steps"),
        (logs(4, digest=0.7, saved=(4, 0.7)), "parameters differ: [0.5, 0.7]"),
        (logs(4, saved=(3, 0.5)), "rank 1 loaded (3, 0.5) of step 4 with 0.5"),
        (logs(4, saved=(4, 0.7)), "rank 1 loaded (4, 0.7) of step 4 with 0.5"),
        (logs(4, None), "no rank got a signal"),
    ],
)
def test_the_verdict(seen: list[Seen], problem: str) -> None:
    found = problems(ASKED, seen)
    assert bool(found) == bool(problem)
    assert problem in "; ".join(found)


def test_a_deferred_report_may_take_one_more_step() -> None:
    assert problems(ASKED, logs(5))
    assert problems(ASKED._replace(way="next"), logs(5)) == []
