"""FSDP2 over the backend "fddp": a small transformer, sharded, saved half way, and resumed.

The loop is stock torch: `fully_shard`, an optimizer of `torch.optim`, and a distributed checkpoint.
It runs over the default group, which `dist.init_process_group("fddp")` makes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from examples.common import ROUNDING, Check, Report, difference, main
from fddp.cli.demo.data import Batch
from fddp.cli.demo.data import load as load_digits
from fddp.core.text import counted
from fddp.transport.backend import backend_choice

_STEPS, _HALF, _PER_RANK, _RATE = 80, 40, 32, 0.005
_ROWS, _WIDTH, _BLOCKS = 8, 32, 2


class Classifier(nn.Module):
    """A transformer over the eight rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(_ROWS, _WIDTH)
        self.position = nn.Parameter(torch.zeros(_ROWS, _WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True)
            for _ in range(_BLOCKS)
        )
        self.head = nn.Linear(_WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of shape (n, 10) for images of shape (n, 1, 8, 8)."""
        x = self.embedding(images.squeeze(1)) + self.position
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x.mean(1))
        return scores


def example(load: Callable[..., object] = dcp.load) -> Report:
    """Trains on scikit-learn's digits, with parameters and optimizer sharded over the ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    data, held_out = load_digits()
    first, rest = range(_HALF), range(_HALF, _STEPS)

    model, optimizer = build(mesh)
    resumed, its_optimizer = build(mesh)
    loss_before = loss_fn(model, held_out).item()
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)  # all use rank 0's
        train(model, optimizer, data, first, [rank], ranks)
        dcp.save(state_of(model, optimizer), checkpoint_id=folder[0])
        train(model, optimizer, data, rest, [rank], ranks)

        state = state_of(resumed, its_optimizer)
        load(state, checkpoint_id=folder[0])
        set_state_dict(
            resumed,
            its_optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        train(resumed, its_optimizer, data, rest, [rank], ranks)

    alone, its_optimizer = build(None)
    train(alone, its_optimizer, data, range(_STEPS), range(ranks), ranks)

    sizes = [sum(p.numel() for p in found) for found in (shards(model), whole(model))]
    loss, correct = loss_fn(model, held_out).item(), accuracy(model, held_out)
    return Report(
        title=f"FSDP2, a transformer on {counted(ranks, 'rank')}, {_STEPS} steps",
        rows=[
            ("collectives", backend_choice().name, f"of the backend {dist.get_backend()!r}"),
            ("parameters on a rank", f"{sizes[0]}", f"of {sizes[1]}"),
            ("loss on held-out images", f"{loss_before:.3f}", "before"),
            ("", f"{loss:.3f}", "after"),
            ("accuracy on held-out images", f"{correct:.1%}", ""),
        ],
        checks={
            "resumed, from the same run": Check(difference(whole(resumed), whole(model)), 0.0),
            "parameters, from one process": Check(difference(whole(model), whole(alone)), ROUNDING),
        },
    )


def build(mesh: DeviceMesh | None) -> tuple[Classifier, torch.optim.Optimizer]:
    """The model, sharded over a mesh if there is one, and its optimizer."""
    torch.manual_seed(0)
    model = Classifier().double()
    if mesh is not None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    # AdamW with its own epsilon would enlarge the rounding of gradients that are zero.
    return model, torch.optim.AdamW(model.parameters(), _RATE, eps=1e-6)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Batch,
    steps: Iterable[int],
    shares: Iterable[int],
    ranks: int,
) -> None:
    """Take steps, each on some of the ranks' shares of its images."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        drawn = torch.randint(data.size, (ranks, _PER_RANK), generator=generator)
        optimizer.zero_grad()
        loss_fn(model, data.pick(drawn[list(shares)].flatten())).backward()
        optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Contents of a checkpoint: the shards of all ranks, which may be others when it is loaded."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy."""
    return cross_entropy(model(batch.images), batch.labels)


def accuracy(model: nn.Module, data: Batch) -> float:
    """Share of images whose label is found."""
    return float((model(data.images).argmax(1) == data.labels).double().mean())


def shards(model: nn.Module) -> list[Tensor]:
    """The part of the parameters on this rank."""
    return [p.to_local() if isinstance(p, DTensor) else p for p in parameters(model)]


def whole(model: nn.Module) -> list[Tensor]:
    """All parameters; a collective call if they are sharded."""
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters(model)]


def parameters(model: nn.Module) -> list[Tensor]:
    """Parameters without a graph."""
    return [p.detach() for p in model.parameters()]


if __name__ == "__main__":
    sys.exit(main("fsdp2", backend="fddp"))
