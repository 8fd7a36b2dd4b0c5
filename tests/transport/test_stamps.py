"""Stamps of works of torch: taken without Python, which may have ended."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fddp.native import extension
from tests.support.polling import HANG_S

# Rank 0 ends its interpreter while an operation is under way, and its process once its input ends.
PROGRAM = """
import atexit, ctypes, os, sys
from datetime import timedelta
import torch, torch.distributed as dist
from fddp.transport import open_transport

rank, port = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
limit = timedelta(seconds=60)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
transport = open_transport(dist.group.WORLD, "c10d", 60.0)
if rank == 1:
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)
work = transport.all_reduce(torch.ones(4), record_time=True)
for kept in (work, transport, dist.group.WORLD):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # what is freed would be waited for
ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).getchar)
atexit.register(print, "ready", flush=True)
sys.exit(7)
"""
_ENDS_WITHIN_S = 1.0  # the interpreter, once it has begun to end


def test_an_operation_may_fail_after_the_interpreter_has_ended() -> None:
    """The process ends with its own exit code, not by SIGABRT."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(store.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    )
    with first, second:
        assert first.stdout is not None
        assert second.stdout is not None
        assert first.stdin is not None
        assert (first.stdout.readline(), second.stdout.readline()) == ("ready\n", "ready\n")
        time.sleep(_ENDS_WITHIN_S)
        assert first.poll() is None
        second.communicate(timeout=HANG_S)
        time.sleep(_ENDS_WITHIN_S)
        first.communicate(timeout=HANG_S)
        assert (first.returncode, second.returncode) == (7, 0)


def test_stamps() -> None:
    store = dist.HashStore()
    gloo = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=20))
    begin_s = time.perf_counter()
    work = gloo.allreduce([torch.ones(4)])
    stamp = extension.load().CompletionTimestamp(work)
    work.wait()
    while stamp.completed_s is None:  # it is taken after those that wait are woken
        assert time.perf_counter() < begin_s + 60.0
    assert begin_s < stamp.completed_s < time.perf_counter()


def test_a_work_without_a_future_has_no_stamp() -> None:
    with pytest.raises(TypeError):
        extension.load().CompletionTimestamp(None)
    with pytest.raises(RuntimeError):
        extension.load().CompletionTimestamp(dist.Work())
