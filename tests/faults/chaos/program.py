"""Program of a rank: training, in which the fault strikes; observations go into a log, as JSON."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import time
import traceback
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import fddp
from tests.faults.chaos import training
from tests.faults.chaos.faults import STEPS
from tests.faults.chaos.striking import Striker
from tests.faults.chaos.verdict import REPORTED, Error, builds_anew, exitcode, promise
from tests.support.models import batch, mlp, mlp_loss
from tests.support.process_resources import open_files

if TYPE_CHECKING:
    from tests.faults.chaos.faults import Fault

_ENOUGH = 2  # errors, where one is promised
_SETTLING_S = 3.0  # beyond the timeout, that gloo may take to free what was pending


class Program:
    """One rank's run."""

    def __init__(self, fault: Fault, rank: int, store_port: int, log_fd: int, ask_fd: int) -> None:
        self.fault, self.rank = fault, rank
        self._log_fd = log_fd
        self.done = 0
        self.params = mlp()
        self.leaves = [leaf for layer in self.params.values() for leaf in layer.values()]
        self.group: dist.ProcessGroup | None = None
        self.optimize()
        self.caught = 0
        tell = lambda: self.log(fault_s=time.monotonic())  # noqa: E731
        self.striker = Striker(fault, rank, tell, ask_fd, store_port)
        training.STRIKERS[:] = [self.striker]
        self.store = dist.TCPStore("127.0.0.1", store_port, is_master=False)

    def log(self, **entry: Any) -> None:
        os.write(self._log_fd, json.dumps(entry).encode() + b"\n")

    def optimize(self) -> None:
        """Makes an optimizer for the leaves, which keeps what it had found before."""
        before = self.optimizer.state_dict() if self.done else None
        self.optimizer = torch.optim.Adam(self.leaves, lr=0.01)
        if before is not None:
            self.optimizer.load_state_dict(before)

    def begin(self) -> None:
        """A step begins."""
        self.before = self.digest()
        self.log(step=self.done, digest=self.before)

    def update(self) -> None:
        """A step ends."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        self.before = self.digest()

    def digest(self) -> str:
        """Of parameters and optimizer state."""
        state = hashlib.sha256()
        for leaf in self.leaves:
            state.update(leaf.detach().numpy().tobytes())
            for _, value in sorted(self.optimizer.state[leaf].items()):
                state.update(value.numpy().tobytes())
        return state.hexdigest()

    def run(self) -> None:
        dist.init_process_group(
            "gloo",
            store=self.store,
            rank=self.rank,
            world_size=self.fault.world_size,
            timeout=timedelta(seconds=60),
        )
        training.groups(self)
        self.striker.at("start", self.fault.step)
        if self.fault.kind != "error at start":  # which comes before the first call
            self._warm_up()
        before = held()
        self.striker.files = open_files()
        with self.striker.watching():
            self._train()
        self.striker.relax()
        left = settled(before, self.fault.timeout_s + _SETTLING_S) if self._is_tidy else []
        self.log(left=left, digest=self.digest())
        if self._is_tidy:
            dist.destroy_process_group()

    @property
    def _is_tidy(self) -> bool:
        """Every other rank ends at once, while gloo is still being freed, and leaves its group as
        it is."""
        others = [rank for rank in range(self.fault.world_size) if rank != self.fault.rank]
        place = others.index(self.rank) if self.rank in others else 0
        return (place + self.fault.step) % 2 == 0

    def _warm_up(self) -> None:
        """So that what a process opens once and keeps is not taken for left behind."""
        dist.barrier()
        threads = {"threads": held()["threads"]}
        with fddp.GradSync(self.params, timeout_s=60.0) as sync:
            sync.value_and_grad(mlp_loss)(self.params, batch(self.rank, 0))
        dist.barrier()
        if more := settled(threads, 20.0):  # or what ends later would hide what is left behind
            raise AssertionError(f"after a sync that was closed in order: {more}")

    def _train(self) -> None:
        way = None
        while self.done < STEPS:
            self.before = self.digest()
            try:
                if way is None:
                    way = training.start(self)
                    self.striker.engine = way.engine
                way.train()
            except BaseException as error:
                if isinstance(error, SystemExit):
                    raise
                self._take_note(error, way)
                if builds_anew(self.fault):
                    assert way is not None
                    way.close()
                    way = self.striker.engine = None
                elif promise(self.fault) != REPORTED or self.caught > _ENOUGH:
                    break
        if way is not None:
            way.close()
        self.striker.engine = None

    def _take_note(
        self, error: BaseException, way: training.Functional | training.Wrapped | None
    ) -> None:
        at_s, step = time.monotonic(), -1 if way is None else way.engine.step - 1
        observed = Error(
            tuple(kind.__name__ for kind in type(error).__mro__),
            str(error),
            getattr(error, "ranks", None),
            getattr(error, "bucket", None),
            getattr(error, "paths", None),
            getattr(error, "step", None),
            step,
            at_s,
            self.before,
            self.digest(),
        )
        self.log(error=asdict(observed))
        self.caught += 1


def main(fault: Fault, rank: int, store_port: int, log_fd: int, ask_fd: int) -> int:
    """Runs a rank; its exit code."""
    torch.set_num_threads(1)
    program = Program(fault, rank, store_port, log_fd, ask_fd)
    try:
        program.run()
    except BaseException:
        program.log(crash=traceback.format_exc())
    return exitcode(rank)


def held() -> dict[str, list[str]]:
    """Threads, open files, mappings of shared memory and child processes of this process."""
    files = []
    for number in open_files():
        try:
            files.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the directory's own
            continue
    tasks = list(Path("/proc/self/task").iterdir())
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "threads": [name for task in tasks if (name := _text(task / "comm"))],
        "files": files,
        "mappings": [line for line in maps if "memfd:fddp" in line],
        "children": [child for task in tasks for child in _text(task / "children").split()],
    }


def _text(path: Path) -> str:
    """Return the text of a thread's file; empty if the thread has ended."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def settled(before: dict[str, list[str]], within_s: float) -> list[str]:
    """Return the resources held beyond `before`, as soon as there are none, or after a time
    limit."""
    deadline_s = time.monotonic() + within_s
    while True:
        gc.collect()
        now = held()
        more = [
            f"{len(now[name]) - len(was)} {name} of {sorted(now[name])}"
            for name, was in before.items()
            if len(now[name]) > len(was)
        ]
        if not more or time.monotonic() > deadline_s:
            return more
        time.sleep(0.05)
