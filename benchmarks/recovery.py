"""Time from `kill -9` of one of three ranks to the next mean: `python -m benchmarks.recovery`.

Ways to go on take turns: `sync.rebuild(state=...)`; the calls that it replaces, on a group made by
hand; gloo alone, which makes a new group of the ranks left and checks no state; and, from torch
2.14 on, `torch.distributed._reconfigure` by the backend "fddp" and by gloo, without a check either.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table

import fddp

WAYS = ("rebuild", "five calls", "gloo alone")
RECONFIGURE = 'backend "{}", _reconfigure'
_PARTS = ("noticed", "went on", "step", "in all")
_LOST, _RANKS, _STEPS = 1, 3, 5
_BACKENDS = {"shm": "fddp", "c10d": "gloo"}


def loss_fn(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Mean square of the output of one layer."""
    return (x @ params["w"]).square().mean()


def run_rank(rank: int, port: int, transport: Any, way: str, answers: Any) -> None:
    """Train with three ranks until one is killed, and with the others from there; put the time of
    the kill, or those at which this rank noticed, had gone on, and had the next mean."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    params, x = {"w": torch.zeros(1000, 100)}, torch.ones(8, 1000)
    if way.endswith("_reconfigure"):
        times = _reconfigured(rank, params, store, transport, lambda: _die(answers))
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS)
        take = _gloo_alone if way == "gloo alone" else _with_fddp
        times = take(rank, params, x, transport, way, lambda: _die(answers))
    answers.put(times)
    answers.close()
    answers.join_thread()
    os._exit(0)


def _die(answers: Any) -> None:
    answers.put(("killed", time.perf_counter()))
    answers.close()
    answers.join_thread()
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def _with_fddp(
    rank: int, params: Any, x: torch.Tensor, transport: Any, way: str, die: Callable[[], None]
) -> tuple[float, ...]:
    sync = fddp.GradSync(params, timeout_s=60.0, transport=transport)
    step = sync.value_and_grad(loss_fn)
    for _ in range(_STEPS):
        step(params, x)
    dist.barrier()
    if rank == _LOST:
        die()
    try:
        while True:
            step(params, x)
    except fddp.RankLostError as error:
        noticed_s = time.perf_counter()
        if way == "rebuild":
            sync, params = sync.rebuild(state=params)
        else:
            left = [rank for rank in range(_RANKS) if rank not in error.ranks]
            group: Any = dist.new_group(left, use_local_synchronization=True)
            params, _ = fddp.reconcile(params, group, step=_STEPS)
            sync = sync.rebuild(group)
        step = sync.value_and_grad(loss_fn)
        ready_s = time.perf_counter()
        step(params, x)
        return noticed_s, ready_s, time.perf_counter()


def _gloo_alone(
    rank: int, params: Any, x: torch.Tensor, transport: Any, way: str, die: Callable[[], None]
) -> tuple[float, ...]:
    grad = torch.zeros_like(params["w"])
    dist.barrier()
    if rank == _LOST:
        die()
    try:
        while True:
            dist.all_reduce(grad)
    except RuntimeError:
        noticed_s = time.perf_counter()
        left = [rank for rank in range(_RANKS) if rank != _LOST]
        group = dist.new_group(left, use_local_synchronization=True)
        ready_s = time.perf_counter()
        dist.all_reduce(grad, group=group)
        return noticed_s, ready_s, time.perf_counter()


def _reconfigured(
    rank: int, params: Any, store: dist.Store, transport: str, die: Callable[[], None]
) -> tuple[float, ...]:
    grad, interface = torch.zeros_like(params["w"]), cast("Any", dist)
    interface.init_process_group(
        _BACKENDS[transport], store=store, rank=rank, world_size=_RANKS, enable_reconfigure=True
    )
    store.set(f"handle {rank}", interface._get_reconfigure_handle())
    handles = [store.get(f"handle {other}").decode() for other in range(_RANKS)]
    interface._reconfigure(0, handles).wait()
    # A handle of gloo names the last call.
    store.set(f"next handle {rank}", interface._get_reconfigure_handle())
    handles = [store.get(f"next handle {other}").decode() for other in range(_RANKS)]
    for _ in range(_STEPS):
        dist.all_reduce(grad)
    dist.barrier()
    if rank == _LOST:
        die()
    try:
        while True:
            dist.all_reduce(grad)
    except RuntimeError:
        noticed_s = time.perf_counter()
        left = [handle for rank, handle in enumerate(handles) if rank != _LOST]
        interface._reconfigure(1, left).wait()
        ready_s = time.perf_counter()
        dist.all_reduce(grad)
        return noticed_s, ready_s, time.perf_counter()


def times_ms(transport: str, way: str) -> list[float]:
    """Milliseconds of the parts of one recovery, of the rank that took longest."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fddp"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = context.Queue()
    ranks = [
        context.Process(target=run_rank, args=(rank, store.port, transport, way, answers))
        for rank in range(_RANKS)
    ]
    for process in ranks:
        process.start()
    found = [answers.get(timeout=120) for _ in range(_RANKS)]
    for process in ranks:
        process.join()
    killed_s = next(at_s for what, at_s in (f for f in found if f[0] == "killed")) + 0.05
    slowest = max((f for f in found if f[0] != "killed"), key=lambda times: times[-1])
    return [
        1000 * duration
        for duration in (*np.diff([killed_s, *slowest]).tolist(), slowest[-1] - killed_s)
    ]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="kills of each kind (%(default)s)")
    args = parser.parse_args()
    cases = [(transport, way) for transport in _BACKENDS for way in WAYS]
    if hasattr(dist, "_reconfigure"):
        cases += [(transport, RECONFIGURE.format(name)) for transport, name in _BACKENDS.items()]
    rows: dict[tuple[str, str], list[list[float]]] = {case: [] for case in cases}
    for _ in track(range(args.rounds), "kills", console=Console(stderr=True)):
        for case in cases:
            rows[case].append(times_ms(*case))
    table = Table(title="ms from kill -9 of one of three ranks to the next mean, median (least)")
    for title in ("transport", "way", *_PARTS):
        table.add_column(title, justify="left" if title in ("transport", "way") else "right")
    for (transport, way), found in rows.items():
        middle, least = np.median(found, axis=0), np.min(found, axis=0)
        parts = [f"{m:.0f} ({few:.0f})" for m, few in zip(middle, least, strict=True)]
        table.add_row(transport, way, *parts)
    Console().print(table)


if __name__ == "__main__":
    main()
