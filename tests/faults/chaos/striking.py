"""Brings a fault about, on the rank where it is due."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from fddp.native.buffer_pool import BufferPool
from fddp.runtime import finish as finish_module
from fddp.runtime import operations
from fddp.runtime.step import Step
from fddp.transport.base import Transport
from tests.support.process_resources import open_files
from tests.support.python_steps import only_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fddp.core.schedule.op import Op
    from fddp.sync.engine import Engine
    from tests.faults.chaos.faults import Fault

_IN_THE_INTERPRETER = ("first bucket", "between buckets", "control word", "unpack")
_DESCRIPTORS = resource.getrlimit(resource.RLIMIT_NOFILE)
_COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


class BoomError(Exception):
    """The program's own mistake."""


class Striker:
    """Strikes once, where the fault says.

    Args:
        fault: what is due.
        rank: this rank.
        tell: takes note of the moment.
        ask_fd: where a process can be named that is to be woken after some seconds.
        store_port: of the group's store.
    """

    def __init__(
        self, fault: Fault, rank: int, tell: Callable[[], None], ask_fd: int, store_port: int
    ) -> None:
        self._fault = fault
        self._is_mine = rank == fault.rank
        self._tell = tell
        self._ask_fd = ask_fd
        self._store_port = store_port
        self._struck = False
        self._dry: Engine | None = None  # that gets no memory any more
        self.engine: Engine | None = None  # once there is one
        self.files: set[int] = set()  # that were open before there was a sync

    def at(self, stage: str, step: int) -> None:
        """Strikes if this is the place."""
        if self.is_due(stage, step):
            self.strike()

    def is_due(self, stage: str, step: int) -> bool:
        here = self._is_mine and not self._struck
        return here and (stage, step) == (self._fault.stage, self._fault.step)

    def strike(self) -> None:
        self._struck = True
        self._tell()
        getattr(self, "_" + self._fault.kind.replace(" ", "_"))()

    # Kinds

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _exec(self) -> None:
        os.execv("/bin/sleep", ["sleep", "12"])  # longer than others may take

    def _exit(self) -> None:
        sys.exit(3)

    def _few_descriptors(self) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, _DESCRIPTORS[1]))

    def relax(self) -> None:
        """Lifts the limit of descriptors."""
        resource.setrlimit(resource.RLIMIT_NOFILE, _DESCRIPTORS)

    def _long_stop(self) -> None:
        os.write(self._ask_fd, f"{os.getpid()} {self._fault.duration_s}\n".encode())
        os.kill(os.getpid(), signal.SIGSTOP)

    _short_stop = _long_stop

    def _error_in_loss(self) -> None:
        raise BoomError("the program's own mistake")

    _error_in_hook = _error_in_data = _error_at_start = _error_in_loss

    def _interrupt(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)  # until Python has seen it

    def _huge_tensor(self) -> None:
        torch.empty(1 << 50)

    def _address_space(self) -> None:
        before = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), before[1]))
        try:
            torch.empty(1 << 28, dtype=torch.uint8).fill_(1)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    _no_bucket_memory = _no_bucket_memory_at_all = _huge_tensor

    def _full_shm(self) -> None:
        if self.engine is None:
            limit = (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        else:
            engine = self.engine
            engine._pool.clear()
            memory = getattr(engine.transport, "_memory", None)
            if memory is not None:
                memory.empty = lambda *_: None

    def _closed_socket(self) -> None:
        for file in open_files() - self.files:
            _shut_down(file, lambda port: True)

    def _closed_store(self) -> None:
        for file in open_files():
            _shut_down(file, lambda port: port == self._store_port)

    # Places

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Strikes where a step's operations are carried out."""
        if not self._is_mine:
            yield
            return
        acquire, exchange = BufferPool.acquire, Transport.exchange
        counted = 0

        def watched(run: Callable[[], Any], step: Step, position: int) -> Any:
            before, after = self._places(step, position, step.program.schedule.ops[position])
            if before and self._runs_through(before, step.number):
                self.strike()
            found = run()
            if after and self._runs_through(after, step.number):
                self.strike()
            return found

        def watching_operation(name: str) -> Any:
            run = getattr(operations, name)

            def watched_run(step: Step, position: int, *args: Any) -> Any:
                return watched(partial(run, step, position, *args), step, position)

            return mock.patch.object(operations, name, watched_run)

        write_word = finish_module.write_word

        def watched_write(step: Step) -> Any:
            return watched(partial(write_word, step), step, step.program.schedule.control)

        def watched_acquire(pool: BufferPool, key: Any, *args: Any, **options: Any) -> Any:
            if self._fault.kind.startswith("no bucket memory") and self.engine is not None:
                stage = {0: "first bucket", 1: "between buckets"}.get(key, "")
                if self.is_due(stage, self.engine.step - 1):
                    self._dry = self.engine if self._fault.kind.endswith("at all") else None
                    self.strike()
                if self._dry is self.engine:
                    self._huge_tensor()
            return acquire(pool, key, *args, **options)

        def watched_exchange(transport: Transport, *args: Any) -> list[bytes]:
            nonlocal counted
            self.at("construction", counted)
            counted += 1
            return exchange(transport, *args)

        with contextlib.ExitStack() as patched:
            if self._is_mine and self._fault.stage in _IN_THE_INTERPRETER:
                # The other ranks run the compiled interpreter.
                patched.enter_context(only_python())
            for name in ("pack", "launch", "add_repair", "gather", "unpack"):
                patched.enter_context(watching_operation(name))
            patched.callback(finish_module.executor_calls.cache_clear)
            patched.enter_context(mock.patch.object(finish_module, "write_word", watched_write))
            finish_module.executor_calls.cache_clear()
            patched.enter_context(mock.patch.object(BufferPool, "acquire", watched_acquire))
            patched.enter_context(mock.patch.object(Transport, "exchange", watched_exchange))
            yield

    def _runs_through(self, stage: str, step: int) -> bool:
        by_itself = ("error in hook", "no bucket memory", "no bucket memory at all")
        return self._fault.kind not in by_itself and self.is_due(stage, step)

    def _places(self, step: Step, position: int, op: Op) -> tuple[str, str]:
        """The stages that begin right before and right behind an operation."""
        if op.kind == "control":
            return "control word", ""
        if op.kind in _COLLECTIVES:
            sent = sum(o.kind in _COLLECTIVES for o in step.program.schedule.ops[:position])
            return "", {0: "first bucket", 1: "between buckets"}.get(sent, "")
        is_first = not any(o.kind == "unpack" for o in step.program.schedule.ops[:position])
        return ("unpack" if op.kind == "unpack" and is_first else ""), ""


def _shut_down(file: int, is_meant: Callable[[int], bool]) -> None:
    """Ends a TCP connection to a port that is meant, as a broken network would."""
    try:
        if not re.match(r"socket:", os.readlink(f"/proc/self/fd/{file}")):
            return
        with socket.socket(fileno=os.dup(file)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                port = connection.getpeername()[1]
                if is_meant(port):
                    connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it listens, or is closed meanwhile
        return
