"""`python -m tests.mutants [PATTERN ...] [--only python|cpp] [--list]`.

Applies each mutant in a copy of the checkout, builds the extension if the mutant is of C++, and
runs the tests that kill it. The exit status is 1 if a mutant survives, or is an error of the list:
its text or its test is gone.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.mutants.catalogue import MUTANTS, Mutant
from tests.mutants.workshop import Verdict, Workshop


def main() -> int:
    """Judge mutants; 1 if one survives or no longer applies."""
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.add_argument("patterns", nargs="*", default=["*"], help="of names, such as 'pack-*'")
    parser.add_argument("--only", choices=("python", "cpp"))
    parser.add_argument("--list", action="store_true", help="list which test file kills which")
    asked = parser.parse_args()
    # Those of C++ last: the extension of the checkout serves the others.
    chosen = sorted(
        (
            mutant
            for mutant in MUTANTS
            if any(fnmatch.fnmatch(mutant.name, pattern) for pattern in asked.patterns)
            and asked.only in (None, "cpp" if mutant.is_cpp else "python")
        ),
        key=lambda mutant: mutant.is_cpp,
    )
    if asked.list:
        verdicts = [
            Verdict("an error" if mutant.problem() else "listed", mutant.problem(), 0.0)
            for mutant in chosen
        ]
    else:
        verdicts = _judged(chosen)
    _show(chosen, verdicts, not asked.list)
    return int(any(verdict.state in ("survived", "an error") for verdict in verdicts))


def _judged(chosen: list[Mutant]) -> list[Verdict]:
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="fddp_mutants_") as folder:
        workshop = Workshop(Path(folder))
        for mutant in chosen:
            verdict = workshop.judge(mutant)
            verdicts.append(verdict)
            print(f"{mutant.name}: {verdict.state} {verdict.by} ({verdict.took_s:.0f} s)")
            sys.stdout.flush()
        workshop.close()
    return verdicts


def _show(chosen: list[Mutant], verdicts: list[Verdict], ran: bool) -> None:
    """Print the mutants that each test file kills, then those that live or do not apply."""
    table = Table("tests", "mutants", "names", title=f"{len(chosen)} mutants")
    of_tests: dict[str, list[str]] = {}
    wrong = []
    for mutant, verdict in zip(chosen, verdicts, strict=True):
        if verdict.state in ("survived", "an error"):
            wrong.append(f"{mutant.name}: {verdict.state}: {verdict.by or mutant.tests}")
        else:
            of_tests.setdefault(" ".join(mutant.tests), []).append(mutant.name)
    for tests, names in sorted(of_tests.items()):
        table.add_row(tests, str(len(names)), ", ".join(names))
    Console().print(table)
    fit = f"{len(chosen) - len(wrong)} of {len(chosen)} mutants {'are killed' if ran else 'apply'}"
    print(*wrong, fit, sep="\n")


if __name__ == "__main__":
    sys.exit(main())
