"""Scenarios: which ranks are killed or leave, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

STEPS = 8
PLACES = ("shm", "c10d", "two hosts")
WAYS = ("functional", "module", "virtual")
_LATEST_S = 0.03


class Loss(NamedTuple):
    """One rank's end.

    Attributes:
        rank: the rank.
        step: number of the step that is its last to begin, or that it takes last if it leaves.
        after_s: seconds from the start of this step to SIGKILL; negative if the rank leaves.
    """

    rank: int
    step: int
    after_s: float


@dataclass(frozen=True)
class Scenario:
    """One run of a job that loses ranks; at least one is left.

    Attributes:
        place: "shm", "c10d" (gloo on one host) or "two hosts" (gloo between namespaces, and what
            the ranks of each share).
        way: "functional" for `GradSync`, "module" for a wrapped module, "virtual" for `GradSync`
            with virtual ranks, whose bits do not depend on the losses.
    """

    place: str
    way: str
    world_size: int
    losses: tuple[Loss, ...]


def draw(seed: int, number: int) -> list[Scenario]:
    """Scenarios of all places and ways in turn, with one to three losses each."""
    source = random.Random(seed)
    found = []
    for index in range(number):
        world_size = source.choice((3, 4))
        ranks = source.sample(range(world_size), source.choice((1, 1, 2, world_size - 1)))
        losses = tuple(
            Loss(
                rank,
                source.randrange(STEPS),
                -1.0 if source.random() < 0.25 else round(source.uniform(0.0, _LATEST_S), 4),
            )
            for rank in ranks
        )
        place = PLACES[index % len(PLACES)]
        found.append(Scenario(place, WAYS[index // len(PLACES) % len(WAYS)], world_size, losses))
    return found
