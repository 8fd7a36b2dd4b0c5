"""The shared-memory core through its binding: ranks are teams of one process, without transports.

The core itself, on threads and processes, at random: `native/shm_stress.cpp`, of which a sample
runs here and all of it under sanitizers by `make sanitize`.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import random
import shutil
import struct
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fddp.native import extension
from tests.support.crews import MIB, Crew, crew_of, outcome, run
from tests.support.ranks import run_fresh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

_C = extension.load()
_COPIED, _IN_PLACE = 1024, 40_000  # numbers of elements: far below and above where copying ends


@pytest.fixture(scope="module")
def crews() -> Iterator[Callable[[int], Crew]]:
    """One crew of each size, for tests that leave it well."""
    made: dict[int, Crew] = {}

    def get(size: int) -> Crew:
        if size not in made:
            made[size] = crew_of(size)
        return made[size]

    yield get
    for crew in made.values():
        for team in crew.teams:
            team.leave()


# Sums


DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
    torch.uint8: torch.uint8,
    torch.int8: torch.int8,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
}


AVERAGED = [dtype for dtype in DTYPES if dtype.is_floating_point or dtype.is_complex]


def awkward(dtype: torch.dtype, numel: int, seed: int) -> Tensor:
    """Numbers of all magnitudes, with special ones among them where the dtype has them."""
    generator = torch.Generator().manual_seed(seed)
    if not (dtype.is_floating_point or dtype.is_complex):
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, (numel,), generator=generator, dtype=dtype)
    real = torch.float32 if dtype == torch.complex64 else torch.float64
    real = real if dtype.is_complex else dtype
    count = numel * (2 if dtype.is_complex else 1)
    info = torch.finfo(real)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    exponents = torch.randint(
        int(math.log2(info.tiny)) - 8, int(math.log2(info.max)), (count,), generator=generator
    )
    wide = torch.where(torch.rand(count, generator=generator) < 0.5, exponents, 0)
    values = (values * torch.pow(2.0, wide.double())).to(real)
    specials = torch.tensor(
        [math.nan, math.inf, -math.inf, 0.0, -0.0, info.max, -info.max, info.tiny, info.tiny / 8],
        dtype=real,
    )
    places = torch.randint(0, count, (max(1, count // 16),), generator=generator)
    kinds = torch.randint(0, len(specials), places.shape, generator=generator)
    values[places] = specials[kinds]
    return values.view(dtype) if dtype.is_complex else values


def expected_sum(tensors: Sequence[Tensor], order: tuple[int, ...], average: bool) -> Tensor:
    """By torch: partial sums along the innermost axis first, rounded once."""
    dtype = tensors[0].dtype
    parts = [_as_real(tensor).to(DTYPES.get(_as_real(tensor).dtype)) for tensor in tensors]
    for size in reversed(order or (len(parts),)):
        rows = [parts[i : i + size] for i in range(0, len(parts), size)]
        parts = [_add_up(row) for row in rows]
    (total,) = parts
    total = total / len(tensors) if average else total
    return total.to(_as_real(tensors[0]).dtype).view(dtype)


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor


def _add_up(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal, signs of zeros too; any NaN is as good as another."""
    actual, expected = _as_real(actual), _as_real(expected)
    assert actual.dtype == expected.dtype
    if actual.is_floating_point():
        nan = expected.isnan()
        assert torch.equal(actual.isnan(), nan)
        actual, expected = actual[~nan], expected[~nan]
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "average"),
    [*((dtype, False) for dtype in DTYPES), *((dtype, True) for dtype in AVERAGED)],
    ids=str,
)
def test_sums_have_the_bits_of_torch(
    crews: Callable[[int], Crew], dtype: torch.dtype, average: bool
) -> None:
    for size, order in [(2, ()), (3, ()), (4, ()), (4, (2, 2)), (6, (3, 2)), (6, (2, 3))]:
        crew = crews(size)
        for numel in (1, 17, _COPIED + 5, _IN_PLACE + 13):
            inputs = [awkward(dtype, numel, seed=numel + rank) for rank in range(size)]
            expected = expected_sum(inputs, order, average)
            for start in (0, 1):  # the first element lies on a line of the cache, or does not
                tensors = []
                for arena, values in zip(crew.arenas, inputs, strict=True):
                    tensors.append(arena.empty(numel + start, dtype)[start:])
                    tensors[-1].copy_(values)
                run(crew, "all_reduce", tensors, average=average, order=order)
                for tensor in tensors:
                    assert_same_bits(tensor, expected)


@pytest.mark.parametrize("numel", [_COPIED, _IN_PLACE])
def test_reduce_scatter_writes_the_own_chunk(crews: Callable[[int], Crew], numel: int) -> None:
    crew = crews(4)
    inputs = [awkward(torch.float32, numel, seed=rank) for rank in range(4)]
    tensors = [arena.empty(numel, torch.float32) for arena in crew.arenas]
    for tensor, values in zip(tensors, inputs, strict=True):
        tensor.copy_(values)
    run(crew, "reduce_scatter", tensors, order=(2, 2), average=True)
    expected = expected_sum(inputs, (2, 2), True).chunk(4)
    for rank, tensor in enumerate(tensors):
        assert_same_bits(tensor.chunk(4)[rank], expected[rank])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_precision_value_is_kept(
    crews: Callable[[int], Crew], dtype: torch.dtype
) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    for size in (2, 3):  # the loop for pairs, and that for more
        others = [torch.full_like(every, -0.0) for _ in range(size - 1)]
        tensors = [every.clone(), *others]
        run(crews(size), "all_reduce", tensors)
        for tensor in tensors:
            assert_same_bits(tensor, every)


@settings(max_examples=30)
@given(data=st.data())
def test_staged_and_shared_memory_mix(crews_of_three: Crew, data: st.DataObject) -> None:
    """Some ranks' tensors lie in their arenas and others' anywhere, at any alignment."""
    crew, size = crews_of_three, 3
    numel = size * data.draw(st.integers(0, 400_000), label="numel of a chunk")
    kind = data.draw(st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "broadcast"]))
    tensors = []
    for rank, arena in enumerate(crew.arenas):
        place = data.draw(st.sampled_from(["arena", "heap", "unaligned"]), label=f"rank {rank}")
        if place == "arena":
            tensor = arena.empty(numel, torch.float32)
        elif place == "heap" or numel == 0:
            tensor = torch.empty(numel)
        else:
            tensor = torch.frombuffer(bytearray(4 * numel + 1), dtype=torch.float32, offset=1)
        tensors.append(tensor.copy_(torch.arange(numel) % 1000 * (rank + 1)))
    inputs = [tensor.clone() for tensor in tensors]
    run(crew, kind, tensors, **({"src": 1} if kind == "broadcast" else {}))
    for rank, tensor in enumerate(tensors):
        mine = slice(rank * numel // size, (rank + 1) * numel // size)
        if kind == "all_reduce":
            assert torch.equal(tensor, sum(inputs))
        elif kind == "reduce_scatter":
            assert torch.equal(tensor[mine], sum(inputs)[mine])
        elif kind == "all_gather":
            chunks = [values.chunk(size)[r] for r, values in enumerate(inputs) if numel]
            assert torch.equal(tensor, torch.cat(chunks) if chunks else tensor)
        else:
            assert torch.equal(tensor, inputs[1])


@pytest.fixture(scope="module")
def crews_of_three(crews: Callable[[int], Crew]) -> Crew:
    return crews(3)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.complex128], ids=str)
def test_gathers_carry_any_dtype(crews: Callable[[int], Crew], dtype: torch.dtype) -> None:
    crew = crews(2)
    for numel in (6, _IN_PLACE):
        inputs = [(torch.arange(numel) % (3 + rank) == 0).to(dtype) for rank in range(2)]
        tensors = [values.clone() for values in inputs]
        run(crew, "broadcast", tensors, src=1)
        assert all(torch.equal(tensor, inputs[1]) for tensor in tensors)
    with pytest.raises(TypeError, match="no sums of Bool"):
        crew.teams[0].start("all_reduce", torch.zeros(3, dtype=torch.bool))


# Order, waiting, endings


def test_operations_finish_in_any_order_of_waiting(crews: Callable[[int], Crew]) -> None:
    crew = crews(3)
    numels = [7, _IN_PLACE, 0, _COPIED, _IN_PLACE * 3, 1] * 30  # more than the board has room for
    waves = []
    for team, arena in zip(crew.teams, crew.arenas, strict=True):
        wave = [arena.empty(numel, torch.float32).fill_(1.0) for numel in numels]
        waves.append([(tensor, team.start("all_reduce", tensor)) for tensor in wave])
    for rank, wave in enumerate(waves):
        random.Random(rank).shuffle(wave)
        for tensor, operation in wave:
            assert operation.wait(20.0) == _C.SHM_OK
            assert operation.done
            assert bool((tensor == 3.0).all())
    assert len({operation.number for _, operation in waves[0]}) == len(numels)


def test_a_wait_ends_after_its_slice_and_can_be_repeated(crews: Callable[[int], Crew]) -> None:
    crew = crews(2)
    first = crew.teams[0].start("all_reduce", torch.ones(4), stamp=True)
    assert first.wait(0.05) == _C.SHM_PENDING
    assert not first.done
    assert first.done_s is None
    second = crew.teams[1].start("all_reduce", torch.ones(4))
    assert outcome([first, second]) == {_C.SHM_OK}
    assert first.done_s > 0


def test_a_mismatch_is_reported_to_all_and_ends_nothing_else(crews: Callable[[int], Crew]) -> None:
    crew = crews(2)
    for numel in (8, _IN_PLACE):
        operations = [
            crew.teams[0].start("all_reduce", torch.ones(numel)),
            crew.teams[1].start("broadcast", torch.ones(2, numel, dtype=torch.int16), src=1),
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
    assert crew.teams[0].failure == (_C.SHM_OK, (), -1)


def test_absent_members_are_named_to_all() -> None:
    crew = crew_of(3, timeout_s=0.2)
    operations = [crew.teams[rank].start("all_reduce", torch.ones(5)) for rank in (0, 2)]
    assert outcome(operations) == {_C.SHM_TIMEOUT}
    # The one that comes late finds that the others have given up, although all had come.
    assert crew.teams[1].start("all_reduce", torch.ones(5)).wait(20.0) == _C.SHM_TIMEOUT
    for team in crew.teams:
        assert team.failure[:2] == (_C.SHM_TIMEOUT, (1,))
        assert team.start("all_reduce", torch.ones(5)).wait(0.0) == _C.SHM_TIMEOUT
        team.leave()


def test_leaving_members_are_lost_to_waiting_ones() -> None:
    crew = crew_of(3)
    run(crew, "all_reduce", [torch.ones(_IN_PLACE) for _ in range(3)])
    waiting = [crew.teams[rank].start("all_reduce", torch.ones(_IN_PLACE)) for rank in (0, 1)]
    crew.teams[2].leave()
    assert outcome(waiting) == {_C.SHM_LOST}
    assert crew.teams[0].failure[:2] == (_C.SHM_LOST, (2,))
    assert crew.teams[0].states[2] == "left"


@pytest.mark.parametrize("numel", [_COPIED, _IN_PLACE])
def test_operations_finished_by_others_are_finished(numel: int) -> None:
    """Also by a rank that comes to it only when another has failed in what follows."""
    crew = crew_of(3)
    late = [arena.empty(numel, torch.float32).fill_(n) for n, arena in enumerate(crew.arenas)]
    pairs = zip(crew.teams, late, strict=True)
    first = [team.start("all_reduce", own, soon=True) for team, own in pairs]
    if numel == _IN_PLACE:
        assert first[2].wait(0.05) == _C.SHM_PENDING, "its part is done, but for the end"
    with ThreadPoolExecutor() as waiting:
        assert set(waiting.map(lambda own: own.wait(20.0), first[:2])) == {_C.SHM_OK}
    crew.teams[1].leave()
    behind = [crew.teams[rank].start("all_reduce", torch.ones(numel)) for rank in (0, 2)]
    assert behind[0].wait(20.0) == _C.SHM_LOST
    assert first[2].wait(20.0) == _C.SHM_OK
    assert late[2].unique().tolist() == [3.0]
    assert behind[1].wait(20.0) == _C.SHM_LOST
    assert crew.teams[2].failure[:2] == (_C.SHM_LOST, (1,))


def test_leaving_ends_what_is_pending_here() -> None:
    crew = crew_of(2)
    operation = crew.teams[0].start("all_reduce", torch.ones(_IN_PLACE))
    crew.teams[0].leave()
    crew.teams[0].leave()
    assert operation.done
    assert operation.wait(1.0) == _C.SHM_CLOSED
    assert crew.teams[0].start("all_reduce", torch.ones(3)).wait(1.0) == _C.SHM_CLOSED


def test_a_failure_elsewhere_is_reported_to_all() -> None:
    crew = crew_of(3)
    operation = crew.teams[0].start("all_reduce", torch.ones(_IN_PLACE))
    crew.teams[2].fail(_C.SHM_TOLD, [1])
    assert operation.wait(20.0) == _C.SHM_TOLD
    assert crew.teams[0].failure == (_C.SHM_TOLD, (1,), 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"order": (2, 2)}, "must have the number of members as their product"),
        ({"order": (0, 2)}, "order has an axis of 0"),
        ({"order": (1,) * 7}, "order has more than 6 axes"),
        ({"src": 2}, "src is no member"),
        ({"src": -1}, "src is no member"),
    ],
)
def test_unsupported_operations_are_refused(
    crews: Callable[[int], Crew], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        crews(2).teams[0].start("all_reduce", torch.ones(4), **options)


def test_unequal_chunks_and_averages_of_whole_numbers_are_refused(
    crews: Callable[[int], Crew],
) -> None:
    team = crews(2).teams[0]
    with pytest.raises(ValueError, match="unequal chunks"):
        team.start("all_gather", torch.ones(3))
    with pytest.raises(TypeError, match="no averages of Int"):
        team.start("all_reduce", torch.ones(3, dtype=torch.int32), average=True)
    with pytest.raises(ValueError, match="there is no operation gather"):
        team.start("gather", torch.ones(3))


# Arenas


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(0, 3 * MIB)),
            st.tuples(st.just("drop"), st.integers(0, 30)),
        ),
        max_size=60,
    )
)
def test_blocks_do_not_overlap_and_are_used_again(steps: list[tuple[str, int]]) -> None:
    arena = _C.ShmArena(32 * MIB)
    held: list[tuple[Tensor, int]] = []
    most = 0
    for number, (step, value) in enumerate(steps):
        if step == "drop" and held:
            tensor, mark = held.pop(value % len(held))
            assert bool((tensor == mark).all())
            del tensor
        elif step == "take":
            tensor = arena.empty(value, torch.uint8)
            if tensor is None:
                assert arena.used + value > 16 * MIB, "refused with half of the arena free"
            else:
                held.append((tensor.fill_(number % 251), number % 251))
            del tensor
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel()) for t, _ in held if t.numel())
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert all(begin % 64 == 0 for begin, _ in spans)
        assert sum(end - begin for begin, end in spans) <= arena.used <= arena.reserved
        assert all(arena.holds(t) for t, _ in held if t.numel())
        most = max(most, arena.used)
    held.clear()
    assert arena.used == 0
    # All is one stretch again, and its pages can be given back.
    assert arena.empty(32 * MIB, torch.uint8) is not None
    assert arena.trim() == 32 * MIB
    assert arena.reserved == 0


def test_a_full_arena_gives_none() -> None:
    arena = _C.ShmArena(4 * MIB)
    held = arena.empty(3 * MIB, torch.uint8)
    assert arena.empty(2 * MIB, torch.uint8) is None
    assert arena.empty(2**62, torch.uint8) is None
    del held
    assert arena.empty(4 * MIB, torch.uint8) is not None
    with pytest.raises(ValueError, match=r"numel=-1 is no number of elements"):
        arena.empty(-1, torch.float32)
    with pytest.raises(ValueError, match=r"numel=\d+ is no number of elements"):
        arena.empty(2**62, torch.float64)


def mapped_arenas() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:fddp")


def test_memory_lives_as_long_as_it_is_used() -> None:
    gc.collect()
    before = mapped_arenas(), len(os.listdir("/proc/self/fd"))
    crew = crew_of(2)
    tensor = crew.arenas[0].empty(1000, torch.float64)
    other = torch.empty(1000, dtype=torch.float64)
    run(crew, "broadcast", [tensor.fill_(2.5), other], src=0)
    del crew
    gc.collect()
    assert mapped_arenas() == before[0] + 1
    view = tensor[10:20]
    del tensor
    assert bool((view == 2.5).all())
    del view
    assert (mapped_arenas(), len(os.listdir("/proc/self/fd"))) == before


def test_only_an_arena_is_adopted() -> None:
    arena = _C.ShmArena(4 * MIB)
    with pytest.raises(ValueError, match=r"the file has 4194304 bytes, not the 2097152 that were"):
        _C.ShmView(arena.fd, 2 * MIB)
    with open(os.devnull, "rb") as file, pytest.raises(ValueError, match="not that of an anonym"):
        _C.ShmView(file.fileno(), 4 * MIB)
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.truncate(unsealed, 4 * MIB)
        with pytest.raises(ValueError, match=r"the file's size is not sealed \(seals 0\)"):
            _C.ShmView(unsealed, 4 * MIB)
    finally:
        os.close(unsealed)
    with pytest.raises(PermissionError):
        os.truncate(arena.fd, 2 * MIB)
    view = _C.ShmView(arena.fd, 4 * MIB)
    offset = arena.block(16)
    view.write(offset, b"told to the peer")
    assert arena.read(offset, 16) == b"told to the peer"
    for begin, count in [(4 * MIB - 8, 16), (2**63, 1), (8, 2**64 - 8)]:
        with pytest.raises(ValueError, match="lie outside an arena of 4194304"):
            view.read(begin, count)


def test_a_board_is_checked_before_it_is_used() -> None:
    arenas = [_C.ShmArena(16 * MIB) for _ in range(2)]
    views = [None, _C.ShmView(arenas[1].fd, 16 * MIB)]
    board = arenas[0].board(3)
    with pytest.raises(ValueError, match=rf"no board of 2 members at offset {board}"):
        _C.ShmTeam(arenas[0], views, 0, board, [-1, -1], 1.0)
    with pytest.raises(ValueError, match="lies outside its arena"):
        _C.ShmTeam(arenas[0], views, 0, 2**63, [-1, -1], 1.0)


# Boards that a process which went wrong has written on. Offsets as in csrc/shm/board.h.

_BOARD, _SEAT, _RING = 128, 128 + 64 * 128, 128


def _spoilt(crew: Crew, at: int, data: bytes) -> tuple[int, tuple[int, ...]]:
    """How rank 0 fares, and whom it blames, where rank 1's descriptor was spoilt."""
    tensors = [arena.empty(_IN_PLACE, torch.float32) for arena in crew.arenas]
    operation = crew.teams[1].start("all_reduce", tensors[1], soon=True)
    descriptor = crew.board + _BOARD + _SEAT + _RING
    number, offset, where = struct.unpack("QQI", crew.arenas[0].read(descriptor, 20))
    assert (number, where) == (0, 0)
    assert offset > 0
    crew.arenas[0].write(descriptor + at, data)
    status = crew.teams[0].start("all_reduce", tensors[0], soon=True).wait(20.0)
    blamed = crew.teams[0].failure[1]
    if status != _C.SHM_MISMATCH:
        assert operation.wait(20.0) == status
    return status, blamed


@pytest.mark.parametrize(
    ("at", "data", "status"),
    [
        (0, struct.pack("Q", 7), "SHM_BROKEN"),  # another operation's
        (8, struct.pack("Q", 64 * MIB - 4), "SHM_BROKEN"),  # ends outside of the arena
        (8, struct.pack("Q", 2**64 - 64), "SHM_BROKEN"),  # wraps around
        (8, struct.pack("Q", 4097), "SHM_BROKEN"),  # between two numbers
        (16, struct.pack("I", 1), "SHM_BROKEN"),  # a copy where none is due
        (16, struct.pack("I", 99), "SHM_BROKEN"),  # no such place
        (24, struct.pack("I", 99), "SHM_MISMATCH"),  # no such operation
        (32, struct.pack("I", 9999), "SHM_MISMATCH"),  # no such dtype
        (48, struct.pack("q", 2**60), "SHM_MISMATCH"),  # more elements than there are
    ],
)
def test_a_spoilt_descriptor_is_an_error(at: int, data: bytes, status: str) -> None:
    crew = crew_of(2)
    found, blamed = _spoilt(crew, at, data)
    assert found == getattr(_C, status)
    assert blamed == ((1,) if status == "SHM_BROKEN" else ())
    for team in crew.teams:
        team.leave()


def _scribbling(rank: int, world_size: int, seed: int) -> int:
    """Operations while random bytes are written over the board; how many rounds there were."""
    rng = random.Random(seed)
    for _ in range(25):
        crew = crew_of(2, timeout_s=0.05, span_bytes=16 * MIB)
        for _ in range(8):
            numel = rng.choice([10, _COPIED, _IN_PLACE])
            operations = []
            for team, arena in zip(crew.teams, crew.arenas, strict=True):
                tensor = arena.empty(numel, torch.float32).fill_(1.0)
                operations.append(team.start(rng.choice(["all_reduce", "all_gather"]), tensor))
                begin = rng.choice([64, _BOARD, _BOARD + _SEAT]) + 8 * rng.randrange(32)
                crew.arenas[0].write(crew.board + begin, rng.randbytes(rng.choice([1, 4, 8])))
            for operation in operations:
                operation.wait(0.2)
                operation.descriptors()
        for team in crew.teams:
            team.leave()
    return 25


def test_corrupt_boards_do_not_end_the_process() -> None:
    (ended,) = run_fresh(1, _scribbling, 3, timeout_s=60.0)
    assert ended == (25, None, 0)


# Processes


_FORKING = """
    import gc, os, resource, sys, time
    import torch
    sys.path.insert(0, {tests!r})
    from tests.support.crews import _C, crew_of, run

    crew = crew_of(2)
    tensors = [arena.empty(50_000, torch.float32).fill_(1.0) for arena in crew.arenas]
    run(crew, "all_reduce", tensors)
    pending = crew.teams[0].start("all_reduce", tensors[0])
    time.sleep(0.05)  # the progress thread sleeps on the board
    untouched = crew.arenas[0].empty(2**20, torch.float32)
    del untouched  # a free block, of which the parent makes another use than the child
    child = os.fork()
    if child == 0:
        time.sleep(0.3)
        if crew.arenas[0].empty(2**20, torch.float32) is not None or crew.arenas[0].trim() != 0:
            os._exit(8)
        del pending, tensors
        crew.teams[0].leave()
        del crew
        gc.collect()
        sys.exit(7)
    mine = crew.arenas[0].empty(2**20, torch.float32).fill_(7.0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert bool((mine == 7.0).all())
    assert crew.teams[1].states == ["here", "here"]
    assert crew.teams[1].start("all_reduce", tensors[1]).wait(20.0) == _C.SHM_OK
    assert pending.wait(20.0) == _C.SHM_OK
    assert bool((tensors[0] == 4.0).all())

    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
    try:
        _C.ShmArena(2**30)
    except OSError as error:
        print(error)
    crew.teams[0].start("all_reduce", tensors[0])  # left pending, and its thread asleep
    print("well")
"""


def test_forks_limits_and_exits() -> None:
    """A forked child ends, and its parent's team goes on; a limit on files is no signal."""
    script = textwrap.dedent(_FORKING).format(tests=str(Path(__file__).parents[2]))
    ended = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "RLIMIT_FSIZE" in ended.stdout
    assert ended.stdout.endswith("well\n")


@pytest.mark.parametrize("numel", [_COPIED, _IN_PLACE])
def test_bits_do_not_depend_on_the_thread_that_adds_up(
    crews: Callable[[int], Crew], numel: int
) -> None:
    """Threads differ in what they do with subnormal numbers; which one carries out is chance."""
    crew, tiny = crews(2), torch.full((numel,), 1e-39)
    # What is left to those who wait, and what the progress threads hurry with.
    for options in ({"soon": numel == _COPIED}, {"stamp": True}):
        tensors = [tiny.clone(), tiny.clone()]
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor can't flush subnormal numbers")
        try:
            run(crew, "all_reduce", tensors, **options)
        finally:
            torch.set_flush_denormal(False)
        assert all(torch.equal(tensor, tiny + tiny) for tensor in tensors)


def _system(root: Path, available_kib: int, groups: str, files: dict[str, str]) -> int:
    """What is available on a system whose files say so."""
    texts = {
        "proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:   {available_kib} kB\n",
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return int(_C.shm_available_bytes(str(root)))


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {}, 1000 * 1024),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/b/memory.current": "5\n"}, 1000 * 1024),
        ("0::/a/b\n", {"a/b/memory.max": "900\n", "a/b/memory.current": "300\n"}, 600),
        ("0::/a/b\n", {"a/memory.max": "900\n", "a/memory.current": "950\n"}, 0),
        (
            "0::/\n",
            {
                "memory.max": "900\n",
                "memory.current": "600\n",
                "memory.stat": "anon 1\ninactive_file 250\n",
            },
            550,
        ),
        (
            "5:cpu,memory:/c\n1:name=systemd:/\n",
            {
                "memory/c/memory.limit_in_bytes": "800\n",
                "memory/c/memory.usage_in_bytes": "100\n",
            },
            700,
        ),
    ],
)
def test_limits_of_control_groups_count(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    assert _system(tmp_path, 1000, groups, files) == expected


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stress program, compiled as a user would: no torch, no special options."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    root = Path(__file__).parents[2]
    sources = sorted((root / "fddp" / "csrc" / "shm").glob("*.cpp"))
    folder = tmp_path_factory.mktemp("stress")
    # In one go: most of the time goes into reading headers.
    whole = folder / "whole.cpp"
    files = [*sources, root / "tests" / "native" / "shm_stress.cpp"]
    whole.write_text("".join(f'#include "{file}"\n' for file in files), encoding="utf-8")
    program = folder / "shm_stress"
    options = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", "-DFDDP_NO_CLONES", "-pthread"]
    subprocess.run([compiler, *options, whole, "-o", program], check=True)
    return program


@pytest.mark.parametrize(
    "arguments",
    ["threads 3 2000 1", "processes 2 2000 2", "processes 4 2000 3", "kill 3 8 4"],
)
def test_random_operations(stress: Path, arguments: str) -> None:
    ended = subprocess.run(
        [stress, *arguments.split()], capture_output=True, text=True, timeout=100
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("all well\n")
