"""Task of the programs on uneven inputs: a tagger in float64, whose ranks have 5 and 3 batches."""

from __future__ import annotations

from collections.abc import Iterable
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
    """The batches of a rank."""
    data = task.samples(sum(LENGTHS) * SIZE)
    first = sum(LENGTHS[:rank]) * SIZE
    starts = range(first, first + LENGTHS[rank] * SIZE, SIZE)
    return [torch.utils.data.default_collate(data[i : i + SIZE]) for i in starts]


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


def of_one_process(accumulated: int) -> list[Tensor]:
    """Parameters of one process that trains on the mean over the labels of each step."""
    model = tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    parts = [batches(rank) for rank in range(len(LENGTHS))]
    for _ in range(EPOCHS):
        for first in range(0, max(LENGTHS), accumulated):
            of_step = [batch for part in parts for batch in part[first : first + accumulated]]
            whole = {key: torch.cat([batch[key] for batch in of_step]) for key in of_step[0]}
            optimizer.zero_grad()
            model(**whole)["loss"].backward()
            optimizer.step()
    return task.values(model.parameters())


def check(name: str, parameters: Iterable[Tensor], accumulated: int) -> None:
    """Print the difference from one process, and compare the ranks' parameters."""
    found = task.values(parameters)
    difference = task.difference(found, of_one_process(accumulated))
    for parameter in found:
        of_ranks = [torch.empty_like(parameter) for _ in LENGTHS]
        dist.all_gather(of_ranks, parameter)
        assert all(torch.equal(of_ranks[0], other) for other in of_ranks), name
    if dist.get_rank() == 0:
        print(f"case {name}: {difference:.1e}")
