"""`python -m tests.faults.recovery`: many generated losses, and a table of them."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tests.faults.recovery.crew import Crew, run
from tests.faults.recovery.scenario import PLACES, Scenario, draw
from tests.faults.recovery.verdict import Run, problems
from tests.support.hosts import ADDRESSES, entering, namespaces


@contextlib.contextmanager
def crews(place: str) -> Iterator[list[Crew]]:
    """The crews of the hosts of a place."""
    with contextlib.ExitStack() as stack:
        if place == "two hosts":
            keepers = stack.enter_context(namespaces())
            made = [Crew(entering(k), a) for k, a in zip(keepers, ADDRESSES, strict=True)]
        else:
            made = [Crew()]
        for crew in made:
            stack.callback(crew.close)
        yield made


def judged(scenarios: list[Scenario], folder: str, *, side_by_side: int = 1) -> list[list[str]]:
    """Run scenarios of one place, and return the problems of each."""
    place = scenarios[0].place

    def part(number: int) -> list[tuple[int, list[str]]]:
        bits: dict[int, dict[int, str]] = {}
        found = []
        with crews(place) as own:
            for index in range(number, len(scenarios), side_by_side):
                scenario = scenarios[index]
                if scenario.way == "virtual" and not bits:
                    calm = Scenario(place, "virtual", 3, ())
                    bits[0] = history(run(own, calm, f"{folder}/{place}-{number}"))
                seen = run(own, scenario, f"{folder}/{place}-{index}-of-{number}")
                expected = bits[0] if scenario.way == "virtual" else {}
                found.append((index, problems(scenario, seen, expected)))
        return found

    with ThreadPoolExecutor(side_by_side) as pool:
        parts = pool.map(part, range(side_by_side))
        return [found for _, found in sorted(entry for part in parts for entry in part)]


def history(calm: Run) -> dict[int, str]:
    """Digests of a run without losses, by number of steps."""
    return {entry["number"]: entry["digest"] for entry in calm.logs[0] if entry["what"] == "step"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.recovery", description=__doc__)
    parser.add_argument("--runs", type=int, default=300, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="of the generator (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side (%(default)s)")
    args = parser.parse_args()
    drawn, begin_s = draw(args.seed, args.runs), time.monotonic()
    broken: Counter[tuple[str, str]] = Counter()
    total: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for place in PLACES:
            scenarios = [scenario for scenario in drawn if scenario.place == place]
            jobs = 1 if place == "two hosts" else args.jobs
            found = judged(scenarios, folder, side_by_side=jobs)
            for scenario, wrong in zip(scenarios, found, strict=True):
                total[place, scenario.way] += 1
                broken[place, scenario.way] += bool(wrong)
                if wrong:
                    print(scenario, *wrong, sep="\n    ", flush=True)
    for (place, way), number in total.items():
        print(f"{place:10} {way:10} {number:4} runs {broken[place, way]:4} broken")
    print(f"{sum(total.values())} runs, seed {args.seed}: {time.monotonic() - begin_s:.0f} s")
    return 1 if broken.total() else 0


if __name__ == "__main__":
    sys.exit(main())
