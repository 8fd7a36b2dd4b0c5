"""Starts ranks as processes of this host, through the launcher that torchrun uses."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

T = TypeVar("T")


def launch(ranks: int, fn: Callable[..., T], *args: Any) -> list[T]:
    """`fn(*args)` on each rank of a new default group over gloo; the results by rank.

    Each rank is a process of its own and computes with one thread, so that timings of different
    systems compare and ranks do not fight for cores.

    Args:
        ranks: number of processes.
        fn: defined at the top of an importable module; what it takes and returns is pickled.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank raised or died,
            and the others were ended. What it raised is on the standard error.
        torch.distributed.elastic.multiprocessing.api.SignalException: this process was told to
            end, and the ranks were ended.
    """
    with _own_signals(), tempfile.TemporaryDirectory(prefix="fddp_") as log_dir:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            max_restarts=0,
            start_method="spawn",
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=log_dir),
        )
        results = elastic_launch(config, _on_rank)(fn, *args)
    return [results[rank] for rank in range(ranks)]


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keeps this process's handlers of signals: the launcher leaves its own behind."""
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
    is_main = threading.current_thread() is threading.main_thread()  # only there they can be set
    kept = {number: signal.getsignal(number) for number in numbers} if is_main else {}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None:  # one that Python did not set
                signal.signal(number, handler)


def _on_rank(fn: Callable[..., T], *args: Any) -> T:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for what this process starts itself
    dist.init_process_group("gloo")
    try:
        result = fn(*args)
    except Exception:
        # At once: the others now fail as well, and the launcher may log one of them instead.
        print(f"rank {dist.get_rank()} failed:\n{traceback.format_exc()}", file=sys.stderr)
        raise
    dist.destroy_process_group()
    return result
