"""A run that loses ranks and ends with the parameters of one that did not, bit for bit.

Under torchrun this trains, takes checkpoints, and goes on from the last one when torchrun starts it
again. Without torchrun it does so twice, once with ranks that are killed at seeded steps, and
compares: `python -m examples.elastic --kills 10`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

import fddp
from fddp.tree.pytree import flatten

_RATE, _EVERY, _ROWS, _SEED = 0.05, 3, 16, 1
_PLACES = ("forward", "backward", "update", "writing", "renaming")


class Kill(NamedTuple):
    """Scheduled SIGKILL of a process by itself, once.

    Attributes:
        step: in which step.
        rank: rank of the process.
        place: point within the step: one of `_PLACES`.
    """

    step: int
    rank: int
    place: str


def kills(count: int, steps: int, ranks: int, seed: int) -> list[Kill]:
    """Steps in which ranks are lost, including losses during the writing of checkpoints.

    Example:
        >>> kills(2, steps=9, ranks=2, seed=0)
        [Kill(step=6, rank=1, place='forward'), Kill(step=8, rank=0, place='renaming')]
    """
    dice = random.Random(seed)
    chosen = []
    for step in sorted(dice.sample(range(steps), count)):
        place = dice.choice(_PLACES if (step + 1) % _EVERY == 0 else _PLACES[:3])
        chosen.append(Kill(step, 0 if place == "renaming" else dice.randrange(ranks), place))
    return chosen


class Hazard:
    """Ends this process where it is due; what has happened is noted in a folder, and is over."""

    def __init__(self, folder: Path, planned: Sequence[Kill], rank: int) -> None:
        self._due = {(kill.step, kill.place): kill for kill in planned if kill.rank == rank}
        self._folder = folder

    def at(self, step: int, place: str) -> None:
        """Passes by a place."""
        kill = self._due.get((step, place))
        if kill is None:
            return
        try:
            os.close(os.open(self._folder / f"killed-{step}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class Batches:
    """This rank's batches; where it is in them is a tensor."""

    def __init__(self, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(1000 + rank)

    def draw(self) -> tuple[Tensor, Tensor]:
        """The next one: shapes (16, 8) and (16, 1)."""
        x = torch.randn(_ROWS, 8, generator=self._generator)
        return x, x.square().sum(1, keepdim=True).sin()

    @property
    def position(self) -> Tensor:
        """The state of its source of numbers."""
        return self._generator.get_state()

    @position.setter
    def position(self, state: Tensor) -> None:
        self._generator.set_state(state)


def init_params() -> dict[str, Any]:
    """A network of three layers, the same on every rank."""
    generator = torch.Generator().manual_seed(_SEED)
    sizes = {"first": (8, 32), "second": (32, 32), "third": (32, 1)}
    return {
        name: {
            "weight": torch.randn(shape, generator=generator) / shape[0] ** 0.5,
            "bias": torch.zeros(shape[1]),
        }
        for name, shape in sizes.items()
    }


def loss_fn(params: Any, x: Tensor, y: Tensor, hazard: Hazard, step: int) -> Tensor:
    """Mean square error; its graph may end the process half way back."""
    hazard.at(step, "forward")
    x = torch.tanh(x @ params["first"]["weight"] + params["first"]["bias"])
    x.register_hook(lambda grad: hazard.at(step, "backward"))
    x = torch.tanh(x @ params["second"]["weight"] + params["second"]["bias"])
    return torch.nn.functional.mse_loss(x @ params["third"]["weight"] + params["third"]["bias"], y)


def train(
    folder: Path, steps: int, planned: Sequence[Kill] = (), hook: fddp.hooks.Hook[Any] | None = None
) -> str:
    """Trains on the default group's ranks, from the last checkpoint in the folder if there is one.

    Without a hook, sums are deterministic. The state of a hook differs from rank to rank, and is
    saved by each; parameters and momenta are alike on all.

    Returns:
        The digest of the parameters in the end.
    """
    rank = dist.get_rank()
    hazard, batches = Hazard(folder, planned, rank), Batches(rank)
    params = init_params()
    state = {"params": params, "momenta": fddp.tree_map(torch.zeros_like, params)}
    begun, plan = find(folder)
    with fddp.GradSync(plan or params, deterministic=hook is None, hook=hook) as sync:
        own = {"hook": sync.init_state(), "position": batches.position}
        if plan is not None:
            state, own = load(folder, begun, state, own)
            batches.position = own["position"]
        # All have it from the same files; a rank whose file system shows others would be seen here.
        state, begun = fddp.reconcile(state, step=begun)
        note(folder, {"begun": begun, "restart": os.environ.get("TORCHELASTIC_RESTART_COUNT")})
        value_and_grad, kept = sync.value_and_grad(loss_fn), own["hook"]
        for step in range(begun, steps):
            x, y = batches.draw()
            _, grads, kept = value_and_grad(state["params"], x, y, hazard, step, hook_state=kept)
            hazard.at(step, "update")
            momenta = fddp.tree_map(lambda m, g: 0.9 * m + g, state["momenta"], grads)
            state = {
                "params": fddp.tree_map(lambda p, m: p - _RATE * m, state["params"], momenta),
                "momenta": momenta,
            }
            note(folder, {"step": step, "digest": digest(state)})
            if (step + 1) % _EVERY == 0 or step + 1 == steps:
                own = {"hook": kept, "position": batches.position}
                save(folder, step + 1, state, own, sync.plan, hazard)
    return digest(state["params"])


def init_process_group() -> None:
    """The default group, of this start of the workers alone.

    torchrun's agent keeps one store for all its restarts, and workers that find addresses of an
    attempt before would call processes that are gone (torch 2.13).
    """
    store, rank, world_size = next(dist.rendezvous("env://"))
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store = dist.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


# Checkpoints


class Writer(dcp.FileSystemWriter):
    """Writes files as DCP does, and may end the process when this rank's are half a checkpoint."""

    def __init__(self, path: Path, hazard: Hazard, step: int) -> None:
        super().__init__(path, sync_files=True)
        self._hazard, self._step = hazard, step

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        self._hazard.at(self._step, "writing")
        return written


def save(
    folder: Path, step: int, state: Any, own: Any, plan: fddp.BucketPlan, hazard: Hazard
) -> None:
    """Takes a checkpoint, whole or not at all: it has its name only when all of it is there."""
    path, part = folder / f"step-{step:06d}", folder / f"step-{step:06d}.part"
    dcp.save(tensors(state, own), storage_writer=Writer(part, hazard, step - 1), no_dist=False)
    if dist.get_rank() == 0:
        with (part / "plan.json").open("w") as file:
            file.write(plan.to_json())
            os.fsync(file.fileno())
        hazard.at(step - 1, "renaming")
        part.rename(path)
        sync_folder(folder)
        for old in sorted(folder.glob("step-??????"))[:-2]:
            shutil.rmtree(old)
    dist.barrier()


def find(folder: Path) -> tuple[int, fddp.BucketPlan | None]:
    """The step and plan of the last whole checkpoint; what was left half done is removed."""
    if dist.get_rank() == 0:
        for part in folder.glob("*.part"):
            shutil.rmtree(part)
    dist.barrier()
    found = sorted(folder.glob("step-??????"))
    if not found:
        return 0, None
    plan = fddp.BucketPlan.from_json((found[-1] / "plan.json").read_text())
    return int(found[-1].name.removeprefix("step-")), plan


def load(folder: Path, step: int, state: Any, own: Any) -> tuple[Any, Any]:
    """The state and this rank's own of a checkpoint, for trees of the same kind."""
    read = {key: tensor.clone() for key, tensor in tensors(state, own).items()}
    dcp.load(read, checkpoint_id=folder / f"step-{step:06d}")
    made = []
    for prefix, tree in (("all", state), (f"rank{dist.get_rank()}", own)):
        _, treedef = flatten(tree)
        made.append(treedef.unflatten([read[f"{prefix}.{path}"] for path in treedef.paths]))
    return made[0], made[1]


def tensors(state: Any, own: Any) -> dict[str, Tensor]:
    """Both trees as DCP takes them: by path, and this rank's own by its number, too."""
    named: dict[str, Tensor] = {}
    for prefix, tree in (("all", state), (f"rank{dist.get_rank()}", own)):
        leaves, treedef = flatten(tree)
        named |= {
            f"{prefix}.{path}": leaf for path, leaf in zip(treedef.paths, leaves, strict=True)
        }
    return named


def sync_folder(folder: Path) -> None:
    """Makes a new name in a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


# What happened


def digest(tree: Any) -> str:
    """SHA-256 over all bits of a tree, its first 16 digits."""
    found = hashlib.sha256()
    for leaf in flatten(tree)[0]:
        found.update(leaf.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def note(folder: Path, what: dict[str, Any]) -> None:
    """Appends a line to rank 0's log, which outlives it."""
    if dist.get_rank() == 0:
        with (folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(what) + "\n")


def notes(folder: Path) -> list[dict[str, Any]]:
    """Records of rank 0."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def digests(folder: Path) -> dict[int, list[str]]:
    """For each step the digests of parameters and momenta after it, one for each time it ran."""
    found: dict[int, list[str]] = {}
    for line in notes(folder):
        if "step" in line:
            found.setdefault(line["step"], []).append(line["digest"])
    return found


# The command


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains under torchrun; else runs both, and prints a table.

    Returns:
        The exit code: 0 if both ended with the same bits.
    """
    parser = argparse.ArgumentParser("python -m examples.elastic", description=__doc__)
    parser.add_argument("--folder", type=Path, help="for checkpoints; needed under torchrun")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--top-k", type=float, help="fraction, for a hook that keeps state")
    asked = parser.parse_args(arguments)
    if dist.is_torchelastic_launched():
        torch.set_num_threads(1)
        init_process_group()
        hook = None if asked.top_k is None else fddp.hooks.top_k(asked.top_k)
        planned = kills(asked.kills, asked.steps, dist.get_world_size(), asked.seed)
        train(asked.folder, asked.steps, planned, hook)
        dist.destroy_process_group()
        return 0
    with tempfile.TemporaryDirectory(prefix="fddp_") as made:
        whole, disturbed = (Path(made) / name for name in ("whole", "disturbed"))
        codes = [start(asked, whole, 0), start(asked, disturbed, asked.kills)]
        return show(asked, whole, disturbed, codes)


def start(asked: argparse.Namespace, folder: Path, count: int) -> int:
    """Runs this script under torchrun in a folder; its exit code."""
    folder.mkdir()
    hook = [] if asked.top_k is None else ["--top-k", str(asked.top_k)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(asked.ranks), "--max-restarts", str(count + 2)]
    command += ["-m", "examples.elastic", "--folder", str(folder), "--kills", str(count)]
    command += ["--steps", str(asked.steps), "--seed", str(asked.seed), *hook]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "errors.txt").open("w") as errors:
        return subprocess.run(command, env=environment, stderr=errors, check=False).returncode


def show(asked: argparse.Namespace, whole: Path, disturbed: Path, codes: Sequence[int]) -> int:
    """Prints what was lost, from where each attempt went on, and the digests."""
    planned = kills(asked.kills, asked.steps, asked.ranks, asked.seed)
    begun = [line["begun"] for line in notes(disturbed) if "begun" in line]
    for number, kill in enumerate(planned, start=1):
        done = (disturbed / f"killed-{kill.step}").exists()
        print(f"kill {number:2}: rank {kill.rank} in step {kill.step:3}, {kill.place:9}", end="")
        print(f"  {'done' if done else 'NOT DONE'}; went on from step", *begun[number : number + 1])
    one, other = digests(whole), digests(disturbed)
    print("step  undisturbed       with kills        times")
    for step in sorted(one):
        seen = other.get(step, [])
        print(f"{step:4}  {' '.join({*one[step]})}  {' '.join({*seen}):16}  {len(seen):5}")
    is_whole = codes == [0, 0] and len(begun) == 1 + asked.kills
    bits = [{step: {*found} for step, found in run.items()} for run in (one, other)]
    is_same = is_whole and bits[0] == bits[1] and all(len(found) == 1 for found in bits[1].values())
    print(f"exit codes {codes}, {len(begun) - 1} restarts:", "same bits" if is_same else "FAILED")
    if not is_same:
        print((disturbed / "errors.txt").read_text()[-4000:], file=sys.stderr)
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
