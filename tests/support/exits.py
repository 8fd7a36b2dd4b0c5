"""A program that ends processes of two ranks in the ways given as arguments.

A way has one value of each table, joined by slashes. For each way it writes a line: exit codes of
the ranks, and names of the library's threads that were left when the last finalizer was called.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import threading
import weakref
from pathlib import Path

import torch
import torch.distributed as dist

import fddp

REGISTERED = ["before the first transport", "after the last"]
CALLS = ["close", "close all", "destroy", "close and destroy", "drop all"]
BESIDE = ["alone", "another"]
TRANSPORTS = ["c10d", "shm"]
ENDS = ["returns", "raises"]
EXIT_CODES = {"returns": 0, "raises": 1}


def end(store: str, rank: int, way: str) -> None:
    """Return or raise, after `atexit` handlers were registered."""
    registered, calls, beside, transport, ends = way.split("/")
    syncs: list[fddp.GradSync] = []

    def handler() -> None:
        closed = {"close": syncs[:1], "close and destroy": syncs[:1], "close all": syncs}
        for sync in closed.get(calls, []):
            sync.close()
        if calls == "drop all":
            syncs.clear()
        if "destroy" in calls:
            dist.destroy_process_group()

    if registered == REGISTERED[0]:
        atexit.register(handler)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    grads = {"w": torch.ones(3)}
    for _ in range(1 + (beside == "another")):
        syncs.append(fddp.GradSync(grads, transport=transport))
        syncs[-1](grads)
    if registered == REGISTERED[1]:
        atexit.register(handler)
    if ends == "raises":
        sys.excepthook = lambda *_: None
        raise ArithmeticError("no root")


def _report(path: Path) -> None:
    names = [thread.name for thread in threading.enumerate()]
    path.write_text(" ".join(sorted(name for name in names if name.startswith("fddp-"))))


def main() -> None:
    directory = Path(tempfile.mkdtemp())
    for number, way in enumerate(sys.argv[1:]):
        reports = [directory / f"{number}.{rank}" for rank in range(2)]
        children = []
        for rank, path in enumerate(reports):
            child = os.fork()
            if child == 0:
                weakref.finalize(main, _report, path)  # the first finalizer is called last
                end(f"{directory}/{number}", rank, way)
                return  # and end as the interpreter does
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        left = [path.read_text() if path.exists() else "no report" for path in reports]
        print(*codes, *left, sep=",", flush=True)


if __name__ == "__main__":
    main()
