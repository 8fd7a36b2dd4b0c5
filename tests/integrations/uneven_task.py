"""Task of the programs on uneven inputs: a tagger in float64, whose ranks have 5 and 3 batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.integrations import task

LENGTHS, SIZE, EPOCHS = (5, 3), 2, 2


def tagger() -> nn.Module:
    """The tagger of the examples, in float64."""
    return task.Tagger().double()


def batches(rank: int) -> list[dict[str, Tensor]]:
    """The batches of a rank, of which the last has one sample."""
    data = task.samples(sum(LENGTHS) * SIZE)
    first = sum(LENGTHS[:rank]) * SIZE
    starts = range(first, first + LENGTHS[rank] * SIZE, SIZE)
    found = [torch.utils.data.default_collate(data[i : i + SIZE]) for i in starts]
    found[-1] = {key: value[:1] for key, value in found[-1].items()}
    return found


def sums(number: int, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return one of two sums of losses, and the number of their terms."""
    logits, labels = model(batch["input_ids"])["logits"], batch["labels"]
    if number % 2 == 0:
        return task.loss_sum(logits, labels)
    return logits.square().sum() / 10, torch.tensor(len(labels))


class Stream(torch.utils.data.IterableDataset[Any]):
    """Batches of a rank, without a length."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        return iter(batches(self.rank))


def loader(rank: int, *, has_length: bool = True) -> Any:
    """Loader of a rank's batches."""
    data: Any = batches(rank) if has_length else Stream(rank)
    return torch.utils.data.DataLoader(data, batch_size=None)


def of_means(accumulated: int) -> list[Tensor]:
    """Parameters of one process that trains on the mean of the batches' means."""
    model = tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    parts = [batches(rank) for rank in range(len(LENGTHS))]
    for _ in range(EPOCHS):
        for first in range(0, max(LENGTHS), accumulated):
            of_step = [batch for part in parts for batch in part[first : first + accumulated]]
            optimizer.zero_grad()
            torch.stack([model(**batch)["loss"] for batch in of_step]).mean().backward()
            optimizer.step()
    return task.values(model.parameters())


def of_one_process(accumulated: int, owners: Sequence[int] = (0,)) -> list[Tensor]:
    """Parameters of one process that trains on the mean over the labels of each step.

    With several `owners`, each is the number of the model of one of the losses `sums`.
    """
    models = [tagger() for _ in range(max(owners) + 1)]
    parameters = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    parts = [batches(rank) for rank in range(len(LENGTHS))]
    for _ in range(EPOCHS):
        for first in range(0, max(LENGTHS), accumulated):
            of_step = [batch for part in parts for batch in part[first : first + accumulated]]
            whole = {key: torch.cat([batch[key] for batch in of_step]) for key in of_step[0]}
            optimizer.zero_grad()
            for number, owner in enumerate(owners):
                loss, count = sums(number, models[owner], whole)
                (loss / count).backward()
            optimizer.step()
    return task.values(parameters)


def check(name: str, parameters: Iterable[Tensor], wanted: list[Tensor]) -> None:
    """Print the difference from what one process has, and compare the ranks' parameters."""
    found = task.values(parameters)
    difference = task.difference(found, wanted)
    for parameter in found:
        of_ranks = [torch.empty_like(parameter) for _ in LENGTHS]
        dist.all_gather(of_ranks, parameter)
        assert all(torch.equal(of_ranks[0], other) for other in of_ranks), name
    if dist.get_rank() == 0:
        print(f"case {name}: {difference:.1e}")
