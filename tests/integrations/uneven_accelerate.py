"""Accelerate on two ranks with uneven inputs; run by `test_frameworks.py`."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from torch import Tensor
from torch.utils.data import DataLoader

from examples.integrations import task
from fddp.integrations.accelerate import FddpAccelerator
from tests.integrations import uneven_task


def train(accelerator: FddpAccelerator, kind: str) -> list[Tensor]:
    """Train on 8 batches of 2 and one of 1; rank 0 has a batch more."""
    model: Any = uneven_task.tagger()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=task.RATE)
    loader: Any = DataLoader(task.samples(17), batch_size=uneven_task.SIZE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert isinstance(loader, DataLoader)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            with accelerator.accumulate(model):
                if kind == "mean":
                    accelerator.backward(model(**batch)["loss"])
                else:
                    model(**batch)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
    return task.values(model.parameters())


def of_one_process(accumulated: int) -> list[Tensor]:
    """Parameters of one process on the same batches."""
    model, data = uneven_task.tagger(), task.samples(17)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.RATE)
    whole = batches_of(data)
    size = accumulated * task.RANKS
    for first in range(0, len(whole), size):
        parts = whole[first : first + size]
        optimizer.zero_grad()
        for part in parts:
            (model(**part)["loss"] / size).backward()
        optimizer.step()
    return task.values(model.parameters())


def batches_of(data: Any) -> list[dict[str, Tensor]]:
    return [torch.utils.data.default_collate(data[i : i + 2]) for i in range(0, len(data), 2)]


# Counted losses

CASES = {
    "one model": ([0], 1),
    "two models": ([0, 1], 2),
    "two losses of one model": ([0, 0], 1),
    "two losses of the second model": ([0, 1, 1], 2),  # not in a Join: a pass of each model a turn
}


def train_counted(accelerator: FddpAccelerator, case: str, samples: int) -> list[Tensor]:
    """Train on batches of 2 and one of 1; of 17 samples rank 0 has a batch more."""
    order, number = CASES[case]
    loader: Any = accelerator.prepare(DataLoader(task.samples(samples), batch_size=2))
    models: Any = [accelerator.prepare(uneven_task.tagger()) for _ in range(number)]
    optimizers: Any = [
        accelerator.prepare(torch.optim.SGD(m.parameters(), lr=task.RATE)) for m in models
    ]
    is_even = samples != 17
    joined = accelerator.join_uneven_inputs(models, even_batches=False)
    with nullcontext() if is_even else joined:
        for batch in loader:
            with accelerator.accumulate(*models):
                for position, owner in enumerate(order):
                    loss, count = uneven_task.sums(position, models[owner], batch)
                    accelerator.backward(loss, num_items=count)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    return task.values(p for model in models for p in model.parameters())


def counted_alone(accumulated: int, case: str, samples: int) -> list[Tensor]:
    """Parameters of one process on the union of the batches of each step."""
    order, number = CASES[case]
    models = [uneven_task.tagger() for _ in range(number)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=task.RATE) for m in models]
    whole, size = batches_of(task.samples(samples)), accumulated * task.RANKS
    for first in range(0, len(whole), size):
        parts = whole[first : first + size]
        union = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        for position, owner in enumerate(order):
            loss, count = uneven_task.sums(position, models[owner], union)
            (loss / count).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return task.values(p for model in models for p in model.parameters())


def main() -> None:
    """Run the cases."""
    for accumulated in (1, 2, 4):
        found = train(FddpAccelerator(cpu=True, gradient_accumulation_steps=accumulated), "mean")
        difference = task.difference(found, of_one_process(accumulated))
        print(f"case accelerate, mean, {accumulated} accumulated: {difference:.1e}")
    views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    for case, accumulated, samples in product(CASES, (1, 3), (15, 17)):
        if case == "two losses of the second model" and samples == 17:
            continue
        accelerator = FddpAccelerator(
            cpu=True,
            gradient_accumulation_steps=accumulated,
            kwargs_handlers=[views] if accumulated == 1 else [],
            dataloader_config=DataLoaderConfiguration(even_batches=False),
        )
        found = train_counted(accelerator, case, samples)
        difference = task.difference(found, counted_alone(accumulated, case, samples))
        name = f"{case}, {accumulated} accumulated, {samples} samples"
        print(f"case accelerate, {name}: {difference:.1e}")
    unaccumulated = FddpAccelerator(cpu=True, gradient_accumulation_steps=1)
    difference = task.difference(train(unaccumulated, "raw"), of_one_process(1))
    print(f"case accelerate, without its backward: {difference:.1e}")
    accelerator = FddpAccelerator(cpu=True, gradient_accumulation_steps=2)
    # The rank with repeated batches raises the first error; the other one waits for it.
    expected = r"accelerator.backward\(loss\) in place of|lost rank|Connection closed|reset by peer"
    with pytest.raises(RuntimeError, match=expected):
        train(accelerator, "raw")


if __name__ == "__main__":
    main()
