"""Generated kills and leaves on real processes: no step is lost or counted twice, and all that are
left have one history. `python -m tests.faults.recovery` runs many more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.recovery.__main__ import judged
from tests.faults.recovery.scenario import PLACES, WAYS, Loss, Scenario, draw
from tests.faults.recovery.verdict import Run, problems
from tests.support.hosts import Hosts

SEED = 7


def sample(place: str, number: int) -> list[Scenario]:
    return [each for each in draw(SEED, 40 * number) if each.place == place][:number]


@pytest.mark.parametrize("place", ["shm", "c10d"])
def test_six_generated_losses(place: str, tmp_path: Path) -> None:
    found = dict(zip(sample(place, 3), judged(sample(place, 3), str(tmp_path)), strict=True))
    assert not any(found.values()), found


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["shm", "c10d"])
def test_sixty_generated_losses(place: str, tmp_path: Path) -> None:
    found = dict(zip(sample(place, 30), judged(sample(place, 30), str(tmp_path)), strict=True))
    assert not any(found.values()), found


@pytest.mark.nightly
def test_thirty_generated_losses_between_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """`hosts` skips where none can be made."""
    drawn = sample("two hosts", 30)
    found = dict(zip(drawn, judged(drawn, str(tmp_path)), strict=True))
    assert not any(found.values()), found


def test_they_are_drawn_alike_and_of_all_kinds() -> None:
    drawn = draw(SEED, 200)
    assert drawn == draw(SEED, 200)
    assert drawn != draw(SEED + 1, 200)
    assert {(each.place, each.way) for each in drawn} == {(p, w) for p in PLACES for w in WAYS}
    assert all(0 < len(each.losses) < each.world_size for each in drawn)
    assert {loss.after_s < 0.0 for each in drawn for loss in each.losses} == {True, False}


# The verdict


KILLED = Scenario("shm", "functional", 3, (Loss(1, 2, 0.01),))


def log(*numbers: int, rebuilt: int = -1, last: str = "end", **marks: str) -> list[dict[str, Any]]:
    """A log of steps with these numbers, and a rebuild at one of them."""
    entries: list[dict[str, Any]] = []
    for number in numbers:
        if number == rebuilt:
            entries.append({"what": "rebuilt", "number": number, "digest": f"d{number}", "size": 2})
            continue
        bits = marks.get(f"at{number}", f"d{number}")
        entries.append({"what": "step", "number": number, "digest": bits, "size": 2})
    return [*entries, {"what": last, "number": numbers[-1]}]


def run(first: list[dict[str, Any]], *exitcodes: int | None) -> Run:
    lost = log(1, 2)[:-1]
    return Run([first, lost, log(*range(1, 9))], exitcodes or (0, -9, 0))


GOOD = log(1, 2, 3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (run(GOOD), ""),
        (run(log(1, 2, 4, 5, 6, 7, 8, rebuilt=4)), ""),  # took the newest state
        (run(log(1, 2, 4, 5, 6, 7, 8)), "rank 0 went from step 2 to 4"),
        (run(log(1, 2, 2, 3, 4, 5, 6, 7, 8)), "rank 0 went from step 2 to 2"),
        (run([*GOOD[:4], *log(3, rebuilt=3)[:1], *GOOD[4:]]), "rank 0 fell back from step 4 to 3"),
        (run(log(*range(1, 9), at5="other")), "states of step 5 differ between ranks [0, 2]"),
        (run(log(1, 2, 3)), "rank 0 ended at step 3 of 8"),
        (run(GOOD, None, -9, 0), "rank 0 hung after 'end' at step 8"),
        (run(GOOD, 1, -9, 0), "rank 0 ended by 1 after 'end' at step 8"),
        (run(log(*range(1, 9), last="left")), "rank 0 ended by 0 after 'left' at step 8"),
        (run([*GOOD[:3], {"what": "took", "seconds": 99.0}, *GOOD[3:]]), "rank 0 rebuilt for 99.0"),
        (run([*GOOD, {"what": "crash", "text": "ValueError"}]), "rank 0 raised: ValueError"),
    ],
)
def test_the_verdict(seen: Run, problem: str) -> None:
    found = problems(KILLED, seen, {})
    assert bool(found) == bool(problem)
    assert problem in "; ".join(found)


def test_bits_are_compared_with_those_of_a_run_without_losses() -> None:
    expected = {number: f"d{number}" for number in range(1, 9)}
    assert problems(KILLED, run(GOOD), expected) == []
    found = problems(KILLED, run(GOOD), {**expected, 4: "other"})
    assert found == ["step 4 has other bits than without losses"]


def test_a_step_has_the_same_ranks_on_all() -> None:
    fewer = [{**entry, "size": 1} if entry["number"] == 6 else entry for entry in GOOD]
    assert problems(KILLED, run(fewer), {}) == ["step 6 was taken by [1, 2] ranks"]


def test_a_step_that_killed_ranks_alone_have_finished_is_taken_again() -> None:
    ahead, again = log(1, 2, 3, at3="other")[:-1], log(*range(1, 9), rebuilt=2)
    found = problems(KILLED, run(GOOD)._replace(logs=[again, ahead, again]), {})
    assert found == []
    found = problems(KILLED, run(GOOD)._replace(logs=[GOOD, ahead, GOOD]), {})
    assert found == ["states of step 3 differ between ranks [0, 1]"]
