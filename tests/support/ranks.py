"""Ranks for tests: real processes over gloo, and threads over the loopback transport.

Starting a process that imports torch takes seconds, so one pool of processes serves the session.
Each call gets a fresh process group of the world size that it asks for. A call that fails or hangs
costs the pool, not the session: its processes are killed, and the next call starts new ones.

The functions that run on ranks must be importable: defined at the top of a test module.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fddp.transport import loopback, selection
from fddp.transport.shm import host_discovery
from tests.support.polling import HANG_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

TRANSPORTS = ("c10d", "shm", "loopback")
_FAILURE_GRACE_S = 10.0  # what the others get to end once a rank has failed
_END_S = 5.0  # what idle processes get to end in order
# Imports are most of what starting a process takes, so one process does them for all: what test
# modules import, and Dynamo, which the first step of an optimizer does.
_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["fddp", "hypothesis", "pytest", "torch._dynamo"])


class RanksFailedError(AssertionError):
    """Some ranks raised, died or hung; the text has each one's traceback or exit code."""


class Outcome(NamedTuple):
    """Outcome of one rank of `run_fresh`."""

    result: Any  # what the function returned; None where it did not
    error: str | None  # traceback of what it raised
    exitcode: int | None  # of the process; below 0: killed by that signal, by us if it hung


class RankPool:
    """Processes that wait for functions to run; see `run`."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._store = _new_store()
        self._calls = 0

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = HANG_S,
    ) -> list[Any]:
        """`fn(rank, world_size, *args)` on each rank of a fresh default group; results by rank.

        Raises:
            RanksFailedError: a rank raised, died, or did not return within `timeout_s`.
        """
        while len(self._workers) < world_size:
            self._workers.append(_Worker(self._store.port))
        self._calls += 1
        workers = self._workers[:world_size]
        for rank, worker in enumerate(workers):
            worker.submit(_Call(self._calls, rank, world_size, fn, args))
        answers = _collect(workers, timeout_s, _FAILURE_GRACE_S)
        if all(answer is not None and answer.error is None for answer in answers):
            return [answer.result for answer in answers if answer is not None]
        raise RanksFailedError(
            "\n".join(
                f"rank {rank} gave no answer; exit code {exitcode} ({-signal.SIGKILL}: hung)"
                if answer is None
                else f"rank {rank} raised:\n{answer.error}"
                for rank, (answer, exitcode) in enumerate(zip(answers, self.close(), strict=False))
                if answer is None or answer.error is not None
            )
        )

    def close(self) -> list[int | None]:
        """End the processes, of which a later `run` starts new ones; their exit codes."""
        workers, self._workers = self._workers, []
        return _end(workers)


def run_fresh(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = HANG_S
) -> list[Outcome]:
    """As `RankPool.run`, on processes of its own, for functions that end their process.

    Returns how each rank ended, and raises nothing. The store outlives the ranks, as under
    torchrun.
    """
    store = _new_store()
    workers = [_Worker(store.port) for _ in range(world_size)]
    try:
        for rank, worker in enumerate(workers):
            worker.submit(_Call(0, rank, world_size, fn, args))
        answers = _collect(workers, timeout_s, timeout_s)
    finally:
        exitcodes = _end(workers)
    return [
        Outcome(*(answer or _Answer(None, None)), exitcode)
        for answer, exitcode in zip(answers, exitcodes, strict=True)
    ]


class Launch(Protocol):
    """Runs `fn(group, *args)` on each rank, whatever carries the group; results by rank."""

    name: str

    def __call__(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]: ...


class LaunchThreads:
    name = "loopback"

    def __call__(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return loopback(world_size, fn, *args)


class LaunchProcesses:
    """On processes; what opens a transport without naming one gets the one of this name. "fddp"
    stands for "c10d" over a group with the backend "fddp"."""

    def __init__(self, name: str, pool: RankPool) -> None:
        self.name = "c10d" if name == "fddp" else name
        self._with_group = _with_backend if name == "fddp" else _with_default_group
        self._pool = pool

    def __call__(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return self._pool.run(world_size, self._with_group, self.name, fn, *args)


def _with_default_group(
    rank: int, world_size: int, name: str, fn: Callable[..., Any], *args: Any
) -> Any:
    alone = [[other] for other in range(world_size)]
    with split_into_hosts(alone) if name == "c10d" else contextlib.nullcontext():
        return fn(dist.group.WORLD, *args)


def _with_backend(rank: int, world_size: int, name: str, fn: Callable[..., Any], *args: Any) -> Any:
    """As `_with_default_group`, of a group in whose communicators the backend shares memory."""
    with mock.patch.object(selection, "_use_memory"):
        return fn(dist.new_group(backend="fddp"), *args)


@contextlib.contextmanager
def split_into_hosts(hosts: Sequence[Collection[int]]) -> Iterator[None]:
    """Ranks find only those of their own host in reach; to be entered on all ranks."""
    call = host_discovery._HostDiscovery.connect_to_leader

    def masked(
        self: host_discovery._HostDiscovery, listeners: Sequence[list[str] | None]
    ) -> tuple[int, str]:
        mine = next(host for host in hosts if self._rank in host)
        return call(
            self, [listener if rank in mine else None for rank, listener in enumerate(listeners)]
        )

    with mock.patch.object(host_discovery._HostDiscovery, "connect_to_leader", masked):
        yield


HOSTS = {"c10d": [[0], [1], [2], [3]], "shm+c10d": [[0, 1], [2, 3]], "shm": [[0, 1, 2, 3]]}
"""Hosts of four ranks, by the transport of hierarchical schedules between them."""


def on_hosts(rank: int, world_size: int, transport: str, fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(group, *args)` on a rank of the hosts for this transport; to be run by a `RankPool`."""
    with split_into_hosts(HOSTS[transport]):
        return fn(dist.group.WORLD, *args)


def _pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The session's pool of processes."""
    yield from _pool()


@pytest.fixture(scope="module")
def own_ranks() -> Iterator[RankPool]:
    """Processes of one module alone, for torch's tests, which change flags of torch."""
    yield from _pool()


def launch_fixture(*names: str) -> Any:
    """Return a fixture, to be named `launch`, that runs a test over each of these transports."""

    @pytest.fixture(params=names)
    def launch(request: pytest.FixtureRequest) -> Launch:
        return launch_over(request.param, request)

    return launch


launch = launch_fixture("c10d", "loopback")
"""The default: processes over c10d, and threads."""


def launch_over(name: str, request: pytest.FixtureRequest) -> Launch:
    """Return the launcher of ranks over the transport of this name."""
    if name == "loopback":
        return LaunchThreads()
    return LaunchProcesses(name, request.getfixturevalue("ranks"))


# What follows runs the processes.


class _Call(NamedTuple):
    number: int  # of this pool; keeps the groups of its calls apart
    rank: int
    world_size: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]


class _Answer(NamedTuple):
    result: Any
    error: str | None  # traceback


class _Worker:
    def __init__(self, store_port: int) -> None:
        self.connection, theirs = _FORKED.Pipe()
        self.process = _FORKED.Process(target=_serve, args=(theirs, store_port), daemon=True)
        # Inherited when spawned, and read by libgomp before any code of ours runs there.
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            self.process.start()
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before
        theirs.close()  # so that its end shows as end of file
        self._ready = False

    def submit(self, call: _Call) -> None:
        if not self._ready:
            if not self.connection.poll(HANG_S):
                raise RanksFailedError(f"a rank's process did not start within {HANG_S} s")
            self.connection.recv()
            self._ready = True
        self.connection.send_bytes(pickle.dumps(call))


def _collect(
    workers: Sequence[_Worker], timeout_s: float, failure_grace_s: float
) -> list[_Answer | None]:
    """Each worker's answer; None for those that died, or did not answer within the time."""
    deadline_s = time.perf_counter() + timeout_s
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    answers: list[_Answer | None] = [None] * len(workers)
    while waiting:
        for connection in wait(list(waiting), max(0.0, deadline_s - time.perf_counter())):
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            with contextlib.suppress(EOFError):
                answers[rank] = pickle.loads(connection.recv_bytes())
            answer = answers[rank]
            if answer is None or answer.error is not None:
                deadline_s = min(deadline_s, time.perf_counter() + failure_grace_s)
        if time.perf_counter() > deadline_s:
            break
    return answers


def _end(workers: Sequence[_Worker]) -> list[int | None]:
    """Close the pipes, at which idle processes end; kill those that do not. Their exit codes."""
    for worker in workers:
        worker.connection.close()
    deadline_s = time.perf_counter() + _END_S
    exitcodes = []
    for worker in workers:
        worker.process.join(max(0.0, deadline_s - time.perf_counter()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        exitcodes.append(worker.process.exitcode)
        worker.process.close()
    return exitcodes


def _new_store() -> dist.TCPStore:
    """A store hosted by the test process, at a port that is free."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _serve(connection: Connection, store_port: int) -> None:
    """A rank's process: run the calls that arrive until the pipe closes."""
    torch.set_num_threads(1)
    gc.freeze()  # what was imported before the fork: many objects, which no test makes garbage
    # A rank whose function needs no other could close a group before the others have connected.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    connection.send("ready")
    while True:
        try:
            call: _Call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(_answer(call, store)))


def _answer(call: _Call, store: dist.Store) -> _Answer:
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"call {call.number}", store),
            rank=call.rank,
            world_size=call.world_size,
            timeout=timedelta(seconds=60),
        )
        torch.manual_seed(0)  # alike on all ranks, whichever calls some of them had before
        result = call.fn(call.rank, call.world_size, *call.args)
        pickle.dumps(result)
    except BaseException:
        return _Answer(None, traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return _Answer(result, None)
