"""Script of a run, turn by turn: pure functions of the seed, the turn and the rank."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

WEIGHTS = (0.0, 1.0, 2.5, 7.0)
LONGEST_INPUT = 3

SHARES: Mapping[str, float] = MappingProxyType(
    {
        "differentiate": 30,
        "sync": 14,
        "reduce_in_place": 7,
        "compress": 12,
        "wrapped": 12,
        "uneven": 6,
        "shards": 6,
        "operators": 4,
        "broadcast": 2,
        "fail": 3,
        "replan": 3,
        "change_hook": 2,
        "reopen": 2,
        "tune": 0.1,
    }
)
"""How often each kind of turn is drawn, out of their sum."""


@dataclass(frozen=True)
class Turn:
    """One turn as all ranks draw it.

    Attributes:
        number: from 0.
        kind: one of `SHARES`.
        weights: of each rank; not all are 0.
        lengths: of each rank's input in a loop of uneven inputs.
        culprit: the rank that fails, where one is to.
        choice: a number for everything else.
    """

    number: int
    kind: str
    weights: tuple[float, ...]
    lengths: tuple[int, ...]
    culprit: int
    choice: int


def draw(seed: int, number: int, ranks: int) -> Turn:
    """The turn of that number, the same on every rank.

    >>> draw(1, 5, 2) == draw(1, 5, 2), any(draw(1, 5, 2).weights)
    (True, True)
    """
    chance = random.Random(f"{seed}/{number}")
    weights = [chance.choice(WEIGHTS) for _ in range(ranks)]
    weights[chance.randrange(ranks)] = chance.choice(WEIGHTS[1:])
    return Turn(
        number=number,
        kind=chance.choices(list(SHARES), list(SHARES.values()))[0],
        weights=tuple(weights),
        lengths=tuple(chance.randint(0, LONGEST_INPUT) for _ in range(ranks)),
        culprit=chance.randrange(ranks),
        choice=chance.getrandbits(32),
    )


def own_chance(seed: int, number: int, rank: int) -> random.Random:
    """Random numbers of this rank in a turn: the leaves that it uses, and their order."""
    return random.Random(f"{seed}/{number}/{rank}")


def options(choice: int) -> dict[str, Any]:
    """Arguments of a `GradSync`, out of those that a run goes through."""
    chance = random.Random(choice)
    deterministic = chance.random() < 0.25
    return {
        "transport": chance.choice(["auto", "c10d"]),
        "bucket_cap_mb": chance.choice([0.001, 0.01, 0.3, 25.0]),
        "first_bucket_mb": chance.choice([0.0005, 0.1]),
        "deterministic": deterministic,
    }
