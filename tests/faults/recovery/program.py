"""Program of a rank: training that goes on after losses, with a log of each state it has."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import fddp
from tests.faults.recovery.scenario import STEPS, Loss, Scenario
from tests.support.models import batch, mlp, mlp_loss
from tests.support.polling import LONG_S
from tests.support.ranks import split_into_hosts

SMALL = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0003}
VIRTUAL_RANKS = 4


class Log:
    """Lines of JSON, each written at once."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def __call__(self, what: str, **entry: Any) -> None:
        os.write(self._file, json.dumps({"what": what, **entry}).encode() + b"\n")


def digest(*trees: Any) -> str:
    found = hashlib.sha256()
    for tree in trees:
        fddp.tree_map(lambda leaf: found.update(leaf.detach().numpy().tobytes()), tree)
    return found.hexdigest()[:16]


def main(scenario: Scenario, rank: int, host: str, port: int, path: str) -> int:
    """Run a rank; its exit code."""
    torch.set_num_threads(1)
    log = Log(path)
    store = dist.TCPStore(host, port, is_master=False)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=scenario.world_size,
        timeout=timedelta(seconds=LONG_S),
    )
    alone = scenario.place == "c10d"
    apart = split_into_hosts([[r] for r in range(scenario.world_size)]) if alone else nullcontext()
    losses = {loss.step: loss for loss in scenario.losses if loss.rank == rank}
    try:
        with apart:
            (_train_module if scenario.way == "module" else _train)(scenario, losses, log)
        dist.destroy_process_group()  # else its threads may outlive the interpreter
    except BaseException:
        log("crash", text=traceback.format_exc())
        return 1
    return 0


def _meet(loss: Loss | None, leave: Callable[[], None]) -> bool:
    """Let a loss come; True if the rank leaves after this step."""
    if loss is None:
        return False
    if loss.after_s < 0.0:
        leave()
        return True

    def die() -> None:
        time.sleep(loss.after_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()
    return False


def _train(scenario: Scenario, losses: dict[int, Loss], log: Log) -> None:
    virtual = VIRTUAL_RANKS if scenario.way == "virtual" else None
    sync = fddp.GradSync(mlp(), timeout_s=LONG_S, virtual_ranks=virtual, **SMALL)
    step = sync.value_and_grad(mlp_loss)
    params, momenta, number = mlp(), fddp.tree_map(torch.zeros_like, mlp()), 0
    leaves = False
    while True:
        leaves |= _meet(losses.pop(number, None), sync.leave)
        try:
            if number == STEPS:
                # A rank that ends has the last state alone, if the others' last step fails.
                fddp.check_replicas(params, sync.group)
                break
            data: Any = batch(sync.rank, number)
            if virtual:
                data = sync.virtual_batches([batch(v, number) for v in sync.carried_ranks])
            _, grads = step(params, data)
        except fddp.RankLostError:
            if leaves:  # which the others know of, and go on
                break
            sync, (params, momenta, number) = again(
                partial(sync.rebuild, state=(params, momenta, number)), log
            )
            log("rebuilt", number=number, digest=digest(params, momenta), size=sync.world_size)
            step = sync.value_and_grad(mlp_loss)
            continue
        momenta = fddp.tree_map(lambda m, g: 0.9 * m + g, momenta, grads)
        params = fddp.tree_map(lambda p, m: p - 0.05 * m, params, momenta)
        number += 1
        log("step", number=number, digest=digest(params, momenta), size=sync.world_size)
        if leaves:
            break
    sync.close()
    log("left" if leaves else "end", number=number)


def again(rebuild: Callable[[], Any], log: Log) -> Any:
    """The result of a call that is made again as often as a rank is lost meanwhile."""
    begin_s = time.perf_counter()
    for _ in range(4):
        try:
            found = rebuild()
        except fddp.RankLostError as error:
            log("again", text=str(error))
        else:
            log("took", seconds=time.perf_counter() - begin_s)
            return found
    return rebuild()


def _train_module(scenario: Scenario, losses: dict[int, Loss], log: Log) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
    ).double()
    for position, param in enumerate(model.parameters()):
        param.data.copy_(torch.full_like(param, 0.1 * (position + 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    count = _Count()
    ddp: Any = fddp.DistributedDataParallel(model, bucket_cap_mb_list=[*SMALL.values()][::-1])
    leaves = False

    def held() -> str:
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return digest([*model.parameters()], moments)  # buffers are each rank's own until forward

    while True:
        leaves |= _meet(losses.pop(count.number, None), ddp.leave)
        try:
            if count.number == STEPS:
                params = dict(model.named_parameters())
                fddp.check_replicas(params, ddp.process_group)
                break
            optimizer.zero_grad()
            ddp(batch(ddp.process_group.rank(), count.number)).square().mean().backward()
        except fddp.RankLostError:
            if leaves:
                break
            again(partial(ddp.rebuild, optimizer, count), log)
            size = ddp.process_group.size()
            log("rebuilt", number=count.number, digest=held(), size=size)
            continue
        optimizer.step()
        count.number += 1
        log("step", number=count.number, digest=held(), size=ddp.process_group.size())
        if leaves:
            break
    log("left" if leaves else "end", number=count.number)


class _Count:
    """Number of finished steps, as part of the state."""

    number = 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = int(state["number"])
