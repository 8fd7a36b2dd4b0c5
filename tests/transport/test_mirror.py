"""A group of which one thread plays one rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fddp
from fddp.extend import Operation, Rendezvous, mirrored


def unchanged(rendezvous: Rendezvous, operation: Operation, result: Tensor) -> Tensor:
    return result


@pytest.mark.parametrize("rank", [0, 2])
def test_results_are_those_of_ranks_that_send_the_same(rank: int) -> None:
    def run(group: fddp.extend.Group) -> list[Tensor]:
        x = torch.tensor([1.0, 2.0, 4.0])
        with fddp.GradSync({"x": x}, group=group) as sync:
            mean = sync({"x": x})["x"]
        return [
            mean,
            fddp.pmean(x, group),
            fddp.psum(x, group),
            fddp.pmax(x, group),
            fddp.all_gather(x, group),
            fddp.reduce_scatter(x, group),
            fddp.broadcast(x, 1, group=group),
        ]

    wanted = fddp.loopback(3, run)[rank]
    with mirrored(rank, 3, unchanged) as group:
        assert (group.rank, group.size) == (rank, 3)
        found = run(group)
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0)


def test_it_is_the_default_group_within_the_block_only() -> None:
    with mirrored(0, 2, unchanged):
        assert fddp.psum(torch.tensor(3)) == 6
        module = fddp.DistributedDataParallel(torch.nn.Linear(1, 1))
        assert module.process_group.size == 2
    with pytest.raises(fddp.FddpError, match="no process group"):
        fddp.psum(torch.tensor(3))


def test_transfers_replace_results() -> None:
    texts = []

    def transfer(rendezvous: Rendezvous, operation: Operation, result: Tensor) -> Tensor:
        if operation.kind != "all_reduce":
            return result
        texts.append(str(operation))
        return torch.full_like(result, 7.0)

    with mirrored(0, 2, transfer):
        assert fddp.psum(torch.ones(2)).tolist() == [7.0, 7.0]
    assert texts == ["all_reduce of torch.float32 (2,)"]
