"""Ends of processes that have not destroyed their groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import torchrun

# More callbacks than can be called before the end. Python would end a thread of the backend that
# calls one later, or that releases a tensor: SIGABRT.
_PENDING_CALLBACKS = """
import atexit, os, torch, torch.distributed as dist
import fddp
dist.init_process_group("fddp")
{before}
size = {size}
kept = []
for _ in range(300):
    work = dist.all_reduce(torch.ones(size), async_op=True)
    kept.append(work.get_future().then(lambda future: torch.ones(3)))
messages = [dist.irecv(torch.ones(3), 1 - dist.get_rank(), tag=tag) for tag in range(9)]
kept += [message.get_future().then(lambda future: torch.ones(3)) for message in messages]
"""
# C++ objects may keep a group beyond the interpreter.
_LEAKED = """
import ctypes
for leaked in (dist.group.WORLD, kept):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(leaked))
"""


def _ends_with_0(tmp_path: Path, program: str) -> str:
    script = tmp_path / "program.py"
    script.write_text(program)
    return torchrun(str(script)).stdout


@pytest.mark.parametrize("size", [4, 100_000])
def test_pending_callbacks(tmp_path: Path, size: int) -> None:
    _ends_with_0(tmp_path, _PENDING_CALLBACKS.format(before="", size=size) + _LEAKED)


def test_handlers_at_exit_may_use_groups(tmp_path: Path) -> None:
    before = """
def end():
    total = torch.ones(3)
    dist.all_reduce(total)
    os.write(1, f"total {total[0].item()}\\n".encode())  # at once
    dist.destroy_process_group()
atexit.register(end)
"""
    program = _PENDING_CALLBACKS.format(before=before, size=4)
    assert _ends_with_0(tmp_path, program).count("total 2.0") == 2
