"""Arenas of shared memory: blocks, their lifetime, and limits of the system."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fddp.native import extension
from tests.support.crews import MIB

if TYPE_CHECKING:
    from torch import Tensor


_C = extension.load()


@pytest.mark.slow
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
    with pytest.raises(ValueError, match="number of addressable elements, got -1"):
        arena.empty(-1, torch.float32)
    with pytest.raises(ValueError, match=r"number of addressable elements, got \d+"):
        arena.empty(2**62, torch.float64)


def test_only_an_arena_is_adopted() -> None:
    arena = _C.ShmArena(4 * MIB)
    with pytest.raises(ValueError, match="the file has 4194304 bytes, expected 2097152"):
        _C.ShmView(arena.fd, 2 * MIB)
    for span in (0, -1, 4 * MIB + 4096, 2**63):
        with pytest.raises((ValueError, OSError, TypeError)):
            _C.ShmView(arena.fd, span)
    with open(os.devnull, "rb") as file, pytest.raises(ValueError, match="not refer to an anonym"):
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
    offset = arena.allocate_zeroed(16)
    view.write(offset, b"sent to the peer")
    assert arena.read(offset, 16) == b"sent to the peer"
    for begin, count in [(4 * MIB - 8, 16), (2**63, 1), (8, 2**64 - 8)]:
        with pytest.raises(ValueError, match="lie outside an arena of 4194304 bytes"):
            view.read(begin, count)


def test_a_control_block_is_checked_before_it_is_used() -> None:
    arenas = [_C.ShmArena(16 * MIB) for _ in range(2)]
    views = [None, _C.ShmView(arenas[1].fd, 16 * MIB)]
    control_block = arenas[0].make_control_block(3)
    with pytest.raises(
        ValueError, match=rf"no control block of 2 members at offset {control_block}"
    ):
        _C.ShmBackend(arenas[0], views, 0, control_block, 1.0)
    with pytest.raises(
        ValueError, match="control block is misaligned or outside of the arena of 16777216"
    ):
        _C.ShmBackend(arenas[0], views, 0, 2**63, 1.0)


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
    texts = {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   1000 kB\n",
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert _C.shm_available_bytes(str(tmp_path)) == expected
