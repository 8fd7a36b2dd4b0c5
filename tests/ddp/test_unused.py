"""A wrapped module of which ranks use different parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.ranks import Launch
from tests.support.wrapped_net import (
    DDP,
    TINY_CAP_MB,
    WIDTH,
    Net,
    assert_close,
    batch,
    grads,
    mean_of,
    net,
    rank_of,
)


def differing_branches(group: Any, steps: list[list[tuple[int, ...]]]) -> list[Any]:
    """Which layers each rank goes through at each step."""
    ddp = DDP(net(), process_group=group, bucket_cap_mb=TINY_CAP_MB, find_unused_parameters=True)
    found = []
    for number, through in enumerate(steps):
        ddp.zero_grad()
        out = ddp(batch(rank_of(group), number).requires_grad_(), through=through[rank_of(group)])
        out.square().mean().backward()
        found.append(grads(ddp.module))
    return found


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
def test_whatever_ranks_use_is_synchronised(launch: Launch) -> None:
    steps = [
        [(0, 1, 2), (0, 1, 2)],
        [(0, 1), (1, 2)],
        [(2,), (2,)],
        [(), (0, 2)],  # on rank 0, no parameter gets a gradient
        [(1, 1, 1), (0,)],
        [(0, 1, 2), ()],
    ]
    results = launch(2, differing_branches, steps)
    for number, through in enumerate(steps):

        def loss(model: Net, rank: int, number: int = number, through: Any = through) -> Tensor:
            x = batch(rank, number).requires_grad_()
            return model(x, through=through[rank]).square().mean()

        wanted = mean_of(2, loss)
        for found in results:
            assert_close(found[number], wanted)


def unused_here(group: Any) -> tuple[str, dict[str, Any]]:
    ddp = DDP(net(), process_group=group)
    through = (0, 1, 2) if rank_of(group) == 0 else (0, 2)
    ddp(batch(rank_of(group)), through=through).square().mean().backward()
    found = grads(ddp.module)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction") as caught:
        ddp(batch(rank_of(group)))
    return str(caught.value), found


def test_ddps_error_follows_on_every_rank_and_names_parameters(launch: Launch) -> None:
    errors = launch(2, unused_here)
    wanted = mean_of(
        2,
        lambda model, rank: (
            model(batch(rank), through=(0, 2) if rank else (0, 1, 2)).square().mean()
        ),
    )
    for _, found in errors:
        assert_close(found, wanted)
    assert (
        "did not receive grad for rank 0: none\nWithout a gradient on other ranks: layers.l1.b"
        in errors[0][0]
    )
    assert "did not receive grad for rank 1: layers.l1.weight, layers.l1.bias" in errors[1][0]
    assert "did not receive grad for rank 1: 2 3" in errors[1][0]


def use_without_sync_counts(group: Any) -> list[Any]:
    ddp = DDP(net(), process_group=group)
    with ddp.no_sync():
        ddp(batch(rank_of(group)), through=(1,)).square().mean().backward()
    ddp(batch(rank_of(group), 1), through=(0, 2)).square().mean().backward()
    ddp(batch(rank_of(group), 1))  # raises nothing
    return [grads(ddp.module)]


def test_use_without_sync_counts_as_use(launch: Launch) -> None:
    def loss(model: Net, rank: int) -> Tensor:
        first = model(batch(rank), through=(1,)).square().mean()
        return first + model(batch(rank, 1), through=(0, 2)).square().mean()

    for (found,) in launch(2, use_without_sync_counts):
        assert_close(found, mean_of(2, loss))


def skipping(group: Any, steps: list[list[tuple[int, ...]]], skip: bool) -> list[Any]:
    """Gradients of each step, and how many buckets were reduced."""
    ddp = DDP(
        net(),
        process_group=group,
        bucket_cap_mb=TINY_CAP_MB,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=skip,
    )
    found = []
    for number, through in enumerate(steps):
        if number != 4:  # what is there from before counts, too
            ddp.zero_grad()
        out = ddp(batch(rank_of(group), number).requires_grad_(), through=through[rank_of(group)])
        out.square().mean().backward()
        reduced = ddp._get_ddp_logging_data()["num_buckets_reduced"]
        found.append((reduced, {n: g if g is None else g.tolist() for n, g in grads(ddp).items()}))
    return found


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
def test_unused_buckets_are_left_out_until_a_rank_uses_them(launch: Launch) -> None:
    steps = [
        [(0, 1), (0, 1)],
        [(0, 1), (0, 1)],
        [(0, 1), (0, 1, 2)],  # a surprise on one rank
        [(0,), (0,)],
        [(2,), (0,)],
        [(1, 2), (0, 1)],
        [(0, 1, 2), (0, 1, 2)],
    ]
    plain = launch(2, skipping, steps, False)
    for left_out, whole in zip(launch(2, skipping, steps, True), plain, strict=True):
        counts, alone = [n for n, _ in left_out], [n for n, _ in whole]
        assert [grads for _, grads in left_out] == [grads for _, grads in whole]
        assert counts[1] < alone[1]
        assert counts[2] == alone[2]


def untouched(group: Any) -> list[Any]:
    ddp = DDP(net(), process_group=group, find_unused_parameters=True)
    own = torch.full((WIDTH, WIDTH), 7.0, dtype=torch.float64) + rank_of(group)
    weight = ddp.module.layers["l1"].weight
    weight.grad = own
    ddp(batch(rank_of(group)), through=(0, 2)).sum().backward()
    return [weight.grad is own, own.unique().tolist()]


def test_globally_unused_parameters_keep_their_gradient(launch: Launch) -> None:
    assert launch(2, untouched) == [[True, [7.0]], [True, [8.0]]]
