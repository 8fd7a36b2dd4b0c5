"""A run that goes on with other numbers of ranks, with the same bits as on one rank.

Trains a small transformer with dropout and Adam on handwritten digits, over eight virtual ranks.
torchrun starts it on 4, 3, 2, 1, 2, 3 and 4 ranks in turn; each time a rank is killed, and the next
start goes on from the last checkpoint. The digests of all parameters after every tenth step are
compared with those of an undisturbed run on one rank: `python -m examples.any_ranks`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fddp
from examples.elastic import note, notes
from fddp.cli.demo.data import load

VIRTUAL_RANKS = 8
SIZES = (4, 3, 2, 1, 2, 3, 4)
_BATCH, _EVERY, _SEED = 4, 10, 1


class Kill(NamedTuple):
    """Scheduled SIGKILL of a process by itself, in the backward pass of a virtual rank."""

    step: int
    virtual_rank: int


class Start(NamedTuple):
    """One start of the workers; `kill` ends it."""

    ranks: int
    kill: Kill | None


def starts(steps: int, seed: int, sizes: Sequence[int] = SIZES) -> list[Start]:
    """Starts on the given numbers of ranks, of which all but the last lose a rank.

    Example:
        >>> starts(100, seed=0, sizes=(4, 1))
        [Start(ranks=4, kill=Kill(step=24, virtual_rank=6)), Start(ranks=1, kill=None)]
    """
    dice = random.Random(seed)
    length = steps // len(sizes)
    kills: list[Kill | None] = [
        Kill(dice.randrange(number * length, (number + 1) * length), dice.randrange(VIRTUAL_RANKS))
        for number in range(len(sizes) - 1)
    ]
    return [Start(size, kill) for size, kill in zip(sizes, [*kills, None], strict=True)]


class Net(nn.Module):
    """A transformer over the eight rows of an image."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True), 2
        )
        self.classify = nn.Linear(8 * width, 10)

    def forward(self, rows: Tensor) -> Tensor:
        """Logits, shape (n, 10), of images of shape (n, 8, 8)."""
        return self.classify(self.layers(self.embed(rows)).flatten(1))  # type: ignore[no-any-return]


def train(folder: Path, steps: int, kill: Kill | None = None) -> str:
    """Train on the ranks of the default group, from the checkpoint in the folder if there is one.

    Returns:
        The digest of the parameters in the end.
    """
    images, _ = load()
    data = TensorDataset(images.images.flatten(1, 2).float(), images.labels)
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        net = Net()
    apply, params, buffers = fddp.functionalize(net)
    adam = torch.optim.Adam(params.values(), lr=3e-3)
    with fddp.GradSync(params, virtual_ranks=VIRTUAL_RANKS) as sync:
        sampler = fddp.VirtualSampler(
            data, VIRTUAL_RANKS, sync.carried_ranks, batch_size=_BATCH, seed=_SEED
        )
        begun = restore(folder, {"net": net, "adam": adam, "sampler": sampler})
        note(folder, {"begun": begun, "ranks": sync.world_size})

        def loss_fn(p: Any, batch: Any, virtual_rank: int, step: int) -> Tensor:
            rows, labels = batch
            with fddp.virtual_rng(step, virtual_rank):
                logits, _ = apply(p, buffers, rows)
            if kill == (step, virtual_rank):
                logits.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
            return nn.functional.cross_entropy(logits, labels)

        value_and_grad = sync.value_and_grad(
            loss_fn, weight_fn=lambda p, batch, *_: float(len(batch[1]))
        )
        step, virtual_ranks = begun, sync.virtual_batches(sync.carried_ranks)
        while step < steps:
            for step, batches in sampler.steps(DataLoader(data, batch_sampler=sampler)):
                if step == steps:
                    break
                own = {name: leaf.detach() for name, leaf in params.items()}
                _, grads = value_and_grad(own, sync.virtual_batches(batches), virtual_ranks, step)
                for name, leaf in params.items():
                    leaf.grad = grads[name]
                adam.step()
                if (step + 1) % _EVERY == 0:
                    note(folder, {"step": step + 1, "digest": digest(params)})
                    save(folder, {"net": net, "adam": adam, "sampler": sampler}, step + 1)
    return digest(params)


def save(folder: Path, objects: dict[str, Any], step: int) -> None:
    """Write a checkpoint on rank 0, whole or not at all."""
    if dist.get_rank() == 0:
        state = {name: each.state_dict() for name, each in objects.items()}
        torch.save({**state, "step": step}, folder / "checkpoint.part")
        (folder / "checkpoint.part").rename(folder / "checkpoint")


def restore(folder: Path, objects: dict[str, Any]) -> int:
    """Read the checkpoint, if there is one, and return the number of the next step."""
    if not (folder / "checkpoint").exists():
        return 0
    state = torch.load(folder / "checkpoint", weights_only=True)
    for name, each in objects.items():
        each.load_state_dict(state[name])
    return int(state["step"])


def digest(params: dict[str, Tensor]) -> str:
    """MD5 over all bits of the parameters."""
    found = hashlib.md5(usedforsecurity=False)
    for leaf in params.values():
        found.update(leaf.detach().numpy().tobytes())
    return found.hexdigest()


def digests(folder: Path) -> dict[int, set[str]]:
    """Digests by number of steps; one of each, if steps that ran again had the same bits."""
    found: dict[int, set[str]] = {}
    for line in notes(folder):
        if "step" in line:
            found.setdefault(line["step"], set()).add(line["digest"])
    return found


# The command


def main(arguments: Sequence[str] | None = None) -> int:
    """Train under torchrun; else run both, and print a table.

    Returns:
        The exit code: 0 if both have the same bits.
    """
    parser = argparse.ArgumentParser("python -m examples.any_ranks", description=__doc__)
    parser.add_argument("--folder", type=Path, help="for checkpoints; needed under torchrun")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of ranks")
    parser.add_argument("--kill", type=int, nargs=2, help="step and virtual rank")
    asked = parser.parse_args(arguments)
    if dist.is_torchelastic_launched():
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        train(asked.folder, asked.steps, asked.kill and Kill(*asked.kill))
        dist.destroy_process_group()
        return 0
    with tempfile.TemporaryDirectory(prefix="fddp_") as made:
        whole, changed = (Path(made) / name for name in ("whole", "changed"))
        planned = starts(asked.steps, asked.seed, asked.sizes)
        codes = [launch(whole, asked.steps, Start(1, None))]
        codes += [launch(changed, asked.steps, start) for start in planned]
        return show(planned, whole, changed, codes)


def launch(folder: Path, steps: int, start: Start) -> int:
    """Run this script under torchrun, and return its exit code."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(start.ranks), "-m", "examples.any_ranks"]
    command += ["--folder", str(folder), "--steps", str(steps)]
    if start.kill is not None:
        command += ["--kill", *map(str, start.kill)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "errors.txt").open("w") as errors:
        return subprocess.run(command, env=environment, stderr=errors, check=False).returncode


def show(planned: Sequence[Start], whole: Path, changed: Path, codes: Sequence[int]) -> int:
    """Print what was lost, from where each start went on, and the digests; return 1 if they
    differ."""
    begun = [(line["ranks"], line["begun"]) for line in notes(changed) if "begun" in line]
    for (ranks, step), start in zip(begun, planned, strict=False):
        end = "to the end" if start.kill is None else f"to a kill in step {start.kill.step}"
        print(f"{ranks} ranks from step {step:3} {end}")
    one, other = digests(whole), digests(changed)
    print("steps  one rank                          other numbers of ranks")
    for step in sorted(one):
        print(f"{step:5}  {' '.join(one[step])}  {' '.join(sorted(other.get(step, ())))}")
    is_whole = [ranks for ranks, _ in begun] == [start.ranks for start in planned]
    is_whole &= [code == 0 for code in codes] == [True] + [s.kill is None for s in planned]
    is_same = is_whole and one == other and all(len(found) == 1 for found in one.values())
    print(f"exit codes {[*codes]}:", "same bits" if is_same else "FAILED")
    if not is_same:
        print((changed / "errors.txt").read_text()[-4000:], file=sys.stderr)
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
