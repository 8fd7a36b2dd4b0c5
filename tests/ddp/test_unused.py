"""A wrapped module of which ranks use different parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fddp
from tests.support.groups import rank_of
from tests.support.wrapped_net import (
    DDP,
    TINY_CAP_MB,
    Net,
    assert_close,
    batch,
    grads,
    mean_of,
    net,
    run_backward,
)

pytestmark = pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
Layers = tuple[int, ...]


STEPS: list[tuple[Layers, Layers]] = [
    ((0, 1, 2), (0, 1, 2)),
    ((0, 1), (1, 2)),
    ((2,), (2,)),
    ((), (0, 2)),  # on rank 0, no parameter gets a gradient
    ((1, 1, 1), (0,)),
    ((0, 1, 2), ()),
]


def test_layers_that_any_rank_uses_are_synchronised() -> None:
    def run(group: Any) -> list[Any]:
        ddp = DDP(
            net(), process_group=group, bucket_cap_mb=TINY_CAP_MB, find_unused_parameters=True
        )
        found = []
        for number, through in enumerate(STEPS):
            ddp.zero_grad()
            out = ddp(batch(group.rank, number).requires_grad_(), through=through[group.rank])
            out.square().mean().backward()
            found.append(grads(ddp.module))
        return found

    results = fddp.loopback(2, run)
    for number, through in enumerate(STEPS):

        def loss(model: Net, rank: int, number: int = number, through: Any = through) -> Tensor:
            x = batch(rank, number).requires_grad_()
            return model(x, through=through[rank]).square().mean()

        wanted = mean_of(2, loss)
        for found in results:
            assert_close(found[number], wanted)


def test_gradients_that_exist_are_written_where_they_are() -> None:
    """Also those of layers that this rank has not used."""

    def run(group: Any) -> None:
        ddp = DDP(
            net(), process_group=group, bucket_cap_mb=TINY_CAP_MB, find_unused_parameters=True
        )
        run_backward(ddp, group)
        before = {name: param.grad for name, param in ddp.module.named_parameters()}
        for through in ((0, 1), (1, 2)), ((0, 1), (0, 1)), ((0, 1), (1, 2)):
            ddp.zero_grad(set_to_none=False)
            run_backward(ddp, group, through=through[group.rank])
            for name, param in ddp.module.named_parameters():
                assert param.grad is before[name]
                assert param.grad.any() or (name.startswith("layers.l2") and 2 not in through[1])

    fddp.loopback(2, run)


def test_ddps_error_follows_on_every_rank_and_names_parameters() -> None:
    """After a step that is complete, although a rank has not used a layer."""

    def run(group: Any) -> str:
        ddp = DDP(net(), process_group=group)
        run_backward(ddp, group, through=(0, 2) if group.rank else (0, 1, 2))
        assert_close(grads(ddp.module), wanted)
        with pytest.raises(RuntimeError, match="Expected to have finished reduction") as caught:
            ddp(batch(group.rank))
        return str(caught.value)

    def loss(model: Net, rank: int) -> Tensor:
        return model(batch(rank), through=(0, 2) if rank else (0, 1, 2)).square().mean()

    wanted = mean_of(2, loss)
    first, second = fddp.loopback(2, run)
    nobody = "did not receive grad for rank 0: none\nWithout a gradient on other ranks: layers.l1.b"
    assert nobody in first
    assert "did not receive grad for rank 1: layers.l1.weight, layers.l1.bias" in second
    assert "did not receive grad for rank 1: 2 3" in second


def test_use_without_sync_counts_as_use() -> None:
    def run(group: Any) -> None:
        ddp = DDP(net(), process_group=group)
        with ddp.no_sync():
            run_backward(ddp, group, through=(1,))
        run_backward(ddp, group, 1, through=(0, 2))
        ddp(batch(group.rank, 1))  # raises nothing
        assert_close(grads(ddp.module), wanted)

    def loss(model: Net, rank: int) -> Tensor:
        first = model(batch(rank), through=(1,)).square().mean()
        return first + model(batch(rank, 1), through=(0, 2)).square().mean()

    wanted = mean_of(2, loss)
    fddp.loopback(2, run)


@pytest.mark.parametrize("with_hook", [False, True])
def test_unused_buckets_are_left_out_until_a_rank_uses_them(with_hook: bool) -> None:
    steps = [
        ((0, 1), (0, 1)),
        ((0, 1), (0, 1)),
        ((0, 1), (0, 1, 2)),  # a surprise on one rank
        ((0,), (0,)),
        ((2,), (0,)),
        ((1, 2), (0, 1)),
        ((0, 1, 2), (0, 1, 2)),
        ((1, 2), (1, 2)),
        ((1, 2), (1, 2)),
        ((1, 2), (0, 1, 2)),  # the surprise comes last
    ]

    def run(group: Any, skip: bool) -> list[Any]:
        """Numbers of buckets that were reduced, and gradients."""
        ddp = DDP(
            net(),
            process_group=group,
            bucket_cap_mb=TINY_CAP_MB,
            find_unused_parameters=True,
            skip_all_reduce_unused_params=skip,
        )
        if with_hook:
            ddp.register_comm_hook(None, fddp.hooks.cast(torch.float64))
        counts, found = [], []
        for number, through in enumerate(steps):
            if number != 4:  # what is there from before counts, too
                ddp.zero_grad()
            x = batch(group.rank, number).requires_grad_()
            ddp(x, through=through[group.rank]).square().mean().backward()
            counts.append(ddp._get_ddp_logging_data()["num_buckets_reduced"])
            found.append({n: g if g is None else g.tolist() for n, g in grads(ddp).items()})
        return [counts, found]

    runs = zip(fddp.loopback(2, run, True), fddp.loopback(2, run, False), strict=True)
    for (counts, left_out), (all_counts, whole) in runs:
        assert left_out == whole
        assert counts[1] < all_counts[1]
        assert counts[2] == all_counts[2]


# Use outside of the step


def use_bare(ddp: DDP, x: Tensor) -> None:
    ddp.module(x, through=(1,)).sum().backward()


def use_without_sync(ddp: DDP, x: Tensor) -> None:
    with ddp.no_sync():
        ddp(x, through=(1,)).sum().backward()


def is_rank_1(x: Tensor) -> bool:
    return bool(x[0, 0] == batch(1)[0, 0])


def use_before_failure(ddp: DDP, x: Tensor) -> None:
    def failing(x: Tensor) -> None:
        out = ddp(x, through=(1, 2))
        if is_rank_1(x):
            raise ValueError("no loss")
        out.sum().backward()

    with pytest.raises((ValueError, fddp.PeerError)), ddp.in_step():
        failing(x)


def use_before_failed_backward(ddp: DDP, x: Tensor) -> None:
    ddp.module.fails_in_backward = is_rank_1(x)
    with pytest.raises((ValueError, fddp.PeerError)), ddp.in_step():
        ddp(x, through=(0, 1)).sum().backward()
    ddp.module.fails_in_backward = False


def dropped_use(group: Any, use: Callable[[Any, Tensor], None], zeroes: bool) -> list[Any]:
    """Which gradients are None after steps without a layer that was used outside of them, and
    whether it has kept its parameters; with what `_get_local_used_map` says."""
    ddp = DDP(
        net(),
        process_group=group,
        bucket_cap_mb=TINY_CAP_MB,
        find_unused_parameters=True,
        local_gradients="allow",
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    found: list[Any] = []
    for _ in range(2):
        use(ddp, batch(rank_of(group)))
        if zeroes:
            optimizer.zero_grad()
        ddp(batch(rank_of(group)), through=(0, 2)).sum().backward()
        optimizer.step()
        found.append([name for name, grad in grads(ddp.module).items() if grad is None])
        optimizer.zero_grad()
    found.append(torch.equal(ddp.module.layers["l1"].weight, net().layers["l1"].weight))
    return [*found, ddp.reducer._get_local_used_map().tolist()]


@pytest.mark.parametrize(
    ("use", "zeroes"),
    [
        (use_bare, True),
        (use_without_sync, True),
        (use_before_failure, False),
        (use_before_failed_backward, False),
        (use_before_failed_backward, True),
    ],
)
def test_gradients_dropped_before_a_step_are_no_use(use: Any, zeroes: bool) -> None:
    unused = ["layers.l1.weight", "layers.l1.bias"]
    wanted = [unused, unused, True, [2, 2, 0, 0, 2, 2]]
    assert fddp.loopback(2, dropped_use, use, zeroes) == [wanted] * 2


# Static graphs


def changing_graph(group: Any, steps: list[list[Layers]], is_late: bool) -> list[Any]:
    """The error of each step, or its gradients."""
    ddp = DDP(net(), process_group=group, bucket_cap_mb=TINY_CAP_MB, static_graph=not is_late)
    if is_late:
        ddp._set_static_graph()
    found: list[Any] = []
    for number, through in enumerate(steps):
        ddp.zero_grad(set_to_none=number % 2 == 0)
        try:
            out = ddp(batch(rank_of(group), number), through=through[rank_of(group)])
            out.square().mean().backward()
        except RuntimeError as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append(grads(ddp.module))
    return found


@pytest.mark.parametrize(
    ("changed", "where", "is_late"),
    [((0, 2), (1,), False), ((0, 1, 2), (0,), True), ((0,), (0, 1), False), ((0, 2), (0, 1), True)],
)
def test_a_static_graph_that_changes_is_one_error_on_all_ranks(
    changed: Layers, where: Layers, is_late: bool
) -> None:
    usual = [(0, 1), (0, 1)]
    other = [changed if rank in where else (0, 1) for rank in range(2)]
    steps = [usual, usual, other, usual, other, other, usual]
    for number, (first, second) in enumerate(
        zip(*fddp.loopback(2, changing_graph, steps, is_late), strict=True)
    ):
        if steps[number] == usual:
            wanted = mean_of(
                2,
                lambda model, rank, number=number: (
                    model(batch(rank, number), through=(0, 1)).square().mean()
                ),
            )
            assert_close(first, wanted)
            assert_close(second, wanted)
            continue
        assert first == second
        assert first.startswith("RuntimeError: ")
        assert "not compatible with static_graph set to True" in first
        for rank in where:
            if 2 in changed:
                assert f"Newly used on rank {rank}: layers.l2.bias, layers.l2.weight" in first
            if 1 not in changed:
                unused = "layers.l1.weight, layers.l1.bias"
                assert f"did not receive grad for rank {rank}: {unused}" in first


def test_passes_of_a_static_graph_may_use_different_parameters() -> None:
    """Two backward passes of one forward, which use different layers."""

    def run(group: Any) -> list[Any]:
        ddp = DDP(net(), process_group=group, bucket_cap_mb=TINY_CAP_MB, static_graph=True)
        found: list[Any] = []
        for number in range(3):
            ddp.zero_grad()
            x = batch(group.rank, number).requires_grad_()
            first, second = ddp(x, through=(0,)), ddp(x, through=(1, 2))
            first.square().mean().backward()
            second.square().mean().backward()
            found.append(grads(ddp.module))
        return found

    def loss(model: Net, rank: int, number: int) -> Tensor:
        x = batch(rank, number)
        first, second = model(x, through=(0,)), model(x, through=(1, 2))
        return first.square().mean() + second.square().mean()

    for found in fddp.loopback(2, run):
        for number, step in enumerate(found):
            assert_close(step, mean_of(2, partial(loss, number=number)))


def test_a_step_expects_the_gradients_of_the_last_one() -> None:
    def run(group: Any) -> list[tuple[bool, int]]:
        ddp = DDP(net(), process_group=group, find_unused_parameters=True)
        found = []
        for through in [(0, 1, 2)] * 3 + [(0, 1)] * 2 + [(0, 1, 2)] * 2:
            ddp.zero_grad()
            ddp(batch(0, 0), through=through).square().mean().backward()
            arrivals = ddp.steps.engine.arrivals
            found.append((arrivals.as_expected, sum(arrivals.counts)))
        return found

    (found,) = fddp.loopback(1, run)
    assert found == [*[(True, 6)] * 3, (False, 4), (True, 4), (False, 6), (True, 6)]
