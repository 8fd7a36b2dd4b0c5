"""`make soak`: takes mixed steps for a long time, and says whether anything grew or came apart.

    python -m tests.faults.soak --minutes 30 --steps 20000 --ranks 3

Ends with status 1 where a resource of a rank has grown, or where time was up before a third of the
steps was taken. Replicas that differ, and errors, end it at once.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from fddp.cli.launch import launch
from tests.faults.soak.rank import RankResult, Soak, run_rank
from tests.faults.soak.resources import MIB, growths

if TYPE_CHECKING:
    from collections.abc import Sequence

SAMPLES = 150
_FEWEST = 1 / 3  # of the steps, below which a run says too little


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    soak = Soak(args.steps, args.minutes, args.seed, SAMPLES, shown=True)
    began_s = time.monotonic()
    results = launch(args.ranks, run_rank, soak)
    took_s = time.monotonic() - began_s
    problems = _problems(soak, results)
    print(_table(results), _summary(results, took_s), *problems, sep="\n")
    return 1 if problems else 0


def _problems(soak: Soak, results: Sequence[RankResult]) -> list[str]:
    problems = [
        f"rank {rank}: {growth.name} grew from {growth.middle:.0f} to {growth.last:.0f}, by more "
        f"than {growth.limit:.0f}"
        for rank, one in enumerate(results)
        for growth in growths(one.usages)
        if not growth.is_flat
    ]
    if results[0].turns < _FEWEST * soak.steps:
        problems.append(f"only {results[0].turns} of {soak.steps} turns in {soak.minutes} minutes")
    return problems


def _table(results: Sequence[RankResult]) -> str:
    lines = ["medians of the middle and the last third of the run"]
    for rank, one in enumerate(results):
        for growth in growths(one.usages):
            unit, form = (MIB, "12.2f") if growth.name.endswith("_bytes") else (1, "12.0f")
            numbers = (growth.middle, growth.last, growth.limit)
            shown = " ".join(f"{number / unit:{form}}" for number in numbers)
            name = growth.name.replace("_bytes", ", MiB")
            lines.append(f"{rank:4} {name:12} {shown} {'flat' if growth.is_flat else 'GREW'}")
    return "\n".join(lines)


def _summary(results: Sequence[RankResult], took_s: float) -> str:
    first = results[0]
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(first.kinds.items()))
    return (
        f"{first.turns} turns in {took_s / 60:.1f} minutes on {len(results)} ranks: {kinds}\n"
        f"replicas compared {first.compared} times, equal to the bit; digest {first.digest[:16]}"
    )


if __name__ == "__main__":
    sys.exit(main())
