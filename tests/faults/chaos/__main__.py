"""`python -m chaos`: many faults, and a table of them."""

from __future__ import annotations

import argparse
import sys
import time

from tests.faults.chaos.driver import Nursery, carry_out, undisturbed, ways
from tests.faults.chaos.faults import Fault, draw, parse
from tests.faults.chaos.verdict import counts, problems, promise


def main() -> int:
    """Runs what the command line asks for; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=270, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="of the generator (%(default)s)")
    parser.add_argument("--jobs", type=int, default=4, help="runs side by side (%(default)s)")
    parser.add_argument("--only", action="append", help="a fault as it was printed")
    parser.add_argument("--verbose", action="store_true", help="what each rank caught")
    args = parser.parse_args()
    faults = [parse(text) for text in args.only] if args.only else draw(args.seed, args.faults)
    results: dict[Fault, list[str]] = {}
    start_s = time.monotonic()
    with Nursery() as nursery:
        digests = undisturbed(nursery, faults, args.jobs)
        for fault, run in carry_out(faults, nursery, args.jobs):
            results[fault] = found = problems(fault, run, digests.get(ways(fault), ""))
            if args.verbose:
                for rank, seen in enumerate(run.ranks):
                    for error in seen.errors:
                        print(f"  rank {rank}: {error.kinds[0]}: {error.text}")
            if found:
                print(f"BROKEN, promised {promise(fault)!r}: python -m chaos --only '{fault.text}'")
                print("".join(f"    {problem}\n" for problem in found), flush=True)
    for kind, transport, n, broken in counts(results):
        print(f"{kind:26} {transport:6} {n:4} faults {broken:4} broken")
    broken = sum(map(bool, results.values()))
    took_s = time.monotonic() - start_s
    print(f"{len(results)} different faults, seed {args.seed}: {broken} broken, {took_s:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
