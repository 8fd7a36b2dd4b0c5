"""A job on one host that loses workers, goes on without them, and takes in their replacements.

`python -m examples.supervised --kills 4` starts workers and watches them. Where torchrun ends all
when one has ended, the others go on here, and a spare worker, which has only to be invited, joins
them at their next step boundary. The bits at the end are those of a run without losses, because the
mean is one over virtual ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fddp

VIRTUAL_RANKS = 12
_RATE, _ROWS, _SEED = 0.05, 16, 1
_LIMIT = timedelta(seconds=60)


# The supervisor


def main(arguments: Sequence[str] | None = None) -> int:
    """Train undisturbed and with kills, and compare the bits; 0 if they are the same."""
    parser = argparse.ArgumentParser(prog="python -m examples.supervised", description=__doc__)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=_SEED)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.worker:
        return work(*json.loads(args.worker))
    dice = random.Random(args.seed)
    steps = sorted(dice.sample(range(1, args.steps), args.kills))
    kills = {str(step): dice.randrange(args.workers) for step in steps}
    expected = supervise(args.workers, args.steps, {})
    found = supervise(args.workers, args.steps, kills)
    for line in found["events"]:
        print(line)
    for title, run in (("undisturbed", expected), ("with kills", found)):
        print(f"{title:12} {run['digest']}  {run['started']} workers, {run['seconds']:.1f} s")
    same = expected["digest"] == found["digest"]
    print("same bits" if same else "other bits")
    return 0 if same else 1


def supervise(workers: int, steps: int, kills: dict[str, int]) -> dict[str, Any]:
    """Run the job. There is one spare worker; a new one is started for each that is lost.

    Args:
        workers: number of workers.
        steps: number of steps.
        kills: rank that kills itself, by number of the step.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    begin_s, started = time.monotonic(), 0
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        nonlocal started
        task = json.dumps([started, store.port, workers, steps, kills])
        command = [sys.executable, "-m", "examples.supervised", "--worker", task]
        running.append(subprocess.Popen(command))
        started += 1

    store.set("members/0", json.dumps([*range(workers)]))
    for _ in range(workers + 1):
        start()
    while running:
        for process in [process for process in running if process.poll() is not None]:
            running.remove(process)
            if process.returncode == -signal.SIGKILL:
                if not store.check(["digest"]):  # or the others have finished meanwhile
                    start()
            elif process.returncode:
                for other in running:
                    other.kill()
                raise RuntimeError(f"a worker ended with {process.returncode}")
        time.sleep(0.01)
    events = [store.get(f"event/{i}").decode() for i in range(store.add("events", 0))]
    digest = store.get("digest").decode()
    seconds = time.monotonic() - begin_s
    return {"digest": digest, "started": started, "seconds": seconds, "events": events}


# A worker


def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Mean square of the output of two layers."""
    return (torch.tanh(x @ params["first"]) @ params["second"]).square().mean()


def batch(virtual: int, step: int) -> Tensor:
    """The rows of a virtual rank in a step."""
    generator = torch.Generator().manual_seed(1000 * step + virtual)
    return torch.randn(_ROWS, 8, generator=generator)


def work(me: int, port: int, workers: int, steps: int, kills: dict[str, int]) -> int:
    """Train as worker number `me`: with the first workers, or once they invite it."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_LIMIT)
    meeting = 0
    if me not in members_of(store, 0):
        store.set(f"spare/{store.add('spares', 1)}", str(me))
        while me not in members_of(store, meeting):
            meeting += 1
            while not store.check([f"members/{meeting}"]):
                if store.check(["digest"]):
                    return 0
                time.sleep(0.01)
    members = meet(store, meeting, me)
    if meeting == 0:
        generator = torch.Generator().manual_seed(_SEED)
        first, second = torch.randn(8, 8, generator=generator), torch.randn(8, 1)
        state: Any = {"params": {"first": first, "second": torch.ones_like(second)}, "number": 0}
        sync = fddp.GradSync(state["params"], virtual_ranks=VIRTUAL_RANKS)
    else:
        sync, state = fddp.GradSync.join(state=None)
    step = sync.value_and_grad(loss_fn)
    while (number := state["number"]) < steps:
        if sync.rank == 0 and sync.world_size < workers:
            invite(store, meeting + 1, number)
        if sync.rank == kills.get(str(number)) and store.add(f"killed/{number}", 1) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin_s = time.monotonic()
        try:
            data = sync.virtual_batches([batch(v, number) for v in sync.carried_ranks])
            _, grads = step(state["params"], data)
        except fddp.RankLostError as error:
            lost = [members[rank] for rank in error.ranks]  # numbers of the first group
            sync, state = sync.rebuild(state=state)
            step = sync.value_and_grad(loss_fn)
            if sync.rank == 0:
                took_ms = 1000 * (time.monotonic() - begin_s)
                note(store, f"step {number:3}: lost worker {lost}, went on after {took_ms:.0f} ms")
            continue
        params = fddp.tree_map(lambda p, g: p - _RATE * g, state["params"], grads)
        state = {"params": params, "number": number + 1}
        if is_due(store, meeting + 1, number + 1):
            meeting += 1
            if sync.rank == 0:
                group: Any = sync.group
                left = [members[rank] for rank in dist.get_process_group_ranks(group)]
                publish(store, meeting, left, workers)
            members = meet(store, meeting, me)
            sync, state = sync.rebuild(state=state)
            step = sync.value_and_grad(loss_fn)
            if sync.rank == 0:
                note(store, f"step {number + 1:3}: workers {members}")
    if sync.rank == 0:
        found = b"".join(leaf.numpy().tobytes() for leaf in state["params"].values())
        store.set("digest", hashlib.sha256(found).hexdigest()[:16])
    sync.close()
    return 0


def invite(store: dist.Store, meeting: int, number: int) -> None:
    """Set the step after which workers meet, if a spare one waits. Only rank 0 calls it, before its
    step `number`: all others see the invitation once they have finished that step."""
    if store.add("spares", 0) > store.add("invited", 0) and not store.check([f"due/{meeting}"]):
        store.set(f"due/{meeting}", str(number + 1))


def is_due(store: dist.Store, meeting: int, number: int) -> bool:
    """Return True if workers meet after so many steps."""
    return store.check([f"due/{meeting}"]) and int(store.get(f"due/{meeting}")) == number


def publish(store: dist.Store, meeting: int, left: list[int], workers: int) -> None:
    """Set the members of a meeting: the workers that are left, and spare ones up to `workers`."""
    first, last = store.add("invited", 0) + 1, store.add("spares", 0)
    waiting = range(first, min(last, first + workers - len(left) - 1) + 1)
    store.add("invited", len(waiting))
    new = [int(store.get(f"spare/{index}")) for index in waiting]
    store.set(f"members/{meeting}", json.dumps(left + new))


def members_of(store: dist.Store, meeting: int) -> list[int]:
    """Wait for a meeting, and return its members."""
    members: list[int] = json.loads(store.get(f"members/{meeting}"))
    return members


def meet(store: dist.Store, meeting: int, me: int) -> list[int]:
    """Recreate the default group of the members of a meeting; a collective call of them."""
    members = members_of(store, meeting)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"meeting {meeting}", store),
        rank=members.index(me),
        world_size=len(members),
        timeout=_LIMIT,
    )
    return members


def note(store: dist.Store, event: str) -> None:
    """Note an event for the supervisor."""
    store.set(f"event/{store.add('events', 1) - 1}", event)


if __name__ == "__main__":
    sys.exit(main())
