"""Two hosts made of namespaces: each with a network, mounts and shared memory of its own.

A pair of virtual interfaces joins them, whose counters tell what crosses. All ends with the
processes that hold the namespaces, which end with the test's.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch.distributed as dist

from tests.support.polling import HANG_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LINK = "fddp0"  # the interface of either host to the other one
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_STORE = f"tcp://{ADDRESSES[0]}:29400"  # on the first host; its network has no other users
_START_S = 10.0
# Who asks for names is refused at once, instead of waiting for an answer from another network.
_KEEPER = """
mount -t tmpfs -o size=64m tmpfs /dev/shm &&
echo nameserver 127.0.0.1 > /dev/shm/resolv.conf &&
mount --bind /dev/shm/resolv.conf /etc/resolv.conf &&
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
ip link set lo up && echo ready && exec cat > /dev/null
"""


class _Answer(NamedTuple):
    """A rank's result, or the traceback of its error."""

    result: Any
    error: str | None


class _Call(NamedTuple):
    rank: int
    world_size: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]


class Hosts:
    """Runs functions on ranks of two hosts; the first half of the ranks is on the first."""

    def __init__(self, keepers: Sequence[int]) -> None:
        self._keepers = keepers

    def run(
        self, world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = HANG_S
    ) -> list[Any]:
        """`fn(rank, world_size, *args)` on each rank of a default group over gloo; by rank."""
        half = world_size // 2
        shares = [range(half), range(half, world_size)]
        started = [
            _start(keeper, [_Call(rank, world_size, fn, args) for rank in share])
            for keeper, share in zip(self._keepers, shares, strict=True)
        ]
        try:
            answers = [
                answer
                for process, share in zip(started, shares, strict=True)
                for answer in _answers(process, len(share), timeout_s)
            ]
        finally:
            for process in started:
                process.kill()
                process.communicate()
        for rank, (_, error) in enumerate(answers):
            assert error is None, f"rank {rank} of two hosts raised:\n{error}"
        return [result for result, _ in answers]


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """Two hosts, where this user may make them."""
    with contextlib.ExitStack() as stack:
        try:
            keepers = stack.enter_context(namespaces())
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no hosts can be made of namespaces here: {error}")
        yield Hosts(keepers)


@contextlib.contextmanager
def namespaces() -> Iterator[list[int]]:
    """Two hosts; processes that hold their namespaces."""
    with contextlib.ExitStack() as stack:
        keepers = [stack.enter_context(_keeper()) for _ in range(2)]
        _join(keepers)
        yield keepers


def entering(keeper: int) -> list[str]:
    """Command in front of another, which then runs on a host."""
    enter = ["nsenter", "--net", "--mount", "--target", str(keeper)]
    return [*enter, "env", f"GLOO_SOCKET_IFNAME={LINK}"]


def crossed_bytes() -> int:
    """Bytes sent and received over this host's link to the other one, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.strip().partition(":")
        if name == LINK:
            numbers = [int(number) for number in counters.split()]
            return numbers[0] + numbers[8]
    raise AssertionError(f"there is no interface {LINK}")


@contextlib.contextmanager
def _keeper() -> Iterator[int]:
    """A process with namespaces of its own; its number."""
    command = ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", _KEEPER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline() != b"ready\n":
            raise OSError(process.stderr.read().decode().strip() or "unshare failed")
        yield process.pid
        process.stdin.close()  # at which it ends


def _join(keepers: Sequence[int]) -> None:
    first, second = map(str, keepers)
    _ip("link", "add", LINK, "netns", first, "type", "veth", "peer", "name", LINK, "netns", second)
    for address, keeper in zip(ADDRESSES, keepers, strict=True):
        _ip("addr", "add", f"{address}/24", "dev", LINK, within=keeper)
        _ip("link", "set", LINK, "up", within=keeper)


def _ip(*words: str, within: int | None = None) -> None:
    enter = [] if within is None else ["nsenter", "--net", "--target", str(within)]
    run = subprocess.run(
        [*enter, "ip", *words], capture_output=True, text=True, timeout=_START_S, check=False
    )
    if run.returncode:
        raise OSError(f"ip {' '.join(words)}: {run.stderr.strip()}")


def _start(keeper: int, calls: list[_Call]) -> subprocess.Popen[bytes]:
    """A process of a host, which runs the calls."""
    serve = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); import {__name__}"
    process = subprocess.Popen(
        [*entering(keeper), sys.executable, "-c", f"{serve} as hosts; hosts._serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(calls))
    process.stdin.close()
    process.stdin = None
    return process


def _answers(process: subprocess.Popen[bytes], number: int, timeout_s: float) -> list[_Answer]:
    try:
        output, _ = process.communicate(timeout=timeout_s)
        answers: list[bytes] = pickle.loads(output)
    except (subprocess.TimeoutExpired, EOFError, pickle.UnpicklingError) as error:
        return [_Answer(None, f"no answer: {error!r}")] * number
    return [pickle.loads(a) if a else _Answer(None, "the process ended") for a in answers]


# What follows runs on the hosts.


def _serve() -> None:
    """Runs a host's calls, each in a process of its own; importing torch is most of the work."""
    calls: list[_Call] = pickle.load(sys.stdin.buffer)
    output, sys.stdout = os.fdopen(os.dup(1), "wb"), sys.stderr
    ends = []
    for call in calls:
        end, own_end = os.pipe()
        if os.fork() == 0:
            os.write(own_end, pickle.dumps(_answer(call)))
            os._exit(0)
        os.close(own_end)
        ends.append(os.fdopen(end, "rb"))
    pickle.dump([end.read() for end in ends], output)
    output.close()


def _answer(call: _Call) -> _Answer:
    try:
        dist.init_process_group(
            "gloo", init_method=_STORE, rank=call.rank, world_size=call.world_size
        )
        result = call.fn(call.rank, call.world_size, *call.args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        return _Answer(None, traceback.format_exc())
    return _Answer(result, None)
