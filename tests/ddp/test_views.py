"""`gradient_as_bucket_view`: gradients that lie in buckets are reduced there; values stay values.

What is compared is the mean of the ranks' gradients, worked out by one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fddp
from fddp.native.buffer_pool import BufferPool
from tests.support.groups import rank_of
from tests.support.ranks import Launch

WIDTH = 8


def model() -> nn.Module:
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    # Ranks may be threads, which share torch's own generator.
    generator = torch.Generator().manual_seed(0)
    for param in module.parameters():
        nn.init.normal_(param, std=0.3, generator=generator)
    return module


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def mean_gradients(ranks: int, step: int) -> list[Tensor]:
    reference = model()
    losses = [reference(batch(rank, step)).square().mean() for rank in range(ranks)]
    (sum(losses, torch.zeros(())) / ranks).backward()
    return [param.grad for param in reference.parameters() if param.grad is not None]


def wrapped(group: Any, module: nn.Module) -> nn.Module:
    return fddp.DistributedDataParallel(
        module, process_group=group, bucket_cap_mb=0.0005, gradient_as_bucket_view=True
    )


@pytest.mark.parametrize("as_view", [True, False])
def test_a_kept_gradient_holds_its_bucket_until_it_is_cloned(as_view: bool) -> None:
    def run(group: Any) -> None:
        module = nn.Sequential(nn.Linear(100, 200, bias=False), nn.Linear(200, 1))
        ddp = fddp.DistributedDataParallel(
            module, process_group=group, gradient_as_bucket_view=as_view
        )
        ddp.keep_sync_info()
        kept: list[Tensor | None] = []
        held = []
        for step in range(6):
            if step == 5:
                kept = [None if grad is None else grad.clone() for grad in kept]
            module.zero_grad()
            ddp(torch.ones(2, 100)).sum().backward()
            kept.append(module[1].bias.grad)
            info = ddp.sync_info
            assert info is not None
            held.append(info.held_bytes)
        bucket = 4 * 20_201  # and a control word, smaller in later steps
        assert [nbytes // bucket for nbytes in held] == [1, 2, 3, 4, 5, 1]

    fddp.loopback(2, run)


@pytest.mark.parametrize("zeroed", [True, False])
def test_gradients_stay_where_they_are(zeroed: bool) -> None:
    """From the rebuild of the plan on. Ranks that are threads hold buffers of each other."""

    def run(group: Any) -> None:
        module = model()
        ddp = wrapped(group, module)
        total = [torch.zeros_like(param) for param in module.parameters()]
        places = []
        for step in range(6):
            if zeroed:
                module.zero_grad(set_to_none=False)
            ddp(batch(0, step)).square().mean().backward()
            mean = mean_gradients(1, step)
            total = mean if zeroed else [t + m for t, m in zip(total, mean, strict=True)]
            for param, expected in zip(module.parameters(), total, strict=True):
                assert torch.allclose(param.grad, expected, atol=1e-5)
                assert param.grad.untyped_storage().nbytes() == param.grad.nbytes
            places.append([param.grad.data_ptr() for param in module.parameters()])
        assert all(place == places[1] for place in places[1:])

    fddp.loopback(1, run)


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "the tensor": lambda t: t,
    "a view": lambda t: t.view(-1)[2:],
    "an alias": lambda t: t.detach(),
    "its storage": lambda t: torch.empty(0).set_(t.untyped_storage()),
}


@pytest.mark.parametrize("how", HOLDS)
def test_held_gradients_are_not_overwritten(how: str) -> None:
    def run(group: Any) -> None:
        module = model()
        ddp = wrapped(group, module)
        held: list[tuple[Any, Tensor]] = []
        for step in range(4):
            # Dropped by the module, so that no backward pass adds to what is held.
            module.zero_grad(set_to_none=True)
            ddp(batch(rank_of(group), step)).square().mean().backward()
            if step:
                first = module[0].weight.grad
                assert first is not None
                held.append((HOLDS[how](first), first.clone()))
                # The others stay: their bucket is asked for again with one of its slices held.
                module[0].weight.grad = None
                ddp(batch(rank_of(group), step)).square().mean().backward()
        for thing, value in held:
            assert torch.equal(thing.reshape(-1), value.reshape(-1)[-thing.numel() :])

    fddp.loopback(2, run)


def test_without_views_existing_gradients_are_written() -> None:
    def run(group: Any) -> None:
        module = model()
        ddp = fddp.DistributedDataParallel(module, process_group=group)
        ddp(batch(rank_of(group), 0)).square().mean().backward()
        before = [param.grad for param in module.parameters()]
        for step in range(1, 3):
            module.zero_grad(set_to_none=False)
            ddp(batch(rank_of(group), step)).square().mean().backward()
            for param, grad, expected in zip(
                module.parameters(), before, mean_gradients(2, step), strict=True
            ):
                assert param.grad is grad
                assert torch.allclose(grad, expected, atol=1e-6)

    fddp.loopback(2, run)


def test_a_rank_that_fails_keeps_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    reclaim = BufferPool.reclaim

    def noting(self: BufferPool, *args: Any) -> Tensor | None:
        buffer = reclaim(self, *args)
        taken.append(buffer is not None)
        return buffer

    monkeypatch.setattr(BufferPool, "reclaim", noting)

    def run(group: Any) -> None:
        module = model()
        ddp = wrapped(group, module)
        for step in range(3):
            module.zero_grad(set_to_none=False)
            ddp(batch(0, step)).square().mean().backward()
        assert any(taken)
        loss = ddp(batch(0, 3)).square().mean()
        before = [param.grad.clone() for param in module.parameters()]
        ddp.steps.engine.open = failing(ddp.steps.engine.open)
        with pytest.raises(ValueError, match="not today"):
            loss.backward()
        own = model()
        own(batch(0, 3)).square().mean().backward()
        for param, was, more in zip(module.parameters(), before, own.parameters(), strict=True):
            assert torch.allclose(param.grad, was + more.grad, atol=1e-6)

    fddp.loopback(1, run)


def failing(open_session: Callable[..., Any]) -> Callable[..., Any]:
    def opened(*args: Any, **options: Any) -> Any:
        session = open_session(*args, **options)
        session.fail(ValueError("not today"))
        return session

    return opened


def test_the_transport_may_be_chosen(launch: Launch) -> None:
    for name, problem in launch(2, chosen_transports):
        assert name == ("loopback" if launch.name == "loopback" else "c10d")
        assert "transport='carrier pigeon' does not fit this group" in problem


def chosen_transports(group: Any) -> tuple[str, str]:
    is_process = isinstance(group, dist.ProcessGroup)
    ddp = fddp.DistributedDataParallel(
        model(), process_group=group, transport="c10d" if is_process else "auto"
    )
    ddp(batch(rank_of(group), 0)).sum().backward()
    with pytest.raises((ValueError, fddp.PlanMismatchError)) as error:
        fddp.DistributedDataParallel(model(), process_group=group, transport="carrier pigeon")
    return ddp.steps.engine.transport.name, str(error.value)


@pytest.mark.filterwarnings("ignore:the step of an aborted backward")
@pytest.mark.parametrize("bad", ["hook", "number"])
@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("views", [False, True])
def test_a_step_that_fails_leaves_no_half_made_gradients(
    views: bool, clear: bool, bad: str
) -> None:
    """Kept gradients that were being reduced are dropped; the others are unchanged, or the rank's
    own. Ranks that are threads hold buffers of each other, so that not all are reduced in place.

    Rank 1 fails in a hook of its module, or has numbers that are not finite."""

    def run(group: Any) -> None:
        module = model()
        ddp = fddp.DistributedDataParallel(
            module,
            process_group=group,
            bucket_cap_mb=0.0005,
            gradient_as_bucket_view=views,
            nonfinite="raise",
        )
        for step in range(3):
            ddp(batch(group.rank, step)).square().mean().backward()
        if clear:
            module.zero_grad()
        before = [
            None if param.grad is None else param.grad.clone() for param in module.parameters()
        ]
        is_bad = group.rank == 1
        factor = math.nan if is_bad and bad == "number" else 1.0
        loss = ddp(batch(group.rank, 3)).square().mean() * factor
        if is_bad and bad == "hook":
            handle = module[0].weight.register_hook(refuse)
        with pytest.raises((ArithmeticError, fddp.PeerError, fddp.NonFiniteError)):
            loss.backward()
        if is_bad and bad == "hook":
            handle.remove()
        reference = model()
        own_loss = reference(batch(group.rank, 3)).square().mean() * factor
        local = torch.autograd.grad(own_loss, list(reference.parameters()))

        def check() -> None:
            for param, old, own in zip(module.parameters(), before, local, strict=True):
                if old is None:
                    assert param.grad is None
                elif param.grad is None:
                    assert views
                elif not torch.equal(param.grad, old):
                    torch.testing.assert_close(param.grad, old + own, equal_nan=True)

        check()
        output = ddp(batch(group.rank, 4))  # gives the failed step up
        check()
        module.zero_grad()
        output.square().mean().backward()
        for param, mean in zip(module.parameters(), mean_gradients(2, 4), strict=True):
            torch.testing.assert_close(param.grad, mean)

    fddp.loopback(2, run)


def refuse(grad: Tensor) -> Tensor:
    raise ArithmeticError("no gradient")
