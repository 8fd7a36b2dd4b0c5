"""Replicas that come and go under torchft's manager, with gradients averaged by fddp.

torchft's lighthouse says who takes part in a step and its manager heals a replica that has just
come; fddp's `GradSync` is rebuilt where the members change. One replica is killed and started
again. Needs torchft: `pip install torchft`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
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
from fddp.tree.pytree import flatten

_RATE, _PATIENCE = 0.05, timedelta(seconds=20)
_KILLED, _KILLED_AT, _ROUND = 1, 5, 10


def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Distance of a line from the sum of the inputs."""
    return (x @ params["w"] + params["b"] - x.sum(1, keepdim=True)).square().mean()


def replica(number: int, replicas: int, steps: int, is_killed: bool) -> str:
    """Trains one replica until so many steps were committed, the last ones on all replicas.

    Returns:
        The digest of its parameters.
    """
    torchft: Any = importlib.import_module("torchft")
    groups: Any = importlib.import_module("torchft.process_group")

    class Members(groups.ProcessGroup):  # type: ignore[misc]
        """The members as the manager knows them: a default group of torch, made anew for each
        quorum. The manager itself sends nothing over it."""

        changed = False

        def configure(
            self, store_addr: str, replica_id: str, rank: int, world_size: int, *_: Any
        ) -> None:
            if dist.is_initialized():
                dist.destroy_process_group()
            store = groups.create_store_client(store_addr, timeout=_PATIENCE)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=_PATIENCE
            )
            self.changed = True

        def getBackendName(self) -> str:  # noqa: N802
            return "fddp-members"

        def shutdown(self) -> None:
            pass

    state = {"params": {"w": torch.zeros(4, 1), "b": torch.zeros(1)}}

    def heal(healed: dict[str, Any]) -> None:
        state["params"] = healed["params"]

    own_store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    members, generator = Members(0, 1), torch.Generator().manual_seed(number)
    manager = torchft.Manager(
        pg=members,
        load_state_dict=heal,
        state_dict=lambda: state,
        min_replica_size=1,
        use_async_quorum=False,  # so that a replica is healed before it computes anything
        timeout=_PATIENCE,
        quorum_timeout=2 * _PATIENCE,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=own_store.port,
        replica_id=f"replica_{number}",
        hostname="localhost",
    )
    sync: fddp.GradSync | None = None

    def is_over() -> bool:
        step = manager.current_step()
        is_full = bool(manager.num_participants() == replicas)
        return is_full and step >= steps and step % _ROUND == 0

    while not is_over():
        try:
            manager.start_quorum()
            if members.changed:
                sync, members.changed = went_on(sync, state["params"]), False
            assert sync is not None
            is_full = manager.num_participants() == replicas
            if is_killed and is_full and manager.current_step() >= _KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            x = torch.randn(16, 4, generator=generator)
            _, grads = sync.value_and_grad(loss_fn)(state["params"], x)
        except fddp.FddpError as error:
            print(f"replica {number}, step {manager.current_step()}: {error}", flush=True)
            manager.report_error(error)
        if manager.should_commit():
            params = fddp.tree_map(lambda p, g: p - _RATE * g, state["params"], grads)
            state["params"] = params
            print(
                f"replica {number}, step {manager.current_step()} on {manager.num_participants()} "
                f"replicas: {digest(params)}",
                flush=True,
            )
        time.sleep(0.2)  # a step takes its time, so that there is a run to come back to
    manager.shutdown(wait=False)
    return digest(state["params"])


def went_on(sync: fddp.GradSync | None, params: Any) -> fddp.GradSync:
    """The sync of the new members: theirs that have one goes on, and the others join."""
    have = fddp.all_gather(torch.tensor([float(sync is not None)]))
    if sync is not None:
        return sync.rebuild()
    return fddp.GradSync.join() if have.any() else fddp.GradSync(params)


def digest(params: Any) -> str:
    """SHA-256 over all bits, its first 16 digits."""
    found = hashlib.sha256()
    for leaf in flatten(params)[0]:
        found.update(leaf.numpy().tobytes())
    return found.hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the replicas, one of which is killed and started again; 0 if all end alike."""
    parser = argparse.ArgumentParser("python -m examples.torchft", description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--replica", type=int, help="to be one of them, under TORCHFT_LIGHTHOUSE")
    parser.add_argument("--killed", action="store_true", help="this one ends in the middle")
    asked = parser.parse_args(arguments)
    os.environ.setdefault("RUST_LOG", "error")  # torchft tells of each step otherwise
    try:
        coordination: Any = importlib.import_module("torchft.coordination")
    except ModuleNotFoundError as error:
        print(f"torchft needs {error.name}: pip install torchft", file=sys.stderr)
        return 2
    if asked.replica is not None:
        torch.set_num_threads(1)
        end = replica(asked.replica, asked.replicas, asked.steps, asked.killed)
        print(f"digest {end}", flush=True)
        return 0
    lighthouse = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=2000
    )
    try:
        return run(lighthouse.address(), asked.replicas, asked.steps)
    finally:
        lighthouse.shutdown()


def run(lighthouse: str, replicas: int, steps: int) -> int:
    """Starts the replicas, and the killed one a second time; prints what they say."""

    def start(number: int, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "examples.torchft", "--replica", str(number)]
        command += ["--replicas", str(replicas), "--steps", str(steps)]
        return subprocess.Popen(
            [*command, *options],
            env={**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    lost = start(_KILLED, "--killed")
    running = [start(number) for number in range(replicas) if number != _KILLED]
    first = lost.communicate()[0]
    running.append(start(_KILLED))
    said = [process.communicate()[0] for process in running]
    print(first, *said, sep="")
    ends = {text.splitlines()[-1] for text in said if text}
    is_same = len(ends) == 1 and all(process.returncode == 0 for process in running)
    was_lost = lost.returncode == -signal.SIGKILL
    print(f"killed: {was_lost}; all replicas end with the same bits: {is_same}")
    return 0 if is_same and was_lost else 1


if __name__ == "__main__":
    sys.exit(main())
