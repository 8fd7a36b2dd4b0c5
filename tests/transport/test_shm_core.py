"""The shared-memory core through its binding: all members of a group in one process.

`native/shm_stress.cpp` runs random operations of the core on threads and processes. A sample runs
here; `make sanitize` runs all of it under sanitizers.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import struct
import subprocess
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fddp.native import extension
from tests.support.crews import COPIED, IN_PLACE, MIB, Crew, crew_of, outcome, run
from tests.support.programs import ROOT, run_program, run_python
from tests.support.ranks import run_fresh

if TYPE_CHECKING:
    from collections.abc import Callable


_C = extension.load()


# Order, waiting, endings


def test_operations_finish_in_any_order_of_waiting(crews: Callable[[int], Crew]) -> None:
    crew = crews(3)
    numels = [
        7,
        IN_PLACE,
        0,
        COPIED,
        IN_PLACE * 3,
        1,
    ] * 30  # more than the control block has room for
    waves = []
    for group, arena in zip(crew.groups, crew.arenas, strict=True):
        wave = [arena.empty(numel, torch.float32).fill_(1.0) for numel in numels]
        waves.append([(tensor, group.start("all_reduce", tensor)) for tensor in wave])
    for rank, wave in enumerate(waves):
        random.Random(rank).shuffle(wave)
        for tensor, operation in wave:
            assert operation.status_within(20.0) == _C.SHM_OK
            assert operation.done
            assert bool((tensor == 3.0).all())


def test_a_wait_ends_after_its_slice_and_can_be_repeated(crews: Callable[[int], Crew]) -> None:
    crew = crews(2)
    first = crew.groups[0].start("all_reduce", torch.ones(4), prompt=True)
    assert first.status_within(0.05) == _C.SHM_PENDING
    assert not first.done
    assert first.done_s is None
    second = crew.groups[1].start("all_reduce", torch.ones(4))
    assert outcome([first, second]) == {_C.SHM_OK}
    assert first.done_s > 0


def test_a_mismatch_is_reported_to_all_and_ends_nothing_else(crews: Callable[[int], Crew]) -> None:
    crew = crews(2)
    for numel in (8, IN_PLACE):
        operations = [
            crew.groups[0].start("all_reduce", torch.ones(numel)),
            crew.groups[1].start("broadcast", torch.ones(2, numel, dtype=torch.int16), src=1),
        ]
        assert outcome(operations) == {_C.SHM_MISMATCH}
        for operation in operations:
            one, other = operation.descriptors()
            assert (one["kind"], one["dtype"], one["shape"]) == (
                "all_reduce",
                torch.float32,
                (numel,),
            )
            assert (other["kind"], other["dtype"]) == ("broadcast", torch.int16)
            assert (other["shape"], other["src"]) == ((2, numel), 1)
    run(crew, "all_reduce", [torch.ones(3), torch.ones(3)])
    assert crew.groups[0].failure == (_C.SHM_OK, (), -1)


def test_absent_members_are_named_to_all() -> None:
    crew = crew_of(3, timeout_s=0.2)
    operations = [crew.groups[rank].start("all_reduce", torch.ones(5)) for rank in (0, 2)]
    assert outcome(operations) == {_C.SHM_TIMEOUT}
    # The one that comes late finds that the others have given up, although all had come.
    assert crew.groups[1].start("all_reduce", torch.ones(5)).status_within(20.0) == _C.SHM_TIMEOUT
    for group in crew.groups:
        assert group.failure[:2] == (_C.SHM_TIMEOUT, (1,))
        assert group.start("all_reduce", torch.ones(5)).status_within(0.0) == _C.SHM_TIMEOUT
        group.shutdown()


def test_leaving_members_are_lost_to_waiting_ones() -> None:
    crew = crew_of(3)
    run(crew, "all_reduce", [torch.ones(IN_PLACE) for _ in range(3)])
    waiting = [crew.groups[rank].start("all_reduce", torch.ones(IN_PLACE)) for rank in (0, 1)]
    crew.groups[2].shutdown()
    assert outcome(waiting) == {_C.SHM_LOST}
    assert crew.groups[0].failure[:2] == (_C.SHM_LOST, (2,))
    assert crew.groups[0].states[2] == "left"


@pytest.mark.parametrize("numel", [COPIED, IN_PLACE])
def test_operations_finished_by_others_are_finished(numel: int) -> None:
    """Also by a rank that comes to it only when another has failed in what follows."""
    crew = crew_of(3)
    late = [arena.empty(numel, torch.float32).fill_(n) for n, arena in enumerate(crew.arenas)]
    pairs = zip(crew.groups, late, strict=True)
    first = [group.start("all_reduce", own, wait_soon=True) for group, own in pairs]
    if numel == IN_PLACE:
        assert first[2].status_within(0.05) == _C.SHM_PENDING, "its part is done, but for the end"
    with ThreadPoolExecutor() as waiting:
        assert set(waiting.map(lambda own: own.status_within(20.0), first[:2])) == {_C.SHM_OK}
    crew.groups[1].shutdown()
    behind = [crew.groups[rank].start("all_reduce", torch.ones(numel)) for rank in (0, 2)]
    assert behind[0].status_within(20.0) == _C.SHM_LOST
    assert first[2].status_within(20.0) == _C.SHM_OK
    assert late[2].unique().tolist() == [3.0]
    assert behind[1].status_within(20.0) == _C.SHM_LOST
    assert crew.groups[2].failure[:2] == (_C.SHM_LOST, (1,))


def test_leaving_ends_pending_operations() -> None:
    crew = crew_of(2)
    operation = crew.groups[0].start("all_reduce", torch.ones(IN_PLACE))
    crew.groups[0].shutdown()
    crew.groups[0].shutdown()
    assert operation.done
    assert operation.status_within(1.0) == _C.SHM_CLOSED
    assert crew.groups[0].start("all_reduce", torch.ones(3)).status_within(1.0) == _C.SHM_CLOSED


def test_a_failure_elsewhere_is_reported_to_all() -> None:
    crew = crew_of(3)
    operation = crew.groups[0].start("all_reduce", torch.ones(IN_PLACE))
    crew.groups[2].fail(_C.SHM_PEER_FAILED, [1])
    assert operation.status_within(20.0) == _C.SHM_PEER_FAILED
    assert crew.groups[0].failure == (_C.SHM_PEER_FAILED, (1,), 2)


PAIR = ((1, 1), (0, 1))  # of two members with one summand each


@pytest.mark.parametrize(
    ("kind", "dtype", "options", "error", "text"),
    [
        ("all_reduce", torch.float32, {"tree": PAIR}, ValueError, "only a sum of a reduce-scatter"),
        (
            "reduce_scatter",
            torch.float32,
            {"tree": PAIR, "average": True},
            ValueError,
            "only a sum of a reduce-scatter",
        ),
        (
            "reduce_scatter",
            torch.float32,
            {"tree": ((1, 1, 1), (0, 1, 1))},
            ValueError,
            "the tree is not a sum over all members",
        ),
        (
            "reduce_scatter",
            torch.float32,
            {"tree": ((1, 1), (0, 2))},
            ValueError,
            "the tree is not a sum over all members",
        ),
        (
            "reduce_scatter",
            torch.float32,
            {"tree": ((2, 1), (0, 1, 1))},
            ValueError,
            "a chunk cannot be divided into the rows",
        ),
        ("broadcast", torch.float32, {"src": 2}, ValueError, "src is not a member of the group"),
        ("broadcast", torch.float32, {"src": -1}, ValueError, "src is not a member of the group"),
        ("all_gather", torch.float32, {}, ValueError, "divided into one chunk of equal size"),
        ("gather", torch.float32, {}, ValueError, "unknown operation 'gather'"),
        ("all_reduce", torch.bool, {}, TypeError, "cannot sum dtype Bool"),
        ("all_reduce", torch.int32, {"average": True}, TypeError, "cannot average dtype Int"),
    ],
)
def test_unsupported_operations_are_refused(
    crews: Callable[[int], Crew],
    kind: str,
    dtype: torch.dtype,
    options: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    numel = 2 if kind == "reduce_scatter" else 3
    with pytest.raises(error, match=text):
        crews(2).groups[0].start(kind, torch.ones(numel, dtype=dtype), **options)


# Control blocks that a faulty process has overwritten. Offsets as in csrc/shm/control_block.h.

_CONTROL_BLOCK, _SLOT, _RING = 128, 128 + 64 * 128 + 64 + 8 * 256, 128


@pytest.mark.parametrize(
    ("at", "data", "status"),
    [
        (0, struct.pack("Q", 7), "SHM_CORRUPT"),  # another operation's
        (8, struct.pack("Q", 64 * MIB - 4), "SHM_CORRUPT"),  # ends outside of the arena
        (8, struct.pack("Q", 2**64 - 64), "SHM_CORRUPT"),  # wraps around
        (8, struct.pack("Q", 4097), "SHM_CORRUPT"),  # between two numbers
        (16, struct.pack("I", 1), "SHM_CORRUPT"),  # a copy where none is due
        (16, struct.pack("I", 99), "SHM_CORRUPT"),  # no such place
        (24, struct.pack("I", 99), "SHM_MISMATCH"),  # no such operation
        (32, struct.pack("I", 9999), "SHM_MISMATCH"),  # no such dtype
        (48, struct.pack("q", 2**60), "SHM_MISMATCH"),  # more elements than there are
    ],
)
def test_a_corrupt_descriptor_is_an_error(at: int, data: bytes, status: str) -> None:
    crew = crew_of(2)
    tensors = [arena.empty(IN_PLACE, torch.float32) for arena in crew.arenas]
    theirs = crew.groups[1].start("all_reduce", tensors[1], wait_soon=True)
    descriptor = crew.control_block + _CONTROL_BLOCK + _SLOT + _RING
    number, offset, where = struct.unpack("QQI", crew.arenas[0].read(descriptor, 20))
    assert (number, where) == (0, 0)
    assert offset > 0
    crew.arenas[0].write(descriptor + at, data)
    ours = crew.groups[0].start("all_reduce", tensors[0], wait_soon=True)
    assert ours.status_within(20.0) == getattr(_C, status)
    assert crew.groups[0].failure[1] == ((1,) if status == "SHM_CORRUPT" else ())
    if status == "SHM_CORRUPT":
        assert theirs.status_within(20.0) == _C.SHM_CORRUPT
    for group in crew.groups:
        group.shutdown()


def _scribbling(rank: int, world_size: int, seed: int) -> int:
    """Run operations while random bytes overwrite the control block; return the rounds."""
    rng = random.Random(seed)
    for _ in range(25):
        crew = crew_of(2, timeout_s=0.05, span_bytes=16 * MIB)
        for _ in range(8):
            numel = rng.choice([10, COPIED, IN_PLACE])
            operations = []
            for group, arena in zip(crew.groups, crew.arenas, strict=True):
                tensor = arena.empty(numel, torch.float32).fill_(1.0)
                operations.append(group.start(rng.choice(["all_reduce", "all_gather"]), tensor))
                begin = rng.choice([64, _CONTROL_BLOCK, _CONTROL_BLOCK + _SLOT])
                begin += crew.control_block + 8 * rng.randrange(32)
                crew.arenas[0].write(begin, rng.randbytes(rng.choice([1, 4, 8])))
            for operation in operations:
                operation.status_within(0.2)
                operation.descriptors()
        for group in crew.groups:
            group.shutdown()
    return 25


def test_corrupt_control_blocks_do_not_end_the_process() -> None:
    (ended,) = run_fresh(1, _scribbling, 3, timeout_s=60.0)
    assert ended == (25, None, 0)


# Processes


_FORKING = """
    import gc, os, resource, sys, time
    import torch
    from tests.support.crews import _C, crew_of, run

    crew = crew_of(2)
    tensors = [arena.empty(50_000, torch.float32).fill_(1.0) for arena in crew.arenas]
    run(crew, "all_reduce", tensors)
    pending = crew.groups[0].start("all_reduce", tensors[0])
    time.sleep(0.05)  # the progress thread sleeps on the control block
    untouched = crew.arenas[0].empty(2**20, torch.float32)
    del untouched  # a free block, of which the parent makes another use than the child
    child = os.fork()
    if child == 0:
        time.sleep(0.3)
        if crew.arenas[0].empty(2**20, torch.float32) is not None or crew.arenas[0].trim() != 0:
            os._exit(8)
        del pending, tensors
        crew.groups[0].shutdown()
        del crew
        gc.collect()
        sys.exit(7)
    mine = crew.arenas[0].empty(2**20, torch.float32).fill_(7.0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert bool((mine == 7.0).all())
    assert crew.groups[1].states == ["active", "active"]
    assert crew.groups[1].start("all_reduce", tensors[1]).status_within(20.0) == _C.SHM_OK
    assert pending.status_within(20.0) == _C.SHM_OK
    assert bool((tensors[0] == 4.0).all())

    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
    try:
        _C.ShmArena(2**30)
    except OSError as error:
        print(error)
    crew.groups[0].start("all_reduce", tensors[0])  # left pending, and its thread asleep
    print("well")
"""


def test_forks_limits_and_exits() -> None:
    """A forked child ends, and its parent's group remains usable; a limit on files is no signal."""
    ended = run_python("-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(_FORKING))
    assert ended.stderr == ""
    assert "RLIMIT_FSIZE" in ended.stdout
    assert ended.stdout.endswith("well\n")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda name: _compiled(name, tmp_path_factory.mktemp(name)))


def _compiled(name: str, folder: Path) -> Path:
    """A program of `tests/native`, compiled as a user would: no torch, no special options."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    sources = sorted((ROOT / "fddp" / "csrc" / "shm").glob("*.cpp"))
    # In one go: most of the time goes into reading headers.
    whole = folder / "whole.cpp"
    files = [*sources, ROOT / "tests" / "native" / f"{name}.cpp"]
    whole.write_text("".join(f'#include "{file}"\n' for file in files), encoding="utf-8")
    options = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", "-DFDDP_NO_CLONES", "-pthread"]
    subprocess.run([compiler, *options, whole, "-o", folder / name], check=True)
    return folder / name


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        (
            "shm_stress",
            ["threads 3 2000 1", "processes 2 2000 2", "processes 4 2000 3", "kill 3 8 4"],
        ),
        ("shm_messages", ["2 200 1", "4 100 2"]),
    ],
)
def test_random_operations(program: Callable[[str], Path], name: str, runs: list[str]) -> None:
    """In one test for each program, so that one worker compiles it."""
    for arguments in runs:
        ended = run_program(str(program(name)), *arguments.split())
        assert ended.stderr == ""
        assert ended.stdout.endswith("all well\n")
