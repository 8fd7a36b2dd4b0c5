"""Start ranks as processes of this host, by the launcher of torchrun."""

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


def launch(ranks: int, fn: Callable[..., T], *args: Any, backend: str = "gloo") -> list[T]:
    """Run `fn(*args)` on each rank of a new default group, and return the results.

    Each rank is a process with one compute thread, so that timings are comparable and ranks do not
    compete for cores.

    Args:
        ranks: number of processes.
        fn: a function of an importable module; its arguments and results are pickled.
        backend: of the group.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank raised or died,
            and the others were ended. Its error is on the standard error.
        torch.distributed.elastic.multiprocessing.api.SignalException: this process received a
            signal, and the ranks were ended.
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
        results = elastic_launch(config, _on_rank)(backend, fn, *args)
    return [results[rank] for rank in range(ranks)]


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore this process's signal handlers, which the launcher replaces."""
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
    is_main = threading.current_thread() is threading.main_thread()  # only there can they be set
    kept = {number: signal.getsignal(number) for number in numbers} if is_main else {}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None:  # None: not set by Python
                signal.signal(number, handler)


def _on_rank(backend: str, fn: Callable[..., T], *args: Any) -> T:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for processes that this one starts
    dist.init_process_group(backend)
    try:
        result = fn(*args)
    except Exception:
        # Print at once: the others fail next, and the launcher may log one of them instead.
        print(f"rank {dist.get_rank()} failed:\n{traceback.format_exc()}", file=sys.stderr)
        raise
    dist.destroy_process_group()
    return result
