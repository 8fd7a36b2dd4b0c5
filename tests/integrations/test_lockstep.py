"""`Lockstep`: loaders of unequal length that end on all ranks together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import fddp
from fddp.integrations.lockstep import Lengths, Lockstep, exchange_lengths, unchanged_buffers


class Stream(IterableDataset[int]):
    """Numbers, without a length."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Any:
        return iter(range(self.number))


def fetched(ranks: Any, loader: Any, *, is_used: bool = True) -> Any:
    with fddp.Communicator(ranks) as communicator:
        lengths = exchange_lengths(loader, communicator)
        lockstep = Lockstep(loader, lengths, communicator, lambda _: is_used)
        epochs = []
        for _ in range(2):
            batches = [*lockstep]
            epochs.append((batches, [tuple(turn) for turn in lockstep.turns]))
        assert epochs[0] == epochs[1]
        return lengths, *epochs[0]


def test_the_last_batch_is_repeated_on_every_rank() -> None:
    found = fddp.loopback(3, lambda group: fetched(group, [*range(10, 10 + 3 - group.rank)]))
    lengths = Lengths(longest=3, is_same=False, is_reliable=True)
    assert found[0] == (lengths, [10, 11, 12], [(False, 3), (False, 2), (False, 1)])
    assert found[1] == (lengths, [10, 11, 11], [(False, 3), (False, 2), (True, 1)])
    assert found[2] == (lengths, [10, 10, 10], [(False, 3), (True, 2), (True, 1)])


def test_loaders_without_length() -> None:
    def run(group: Any) -> Any:
        loader = DataLoader(Stream(2 + group.rank), batch_size=None)
        lengths, batches, _ = fetched(group, loader)
        with fddp.Communicator(group) as ranks, pytest.raises(TypeError, match="no length"):
            len(Lockstep(loader, lengths, ranks))
        return lengths, batches

    found = fddp.loopback(2, run)
    assert found == [
        (Lengths(None, True, False), [0, 1, 1]),
        (Lengths(None, True, False), [0, 1, 2]),
    ]


def test_batches_of_none_have_no_turn() -> None:
    found = fddp.loopback(2, lambda group: fetched(group, [1, None, 3, None][: 4 - group.rank]))
    assert found[0][1:] == ([1, None, 3, None], [(False, 2), (False, 2)])
    assert found[1][1:] == ([1, None, 3, 3], [(False, 2), (False, 2), (True, 1)])


def test_a_rank_without_batches_is_named_on_all_ranks() -> None:
    def run(group: Any) -> None:
        with pytest.raises(fddp.UnevenError, match=r"rank 1 has no batch.*at least one batch"):
            fetched(group, [] if group.rank == 1 else [1, 2])

    fddp.loopback(2, run)


def test_the_loader_itself_where_it_is_not_used() -> None:
    found = fddp.loopback(2, lambda group: fetched(group, [*range(group.rank)], is_used=False))
    assert [batches for _, batches, _ in found] == [[], [0]]


def test_attributes_are_those_of_the_loader() -> None:
    def run(group: Any) -> Any:
        loader = DataLoader([1.0] * (2 + group.rank), batch_size=2)
        with fddp.Communicator(group) as ranks:
            lockstep = Lockstep(loader, exchange_lengths(loader, ranks), ranks)
            lockstep.worker_init_fn = print
            assert loader.worker_init_fn is print
            return lockstep.batch_size, len(lockstep), len(loader)

    assert fddp.loopback(2, run) == [(2, 2, 1), (2, 2, 2)]


def test_unchanged_buffers() -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    rows = torch.randn(4, 2, requires_grad=True)
    with unchanged_buffers(module):
        loss = module(rows).square().sum()
    loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), _fresh(), strict=True))


def _fresh() -> Any:
    return torch.nn.BatchNorm1d(2).buffers()
