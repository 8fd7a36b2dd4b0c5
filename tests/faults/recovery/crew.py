"""Processes that have torch in memory, and fork the ranks of one host."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.faults.chaos.nursery import preload
from tests.faults.recovery import program
from tests.faults.recovery.scenario import Loss, Scenario
from tests.faults.recovery.verdict import Run

ROOT = Path(__file__).parents[3]
_LIMIT_S = 150.0


class Crew:
    """Forks ranks on one host; `enter` is a command in front of Python's, to enter the host."""

    def __init__(self, enter: Sequence[str] = (), address: str = "127.0.0.1") -> None:
        self.address = address
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self._process = subprocess.Popen(
            [*enter, sys.executable, "-m", "tests.faults.recovery.crew"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # with the ranks that it forks
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )

    def ask(self, *request: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def run(crews: Sequence[Crew], scenario: Scenario, folder: str) -> Run:
    """Run a scenario on one host for each crew, between which ranks are divided."""
    os.makedirs(folder)
    crews[0].ask("store", crews[0].address)
    port = crews[0].answer()
    size, hosts = scenario.world_size, len(crews)
    shares = [[*range(size * i // hosts, size * (i + 1) // hosts)] for i in range(hosts)]
    spec = [scenario.place, scenario.way, size, scenario.losses]
    for crew, ranks in zip(crews, shares, strict=True):
        crew.ask("ranks", spec, ranks, crews[0].address, port, folder)
    codes = [code for crew in crews for code in crew.answer()]
    crews[0].ask("end store")
    logs = []
    for rank in range(size):
        path = Path(folder) / f"{rank}.log"
        lines = path.read_text().splitlines() if path.exists() else []
        logs.append([json.loads(line) for line in lines])
    return Run(logs, codes)


# What follows runs on the host.


def serve() -> int:
    """Answer requests; returns in forked ranks, with their exit code."""
    preload()  # what every rank would import at its first step
    store = 0
    for line in sys.stdin:
        what, *rest = json.loads(line)
        if what == "store":
            port, own_end = os.pipe()
            store = os.fork()
            if store == 0:
                held = dist.TCPStore(rest[0], 0, is_master=True, wait_for_workers=False)
                os.write(own_end, str(held.port).encode())
                signal.pause()
            print(os.read(port, 16).decode(), flush=True)
            os.close(port)
            os.close(own_end)
        elif what == "end store":
            os.kill(store, signal.SIGKILL)
            os.waitpid(store, 0)
        else:
            (place, way, size, losses), ranks, address, port_number, folder = rest
            scenario = Scenario(place, way, size, tuple(Loss(*loss) for loss in losses))
            pids = {}
            for rank in ranks:
                pid = os.fork()
                if pid == 0:
                    path = f"{folder}/{rank}.log"
                    return program.main(scenario, rank, address, port_number, path)
                pids[rank] = pid
            print(json.dumps([_reaped(pid) for pid in pids.values()]), flush=True)
    return 0


def _reaped(pid: int) -> int | None:
    """Exit code of a process; None if it had to be killed."""
    deadline_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


if __name__ == "__main__":
    sys.exit(serve())
