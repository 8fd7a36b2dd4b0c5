"""Waits for a backend that poll it before they sleep."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fddp.native import extension


@pytest.fixture
def backend(tmp_path: Path) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(
        dist.FileStore(str(tmp_path / "store"), 1), 0, 1, timedelta(seconds=10)
    )


def pending() -> tuple[Any, Any]:
    """A work that is completed by its future."""
    future: Any = torch.futures.Future()
    return torch._C._distributed_c10d._create_work_from_future(future), future


def test_a_poll_ends_with_the_work(backend: dist.ProcessGroupGloo) -> None:
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


def test_other_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        extension.load().WorkSpin().poll(None)
