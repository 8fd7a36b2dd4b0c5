"""`fddp.DistributedDataParallel(virtual_ranks=...)`: the same bits on any number of ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fddp
from tests.support.digests import digest
from tests.support.models import rand

COUNT = 6
STEPS = 4
pytestmark = pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")


class Net(nn.Module):
    """Uses a layer twice, once in a checkpoint, and another for some virtual ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.rare = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        for number, leaf in enumerate(self.parameters()):
            leaf.data = rand(*leaf.shape, seed=number, dtype=torch.float32) / 3.0

    def forward(self, x: Tensor, number: int, reentrant: bool) -> Tensor:
        h = torch.tanh(self.first(x))
        h = checkpoint(self.shared, h, use_reentrant=reentrant)
        if number % 2:
            h = h + self.rare(h)
        return self.shared(h).square().mean()


def take_step(ddp: Any, step: int, numbers: Any = None) -> None:
    """One backward pass for each virtual rank of this rank."""
    numbers = ddp.carried_ranks if numbers is None else numbers
    for place, number in enumerate(numbers, start=1):
        with contextlib.nullcontext() if place == len(numbers) else ddp.no_sync():
            x = rand(4, 6, seed=50 * step + number, dtype=torch.float32).requires_grad_()
            ddp(x, number, reentrant=step % 2 == 1).backward()


def trained(group: Any, options: dict[str, Any]) -> list[str]:
    """Digests of gradients and parameters."""
    net, found = Net(), []
    caps = {"bucket_cap_mb_list": [1e-4, 2e-4]}
    ddp = fddp.DistributedDataParallel(
        net,
        process_group=group,
        virtual_ranks=COUNT,
        find_unused_parameters=True,
        **{**caps, **options},
    )
    adam = torch.optim.Adam(net.parameters(), lr=0.1)
    for step in range(STEPS):
        adam.zero_grad()
        take_step(ddp, step)
        found.append(digest({name: p.grad for name, p in net.named_parameters()}))
        adam.step()
    found.append(digest(dict(net.named_parameters())))
    ddp.steps.close()
    return found


@pytest.fixture(scope="module")
def due() -> list[str]:
    (found,) = fddp.loopback(1, trained, {})
    assert len({*found}) == STEPS + 1
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_same_bits_on_any_number_of_ranks(size: int, due: list[str]) -> None:
    assert fddp.loopback(size, trained, {}) == [due] * size


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True},
        {"lazy_bucket_allocation": True},
        {"skip_all_reduce_unused_params": True},
        {"nonfinite": "skip"},
        {"bucket_cap_mb_list": None, "bucket_cap_mb": 25.0},
    ],
)
@pytest.mark.parametrize("size", [4])
def test_options_do_not_change_bits(size: int, options: dict[str, Any], due: list[str]) -> None:
    assert fddp.loopback(size, trained, options) == [due] * size


def test_the_mean_is_that_of_grad_sync() -> None:
    def grads_of(net: Net, number: int) -> dict[str, Tensor | None]:
        net.zero_grad()
        net(rand(4, 6, seed=number, dtype=torch.float32), number, reentrant=False).backward()
        return {name: p.grad for name, p in net.named_parameters()}

    def run(group: Any) -> list[str]:
        net = Net()
        params = {name: p.detach() for name, p in net.named_parameters()}
        with fddp.GradSync(params, group=group, virtual_ranks=COUNT) as sync:
            due = sync(sync.virtual_batches(lambda number: grads_of(net, number)))
        net.zero_grad()
        ddp = fddp.DistributedDataParallel(
            net, process_group=group, virtual_ranks=COUNT, find_unused_parameters=True
        )
        take_step(ddp, 0)
        ddp.steps.close()
        return [digest(due), digest({name: p.grad for name, p in net.named_parameters()})]

    for ranks in (1, 4):
        for one, other in fddp.loopback(ranks, run):
            assert one == other


def test_embeddings_with_sparse_gradients() -> None:
    def run(group: Any) -> list[str]:
        net = nn.Sequential(nn.Embedding(20, 3, sparse=True), nn.Linear(3, 1))
        for number, leaf in enumerate(net.parameters()):
            leaf.data = rand(*leaf.shape, seed=number, dtype=torch.float32)
        ddp = fddp.DistributedDataParallel(net, process_group=group, virtual_ranks=COUNT)
        sgd, found = torch.optim.SGD(net.parameters(), lr=0.1), []
        for step in range(3):
            sgd.zero_grad()
            for number in ddp.carried_ranks:
                is_last = number == ddp.carried_ranks[-1]
                with contextlib.nullcontext() if is_last else ddp.no_sync():
                    words = torch.tensor([1, 1, number, number + step, 5 * step])
                    ddp(words).square().mean().backward()
            assert net[0].weight.grad.is_sparse
            found.append(digest({name: p.grad for name, p in net.named_parameters()}))
            sgd.step()
        found.append(digest(dict(net.named_parameters())))
        ddp.steps.close()
        return found

    (alone,) = fddp.loopback(1, run)
    assert len({*alone}) == 4
    for ranks in (2, 3, 4):
        assert fddp.loopback(ranks, run) == [alone] * ranks


# Errors


def misused_step(ddp: Any, net: Net, misuse: str) -> None:
    run = ddp.carried_ranks
    if misuse == "not cleared":
        for leaf in net.parameters():
            leaf.grad = torch.ones_like(leaf)
    numbers = {"too few": [*run[1:]], "too many": [*run, run[0]], "not cleared": [*run]}
    take_step(ddp, 0, numbers[misuse])


@pytest.mark.filterwarnings("ignore:the step over virtual ranks will fail")
@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        ("too few", r"took less than 2 backward passes on this rank, which carries the virtual"),
        ("too many", r"took more than 2 backward passes on this rank, which carries the virtual"),
        ("not cleared", r"began with gradients in .grad, which are of no virtual rank; call zero_"),
    ],
)
def test_wrong_steps_are_reported_on_all_ranks(misuse: str, text: str) -> None:
    def run(group: Any) -> None:
        net = Net()
        ddp = fddp.DistributedDataParallel(
            net, process_group=group, virtual_ranks=4, find_unused_parameters=True
        )
        with pytest.raises(RuntimeError, match=text):
            misused_step(ddp, net, misuse)
        net.zero_grad()
        take_step(ddp, 0)  # the group is in step
        assert net.first.weight.grad is not None
        ddp.steps.close()

    fddp.loopback(2, run)


def test_passes_of_which_none_takes_the_step_warn() -> None:
    def run(group: Any) -> None:
        ddp = fddp.DistributedDataParallel(nn.Linear(2, 1), process_group=group, virtual_ranks=3)
        with ddp.no_sync():
            for _ in range(3):
                ddp(torch.ones(1, 2)).sum().backward()
        ddp.steps.close()

    with pytest.warns(UserWarning, match="will fail: a step took more than 3 backward passes"):
        fddp.loopback(1, run)


def test_what_does_not_go_with_virtual_ranks() -> None:
    def run(group: Any) -> None:
        def wrap(module: nn.Module, **options: Any) -> Any:
            return fddp.DistributedDataParallel(module, process_group=group, **options)

        with pytest.raises(ValueError, match=r"running statistics of 1 \(BatchNorm1d\) would"):
            wrap(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), virtual_ranks=4)
        plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
        ddp = wrap(plain, virtual_ranks=4)
        with pytest.raises(ValueError, match=r"sums in its own order, which deterministic=True"):
            ddp.steps.engine.set_hook(fddp.hooks.bf16_compress)
        with pytest.raises(ValueError, match=r"join\(\) and virtual_ranks can't be combined"):
            ddp.join()
        ddp.steps.close()
        with pytest.raises(ValueError, match=r"1 virtual rank can be carried by 1 to 1 ranks"):
            wrap(nn.Linear(2, 2), virtual_ranks=1)

    fddp.loopback(2, run)
