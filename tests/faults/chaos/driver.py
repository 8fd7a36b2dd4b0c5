"""Runs faults, several side by side, and gathers what their ranks saw."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist

from tests.faults.chaos.faults import Fault
from tests.faults.chaos.verdict import CONTINUES, REPORTED, Error, Run, Seen, problems, promise

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from typing_extensions import Self

_START_S = 60.0
_ROOT = Path(__file__).parents[3]
#: by transport, number of ranks and way of training
Digests: TypeAlias = dict[tuple[str, int, str], str]


class Nursery:
    """The process that forks ranks; see `nursery.py`."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.chaos.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._out.fileno(), False)
        self._rest = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out, selectors.EVENT_READ)
        messages = self.messages(_START_S)
        assert messages == [["ready"]], messages

    def start(self, *call: object) -> None:
        """Forks a rank."""
        self._in.write(json.dumps(call).encode() + b"\n")
        self._in.flush()

    def messages(self, within_s: float) -> list[list[Any]]:
        """Return the messages since the last call; wait at most so long for one."""
        self._selector.select(within_s)
        *lines, self._rest = (self._rest + (self._out.read() or b"")).split(b"\n")
        return [json.loads(line) for line in lines]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        self._in.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)
        self._process.kill()
        self._process.wait()
        self._out.close()


@dataclass
class _Case:
    """A run under way."""

    fault: Fault
    folder: str
    store: dist.TCPStore
    deadline_s: float
    pids: dict[int, int] = field(default_factory=dict)  # by rank
    exitcodes: dict[int, int] = field(default_factory=dict)
    hung: list[int] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return len(self.exitcodes) == self.fault.world_size


def carry_out(
    faults: Iterable[Fault], nursery: Nursery, side_by_side: int
) -> Iterator[tuple[Fault, Run]]:
    """Each fault's run, as they end."""
    waiting, cases = list(enumerate(faults)), dict[int, _Case]()
    with tempfile.TemporaryDirectory() as folder:
        while waiting or cases:
            while waiting and len(cases) < side_by_side:
                number, fault = waiting.pop(0)
                cases[number] = _begin(fault, nursery, f"{folder}/{number}", number)
            for what, number, rank, value in nursery.messages(0.1):
                known = cases[number].pids if what == "started" else cases[number].exitcodes
                known[rank] = value
            for case in cases.values():
                _end_if_late(case)
            for number in [number for number, case in cases.items() if case.is_over]:
                case = cases.pop(number)
                yield case.fault, _gathered(case)


def undisturbed(nursery: Nursery, faults: Iterable[Fault], side_by_side: int) -> Digests:
    """Digests at the end of runs without a fault, by transport and number of ranks.

    Only where some of `faults` are to end with the same.
    """
    digests: Digests = {}
    kept = [fault for fault in faults if promise(fault) in (CONTINUES, REPORTED)]
    calm = [
        Fault("none", 0, "none", 0, transport, size, timeout_s=60.0, way=way)
        for transport, size, way in dict.fromkeys(map(ways, kept))
    ]
    for fault, run in carry_out(calm, nursery, side_by_side):
        digest = run.ranks[0].digest or ""
        found = problems(fault, run, digest)
        if found or not digest:
            raise AssertionError(f"a run without faults: {found}, {run}")
        digests[ways(fault)] = digest
    return digests


def ways(fault: Fault) -> tuple[str, int, str]:
    """Transport, number of ranks, and kind of training."""
    falls_back = (fault.kind, fault.stage) == ("full shm", "construction")
    return "c10d" if falls_back else fault.transport, fault.world_size, fault.way


def _begin(fault: Fault, nursery: Nursery, folder: str, number: int) -> _Case:
    os.mkdir(folder)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Starting, training and what a fault may take, with much to spare.
    deadline_s = time.monotonic() + 90.0 + 4 * fault.timeout_s
    for rank in range(fault.world_size):
        nursery.start(number, rank, store.port, fault.text, folder)
    return _Case(fault, folder, store, deadline_s)


def _end_if_late(case: _Case) -> None:
    if time.monotonic() < case.deadline_s or case.hung:
        return
    for rank, pid in case.pids.items():
        if rank not in case.exitcodes:
            case.hung.append(rank)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _gathered(case: _Case) -> Run:
    ranks = tuple(_seen(case, rank) for rank in range(case.fault.world_size))
    return Run(ranks, tuple(case.hung), _end_groups(case.pids.values()))


def _seen(case: _Case, rank: int) -> Seen:
    logged: dict[str, Any] = {}
    errors = []
    log, words = Path(f"{case.folder}/{rank}.log"), Path(f"{case.folder}/{rank}.err")
    for line in log.read_text().splitlines() if log.exists() else ():
        entry = json.loads(line)
        if "error" in entry:
            error = {k: tuple(v) if isinstance(v, list) else v for k, v in entry["error"].items()}
            errors.append(Error(**error))
        logged |= {k: v for k, v in entry.items() if k in ("fault_s", "left", "crash")}
        if "left" in entry:
            logged["digest"] = entry["digest"]
    return Seen(
        exitcode=case.exitcodes.get(rank),
        fault_s=logged.get("fault_s"),
        errors=tuple(errors),
        digest=logged.get("digest"),
        left=tuple(logged["left"]) if "left" in logged else None,
        stderr=words.read_text() if words.exists() else "",
        crash=logged.get("crash", ""),
    )


def _end_groups(groups: Iterable[int]) -> int:
    """Ends what ranks have left running; how many groups of processes that were."""
    left = 0
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
            left += 1
    return left
