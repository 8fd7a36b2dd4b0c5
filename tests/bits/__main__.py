"""`python -m tests.bits record FILE.json [--tree FOLDER]` and `... compare OLD.json NEW.json`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_ROOT = Path(__file__).parents[2]
_RANKS = 3
_SHOWN = 20  # cases that differ, of each group
_MAY_DIFFER = ("virtual_ranks",)
_RUN = "import runpy, sys; runpy.run_path(sys.argv[1])['main'](*sys.argv[2:])"

Record = dict[str, dict[str, Any]]  # by group of cases and name


def main() -> int:
    """Record this checkout or another, or compare two records; 1 if a bit differs."""
    parser = argparse.ArgumentParser("python -m tests.bits", description=main.__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    command = commands.add_parser("record")
    command.add_argument("file", type=Path)
    command.add_argument("--tree", type=Path, default=_ROOT, help="checkout with a .venv")
    command.add_argument("--trees", type=int, default=210, help="number of random trees")
    command = commands.add_parser("compare")
    command.add_argument("old", type=Path)
    command.add_argument("new", type=Path)
    asked = parser.parse_args()
    if asked.command == "record":
        record = recorded(asked.tree, asked.trees)
        asked.file.write_text(json.dumps(record, indent=1, sort_keys=True))
        print(f"{asked.file}: {', '.join(f'{len(record[g])} {g}' for g in sorted(record))}")
        return 0
    return compare(*(json.loads(path.read_text()) for path in (asked.old, asked.new)))


def recorded(tree: Path, trees: int) -> Record:
    """Run all cases with the fddp of a checkout: on processes, and on threads of one process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    python, program = tree / ".venv/bin/python", Path(__file__).with_name("program.py")
    with tempfile.TemporaryDirectory() as folder:
        names = ["threads", *map(str, range(_RANKS))]
        processes = [
            subprocess.Popen(
                [
                    python,
                    "-W",
                    "ignore",
                    "-c",
                    _RUN,
                    program,
                    folder,
                    name,
                    str(_RANKS),
                    str(trees),
                ],
                cwd=tree,
                env=environment,
            )
            for name in names
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            sys.exit(f"exit codes of {', '.join(names)}: {codes}")
        record: Record = defaultdict(dict)
        for name in names:
            for line in (Path(folder) / f"{name}.jsonl").read_text().splitlines():
                group, case, result = json.loads(line)
                record[group].setdefault(case, {})[name] = result
    return dict(record)


def compare(old: Record, new: Record) -> int:
    """Print how many cases of each group are alike, and what differs in the others."""
    console, failed = Console(), False
    table = Table("group", "cases", "same", "differ", "missing", "new", title="Bits")
    for group in sorted({*old, *new}):
        before, after = old.get(group, {}), new.get(group, {})
        both = before.keys() & after.keys()
        differ = sorted(case for case in both if before[case] != after[case])
        missing = before.keys() - after.keys()
        counts = (
            len(before),
            len(both) - len(differ),
            len(differ),
            len(missing),
            len(after) - len(both),
        )
        table.add_row(group, *map(str, counts))
        failed |= group not in _MAY_DIFFER and bool(differ or missing)
        for case in differ[:_SHOWN]:
            console.print(
                f"{group} {case}: {_differences(before[case], after[case])}", markup=False
            )
    console.print(table)
    return int(failed)


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    found = []
    for rank in sorted({*old, *new}):
        before, after = old.get(rank, {}), new.get(rank, {})
        for field in sorted({*before, *after}):
            if before.get(field) != after.get(field):
                values = (str(side.get(field))[:120] for side in (before, after))
                found.append(f"\n  rank {rank}, {field}: {' / '.join(values)}")
    return "".join(found)


if __name__ == "__main__":
    sys.exit(main())
