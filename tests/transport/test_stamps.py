"""Works of torch: stamps, taken without Python, which may have ended, and polls before waits."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

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


def gloo() -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))


def test_stamps() -> None:
    backend, begin_s = gloo(), time.perf_counter()
    work = backend.allreduce([torch.ones(4)])
    stamp = extension.load().CompletionTimestamp(work)
    work.wait()
    while stamp.completed_s is None:  # it is taken after those that wait are woken
        assert time.perf_counter() < begin_s + 60.0
    assert begin_s < stamp.completed_s < time.perf_counter()


def test_only_works_with_a_future_have_a_stamp() -> None:
    with pytest.raises(TypeError):
        extension.load().WorkSpin().poll(None)
    with pytest.raises(TypeError):
        extension.load().CompletionTimestamp(None)
    with pytest.raises(RuntimeError):
        extension.load().CompletionTimestamp(dist.Work())


# Polls


def pending() -> tuple[Any, Any]:
    """A work that is completed by its future."""
    future: Any = torch.futures.Future()
    return torch._C._distributed_c10d._create_work_from_future(future), future


def test_a_poll_ends_with_the_work() -> None:
    backend = gloo()
    spin = extension.load().WorkSpin()
    number = torch.ones(1)
    for _ in range(50):
        work = backend.allreduce([number])
        spin.poll(work)
        work.wait()
    assert number.item() == 1.0


def test_a_poll_ends_without_the_work() -> None:
    spin = extension.load().WorkSpin()
    work, future = pending()
    for _ in range(20):
        spin.poll(work)
    assert not work.is_completed()
    future.set_result(None)
    spin.poll(work)
    assert work.is_completed()


def test_other_threads_run_meanwhile() -> None:
    """The poll holds no lock of Python's: the thread that completes the work needs it."""
    spin = extension.load().WorkSpin()
    work, future = pending()
    ended = threading.Event()

    def poll() -> None:
        while not work.is_completed():
            spin.poll(work)
        ended.set()

    thread = threading.Thread(target=poll)
    thread.start()
    future.set_result(None)
    assert ended.wait(10)
    thread.join()
