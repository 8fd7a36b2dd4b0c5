"""Accelerate on two ranks with uneven inputs; run by `test_frameworks.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from examples.integrations import task
from fddp.integrations.accelerate import FddpAccelerator
from tests.integrations import uneven_task


def train(accelerator: FddpAccelerator, kind: str) -> list[torch.Tensor]:
    """Train on 8 batches of 2 and one of 1; rank 0 has a batch more."""
    model: Any = uneven_task.tagger()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=task.RATE)
    loader: Any = DataLoader(task.samples(17), batch_size=uneven_task.SIZE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    before = type(loader)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            with accelerator.accumulate(model):
                if kind == "counted":
                    output = model(batch["input_ids"])
                    loss, count = task.loss_sum(output["logits"], batch["labels"])
                    accelerator.backward(loss, num_items=count)
                elif kind == "mean":
                    accelerator.backward(model(**batch)["loss"])
                else:
                    model(**batch)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
    assert type(loader) is before
    return task.values(model.parameters())


def of_one_process(accumulated: int, kind: str) -> list[torch.Tensor]:
    """Parameters of one process on the same batches."""
    model, data = uneven_task.tagger(), task.samples(17)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.RATE)
    whole = [torch.utils.data.default_collate(data[i : i + 2]) for i in range(0, 17, 2)]
    size = accumulated * task.RANKS
    for first in range(0, len(whole), size):
        parts = whole[first : first + size]
        optimizer.zero_grad()
        if kind == "counted":
            model(**{key: torch.cat([p[key] for p in parts]) for key in parts[0]})[
                "loss"
            ].backward()
        else:
            for part in parts:
                (model(**part)["loss"] / size).backward()
        optimizer.step()
    return task.values(model.parameters())


def main() -> None:
    """Run the cases."""
    for accumulated in (1, 2, 4):
        for kind in ("counted", "mean"):
            found = train(FddpAccelerator(cpu=True, gradient_accumulation_steps=accumulated), kind)
            difference = task.difference(found, of_one_process(accumulated, kind))
            print(f"case accelerate, {kind}, {accumulated} accumulated: {difference:.1e}")
    unaccumulated = FddpAccelerator(cpu=True, gradient_accumulation_steps=1)
    difference = task.difference(train(unaccumulated, "raw"), of_one_process(1, "mean"))
    print(f"case accelerate, without its backward: {difference:.1e}")
    accelerator = FddpAccelerator(cpu=True, gradient_accumulation_steps=2)
    # The rank with repeated batches raises the first error; the other one waits for it.
    expected = r"accelerator.backward\(loss\) in place of|lost rank|Connection closed|reset by peer"
    with pytest.raises(RuntimeError, match=expected):
        train(accelerator, "raw")


if __name__ == "__main__":
    main()
