"""The loop of a rank."""

from __future__ import annotations

import hashlib
import time
import warnings
from typing import NamedTuple

import torch
import torch.distributed as dist

from fddp.cli.progress import Stages
from tests.faults.soak.resources import Usage, usage
from tests.faults.soak.script import draw
from tests.faults.soak.work import Rig


class Soak(NamedTuple):
    """Parameters of a run.

    Attributes:
        steps: the most turns to take.
        minutes: after how long to stop.
        seed: of all that is drawn.
        samples: how often resources are read and replicas compared.
        shown: whether rank 0 shows progress.
    """

    steps: int
    minutes: float
    seed: int
    samples: int
    shown: bool


class RankResult(NamedTuple):
    """Results of a rank.

    Attributes:
        turns: how many it took.
        usages: its resources, from the first turns to the last.
        compared: how often replicas were compared.
        digest: of its replicas in the end, in hexadecimal digits.
        kinds: how often each kind of turn was taken.
    """

    turns: int
    usages: list[Usage]
    compared: int
    digest: str
    kinds: dict[str, int]


class ReplicasDifferError(AssertionError):
    """Replicas came apart."""


def run_rank(soak: Soak) -> RankResult:
    """Takes turns until there are enough or time is up; a collective call.

    Raises:
        ReplicasDifferError: replicas are not equal to the bit.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    deadline_s = time.monotonic() + 60.0 * soak.minutes
    rig = Rig(soak.seed, rank, ranks)
    every = max(1, soak.steps // soak.samples)
    usages: list[Usage] = []
    kinds: dict[str, int] = {}
    turns, compared = 0, 0
    with Stages(shown=soak.shown and rank == 0) as stages, warnings.catch_warnings():
        # Of wrappers in whose first steps every layer is drawn.
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        stages.begin(f"soak, seed {soak.seed}, {ranks} ranks", soak.steps)
        for number in range(soak.steps):
            turn = draw(soak.seed, number, ranks)
            rig.take(turn)
            kinds[turn.kind] = kinds.get(turn.kind, 0) + 1
            turns = number + 1
            stages.advance()
            if turns % every == 0:
                is_over = _compare(rig, number, time.monotonic() > deadline_s)
                compared += 1
                rig.settle()
                usages.append(usage())
                if len(usages) % 10 == 0:
                    stages.note(f"{turns} turns, RSS {usages[-1].rss_bytes / 2**20:.0f} MiB")
                if is_over:
                    break
    _compare(rig, turns, False)
    digest = rig.digest().hex()
    rig.close()
    return RankResult(turns, usages, compared + 1, digest, kinds)


def _compare(rig: Rig, number: int, is_late: bool) -> bool:
    """Holds the replicas against each other; whether rank 0 says that time is up."""
    state = hashlib.sha256(rig.digest()).digest() + bytes([is_late])
    own = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    differ = [
        r for r, other in enumerate(everyone) if not torch.equal(other[:-1], everyone[0][:-1])
    ]
    if differ:
        raise ReplicasDifferError(
            f"after turn {number} the replicas of ranks {differ} differ from rank 0's"
        )
    return bool(everyone[0][-1])
