"""Backward passes that are steps, when steps end, and backward passes that fail."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fddp
from fddp.native.buffer_pool import BufferPool
from tests.support.backward_calls import call_in_backward
from tests.support.ranks import RankPool
from tests.support.wrapped_net import (
    DDP,
    TINY_CAP_MB,
    WIDTH,
    Net,
    assert_close,
    batch,
    fail_in_backward,
    grads,
    mean_of,
    net,
    run_backward,
)

pytestmark = pytest.mark.filterwarnings("ignore:the step of an aborted backward")


# Aborted passes


@contextlib.contextmanager
def called_at_output(module: nn.Module, calls: list[Callable[[], None]]) -> Iterator[None]:
    """Call each once, where backward enters the module."""
    handle = module.register_forward_hook(
        lambda module, inputs, output: call_in_backward(output, lambda: calls and calls.pop()())
    )
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize(("evaluates", "accumulates"), [(False, False), (True, True)])
def test_interrupted_backward_fails_on_all_ranks_and_all_continue(
    evaluates: bool, accumulates: bool
) -> None:
    """The next forward pass gives the step up, with or without gradients."""

    def run(group: Any) -> list[str]:
        model = nn.Sequential(net(), nn.BatchNorm1d(WIDTH, dtype=torch.float64))
        ddp = DDP(model, process_group=group, bucket_cap_mb=TINY_CAP_MB)
        run_backward(ddp, group)
        if not accumulates:
            ddp.zero_grad()
        model[0].fails_in_backward = group.rank == 1
        with pytest.raises((ValueError, fddp.PeerError)) as caught:
            run_backward(ddp, group)
        model[0].fails_in_backward = False
        assert all((grad is not None) == accumulates for grad in grads(model).values())
        if evaluates:
            with torch.no_grad():
                ddp(batch(group.rank))
        out = ddp(batch(group.rank))
        ddp.zero_grad()
        out.square().mean().backward()
        return [f"{caught.typename}: {caught.value}", str(grads(model))]

    with pytest.warns(UserWarning, match="an aborted backward") as given_up:
        first, second = fddp.loopback(2, run)
    assert len(given_up) == 1, "on rank 1"
    assert first[0].startswith("PeerError: rank 1 failed at step 1: RuntimeError: backward was")
    assert second[0] == "ValueError: no backward here"
    assert first[1] == second[1]


@pytest.mark.parametrize("at_output", [False, True])
def test_join_after_a_backward_that_fails_on_the_last_input(at_output: bool) -> None:
    def run(group: Any) -> list[str]:
        model = net()
        ddp = DDP(model, process_group=group, bucket_cap_mb=TINY_CAP_MB)
        said = []
        with ddp.join():
            for seed in range(2 + group.rank):
                ddp.zero_grad()
                model.fails_in_backward = seed == 1 and not at_output
                calls = [fail_in_backward] if seed == 1 and at_output else []
                with (
                    contextlib.suppress(ValueError, fddp.PeerError),
                    called_at_output(model, calls),
                ):
                    run_backward(ddp, group, seed)
                    said.append(f"step {seed}")
        return said

    with pytest.warns(UserWarning, match="an aborted backward"):  # despite torch's own filter
        assert fddp.loopback(2, run) == [["step 0"], ["step 0", "step 2"]]


def test_a_graph_runs_again_after_an_abort() -> None:
    def run(group: Any) -> dict[str, Any]:
        ddp = DDP(net(), process_group=group, local_gradients="allow")
        with called_at_output(ddp.module, [fail_in_backward]):
            loss = ddp(batch(group.rank)).square().mean()
        with pytest.raises(ValueError, match="no backward here"):
            loss.backward(retain_graph=True)
        ddp.zero_grad()
        loss.backward()
        assert ddp.steps.engine.step == 2
        found = grads(ddp.module)
        ddp.module(batch(group.rank)).sum().backward()  # of the module alone: no step
        assert ddp.steps.engine.step == 2
        return found

    wanted = mean_of(2, lambda model, rank: model(batch(rank)).square().mean())
    for found in fddp.loopback(2, run):
        assert_close(found, wanted)


class Repeated(nn.Module):
    """A layer whose gradient arrives `times` times in one backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = net().layers["l0"]
        self.times = 1
        self.fails_in_backward = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails_in_backward:
            x = call_in_backward(x, fail_in_backward)
        for _ in range(self.times):
            x = checkpoint(self.layer, x, use_reentrant=True, preserve_rng_state=False)
        return x


def test_a_gradient_that_came_again_before_a_failure_is_kept_whole() -> None:
    """Its bucket was sent after the first time."""

    def run(group: Any) -> None:
        model, alone = Repeated(), Repeated()
        ddp = DDP(model, process_group=group, bucket_cap_mb_list=[1e-6, 1e-6])  # one for each leaf
        ddp(batch(group.rank).requires_grad_()).square().mean().backward()
        alone.load_state_dict(model.state_dict())
        for param, other in zip(model.parameters(), alone.parameters(), strict=True):
            other.grad = param.grad.clone()
        model.times = alone.times = 2
        model.fails_in_backward = group.rank == 1
        with pytest.raises((ValueError, fddp.PeerError)):
            ddp(batch(group.rank).requires_grad_()).square().mean().backward()
        alone(batch(group.rank).requires_grad_()).square().mean().backward()
        assert_close(grads(model), grads(alone))
        model.fails_in_backward = False
        ddp(batch(group.rank).requires_grad_())  # gives the step up

    fddp.loopback(2, run)


def test_failures_at_the_start_of_a_step_are_raised_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    acquire = BufferPool.acquire
    poor: list[int] = []  # threads without memory

    def acquiring(self: BufferPool, *args: Any) -> Tensor:
        if threading.get_ident() in poor:
            poor.clear()
            raise MemoryError("no memory for a bucket")
        return acquire(self, *args)

    monkeypatch.setattr(BufferPool, "acquire", acquiring)

    def run(group: Any) -> str:
        ddp = DDP(net(), process_group=group)
        run_backward(ddp, group)
        if group.rank == 1:
            poor.append(threading.get_ident())
        with pytest.raises((MemoryError, fddp.PeerError)) as caught:
            run_backward(ddp, group)
        return caught.typename

    assert fddp.loopback(2, run) == ["PeerError", "MemoryError"]


# Passes that are no steps, or more than one


@pytest.mark.filterwarnings("ignore:Using backward")  # it makes a cycle, says torch
def test_create_graph_gives_synchronised_gradients_with_this_ranks_graph() -> None:
    def run(group: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        ddp = DDP(net(), process_group=group)
        ddp(batch(group.rank)).square().mean().backward(create_graph=True)
        params = dict(ddp.module.named_parameters())
        first = {n: p.grad for n, p in params.items()}
        values = {n: g.detach().clone() for n, g in first.items()}
        for p in params.values():
            p.grad = None
        sum(g.square().sum() for g in first.values()).backward()
        return values, grads(ddp.module)

    model = net()
    params = dict(model.named_parameters())
    own = [
        torch.autograd.grad(model(batch(r)).square().mean(), [*params.values()], create_graph=True)
        for r in range(2)
    ]
    mean = [(a + b).detach() / 2 for a, b in zip(*own, strict=True)]
    # The derivative of |mean|^2 along this rank's own graph, averaged by that backward.
    norm = sum((2 * m * g).sum() for rank in own for m, g in zip(mean, rank, strict=True)) / 2
    second = torch.autograd.grad(norm, [*params.values()], allow_unused=True)
    for values, found in fddp.loopback(2, run):
        assert_close(values, dict(zip(params, mean, strict=True)))
        assert_close(found, dict(zip(params, second, strict=True)))


class Scaled(Net):
    """A net and a buffer, which stock DDP would write in place in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.load_state_dict(net().state_dict())
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: Tensor, through: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        return super().forward(x, through) * self.scale


def parameters_of(f: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in f.named_parameters()}


TRANSFORMS: list[Callable[[nn.Module, Tensor], Any]] = [
    lambda f, x: torch.autograd.grad(f(y := x.requires_grad_()).sum(), y)[0],
    lambda f, x: torch.func.functional_call(f, parameters_of(f), (x,)),
    lambda f, x: torch.func.jvp(f, (x,), (x / 2,))[1],
    lambda f, x: torch.func.jacfwd(f)(x),
    lambda f, x: torch.func.jacrev(f)(x),
    lambda f, x: torch.func.vmap(f)(x),
    lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x))[0],
    lambda f, x: torch.func.hessian(lambda x: f(x).square().sum())(x),
    lambda f, x: torch.func.grad(lambda p: torch.func.functional_call(f, p, (x,)).square().sum())(
        parameters_of(f)
    ).popitem()[1],
]


def local_calls(rank: int, world_size: int) -> list[Any]:
    """Not on threads: levels of torch's forward mode are global to a process."""
    module = Scaled()
    ddp = DDP(module)
    for transform in TRANSFORMS:
        theirs, ours = (transform(f, batch(rank)) for f in (module, ddp))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    before = ddp.steps.engine.step
    run_backward(ddp, torch.distributed.group.WORLD)
    return [before, ddp.steps.engine.step, grads(module)]


def test_transforms_and_gradients_of_inputs_take_no_step(ranks: RankPool) -> None:
    wanted = mean_of(2, lambda model, rank: (2 * model(batch(rank))).square().mean())
    for before, after, found in ranks.run(2, local_calls):
        assert (before, after) == (0, 1)
        assert_close(found, wanted)


class WithWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.weight * x, self.weight


def test_leaf_outputs_take_a_step_and_keep_one_hook() -> None:
    def run(group: Any) -> list[Any]:
        ddp = DDP(WithWeight(), process_group=group)
        hooks = []
        for _ in range(3):
            ddp.zero_grad()
            _, weight = ddp(torch.ones(2))
            hooks.append(len(weight._backward_hooks))
        weight.sum().backward()
        found = [*hooks, ddp.steps.engine.step, weight.grad.tolist()]
        with torch.enable_grad():
            ddp.steps.begin_forward()
        return [*found, len(weight._backward_hooks)]

    assert fddp.loopback(2, run) == [[1, 1, 1, 1, [1.0, 1.0], 0]] * 2


def entered_in_backward(rank: int, world_size: int) -> list[str]:
    """Functions of the wrapper that the autograd engine calls during one backward pass."""
    ddp = DDP(net())
    calls: list[str] = []
    package = os.path.dirname(fddp.__file__) + os.sep
    room = os.path.join(package, "ddp") + os.sep
    entrances = os.path.join(package, "core", "entrance.py")  # their wrappers stand in between

    def note(frame: Any, event: str, argument: object) -> None:
        path, caller = frame.f_code.co_filename, frame.f_back.f_code.co_filename
        is_entered = caller == entrances or not caller.startswith(package)
        if event == "call" and path.startswith(room) and is_entered:
            calls.append(frame.f_code.co_name)

    for _ in range(4):
        loss = ddp(batch(rank)).square().mean()
        calls.clear()
        sys.setprofile(note)
        loss.backward()
        sys.setprofile(None)
    return calls


def test_backward_enters_python_at_the_first_gradient_and_at_its_end(ranks: RankPool) -> None:
    assert ranks.run(1, entered_in_backward) == [["on_first_grad", "on_end"]]


def test_without_hooks_gradients_stay_local() -> None:
    def run(group: Any) -> int:
        ddp = DDP(net(), process_group=group)
        ddp._remove_autograd_hooks()
        run_backward(ddp, group)
        return int(ddp.steps.engine.step)

    assert fddp.loopback(2, run) == [0, 0]
