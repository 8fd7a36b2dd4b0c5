"""A loop of Accelerate with fddp: accumulated batches, a mean over tokens, uneven inputs."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

import fddp
from examples.integrations import task
from fddp.integrations.accelerate import FddpAccelerator


def train(accelerator: Accelerator, *, by_tokens: bool) -> list[Tensor]:
    """Train with accumulated micro-batches; with `by_tokens`, for the mean over all labels."""
    model = task.Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=task.RATE)
    loader: Any = DataLoader(task.samples(), batch_size=task.BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    is_ours = isinstance(accelerator, FddpAccelerator)
    assert isinstance(model, fddp.DistributedDataParallel) == is_ours
    for batch in loader:
        with accelerator.accumulate(model):
            output = model(batch["input_ids"], batch["labels"])
            if by_tokens:
                loss, count = task.loss_sum(output["logits"], batch["labels"])
                accelerator.backward(loss, num_items=count)
            else:
                accelerator.backward(output["loss"])
            optimizer.step()
            optimizer.zero_grad()
    return task.values(model.parameters())


def train_uneven(accelerator: FddpAccelerator) -> list[Tensor]:
    """Train where rank 1 has a batch less, for the mean over all labels."""
    model = task.Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=task.RATE)
    loader: Any = DataLoader(task.samples(task.UNEVEN), batch_size=task.BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            with accelerator.accumulate(model):
                loss, count = task.loss_sum(model(batch["input_ids"])["logits"], batch["labels"])
                accelerator.backward(loss, num_items=count)
                optimizer.step()
                optimizer.zero_grad()
    return task.values(model.parameters())


def main() -> None:
    """Compare stock's and fddp's parameters with those of one process."""
    wanted = task.of_one_process(task.samples())
    stock = train(Accelerator(cpu=True, gradient_accumulation_steps=2), by_tokens=False)
    accelerator = FddpAccelerator(cpu=True, gradient_accumulation_steps=2)
    same = train(accelerator, by_tokens=False)
    assert all(map(torch.equal, stock, same)), "fddp's class gave other bits than torch's"
    exact = train(accelerator, by_tokens=True)

    uneven = train_uneven(accelerator)
    alone = task.of_one_process(task.samples(task.UNEVEN))
    task.report(
        "accelerate",
        {
            "Accelerator, mean of means": (task.difference(stock, wanted), False),
            "FddpAccelerator, num_items": (task.difference(exact, wanted), True),
            "FddpAccelerator, uneven inputs": (task.difference(uneven, alone), True),
        },
    )


if __name__ == "__main__":
    task.under_torchrun(main)
