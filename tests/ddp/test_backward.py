"""Backward passes that are steps, when steps end, and backward passes that fail."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fddp
from tests.support.groups import rank_of
from tests.support.ranks import Launch, RankPool
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
    run_backward,
)


def reentrant(group: Any, hide: bool) -> dict[str, Any]:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Any:
            for i in (0, 1, 1, 2):
                x = checkpoint(self.net.layers[f"l{i}"], x, use_reentrant=True)
            return (lambda: x) if hide else x

    ddp = DDP(Checkpointed(), process_group=group, bucket_cap_mb=TINY_CAP_MB)
    for _ in range(3):
        ddp.zero_grad()
        out = ddp(batch(rank_of(group)).requires_grad_())
        out = out() if hide else out
        out.square().mean().backward()
    return grads(ddp.module.net)


@pytest.mark.filterwarnings("ignore:this module returns a function")
@pytest.mark.parametrize("hide", [False, True])
def test_reentrant_checkpoints_used_twice(launch: Launch, hide: bool) -> None:
    def loss(model: Net, rank: int) -> Tensor:
        x = batch(rank)
        for i in (0, 1, 1, 2):
            x = model.layers[f"l{i}"](x)
        return x.square().mean()

    for found in launch(2, reentrant, hide):
        assert_close(found, mean_of(2, loss))


def steps_of_reentrant(group: Any) -> int:
    model = net()
    ddp = DDP(Through(model), process_group=group)
    for _ in range(2):
        ddp(batch(rank_of(group)).requires_grad_()).square().mean().backward()
    return ddp.steps.engine.step


class Through(nn.Module):
    """Runs a net's layers as re-entrant checkpoints."""

    def __init__(self, model: Net) -> None:
        super().__init__()
        self.net = model

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net.layers.values():
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def test_a_visible_output_makes_one_step_of_nested_tasks(launch: Launch) -> None:
    assert launch(2, steps_of_reentrant) == [2, 2]


# Aborted passes


def broken_off(group: Any) -> list[str]:
    model = net()
    ddp = DDP(model, process_group=group, bucket_cap_mb=TINY_CAP_MB)
    ddp(batch(rank_of(group))).sum().backward()
    ddp.zero_grad()
    said = []
    model.fails_in_backward = rank_of(group) == 1
    try:
        out = ddp(batch(rank_of(group)))
        out.square().mean().backward()
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
    model.fails_in_backward = False
    if rank_of(group) == 1:
        with pytest.warns(UserWarning, match="an aborted backward"):
            out = ddp(batch(rank_of(group)))
    else:
        out = ddp(batch(rank_of(group)))
    ddp.zero_grad()
    out.square().mean().backward()
    return [*said, str(grads(model))]


def test_interrupted_backward_fails_on_all_ranks_and_all_continue(launch: Launch) -> None:
    first, second = launch(2, broken_off)
    assert first[0].startswith("PeerError: rank 1 failed at step 1: RuntimeError: backward was")
    assert second[0] == "ValueError: no backward here"
    assert first[1] == second[1]


class FailsFirst(nn.Module):
    """A net whose last operation raises in backward if `fails`, before any gradient has come."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        class Last(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, y: Tensor) -> Tensor:
                return y.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                if self.fails:
                    raise ValueError("no backward here")
                return grad

        out: Tensor = Last.apply(self.net(x))
        return out


@contextlib.contextmanager
def failing(model: FailsFirst, fails: bool) -> Iterator[None]:
    model.fails = fails
    with contextlib.suppress(ValueError, fddp.PeerError):
        yield
    model.fails = False


def broken_off_at_the_output(group: Any) -> dict[str, Any]:
    model = FailsFirst()
    ddp = DDP(model, process_group=group)
    run_backward(ddp, group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the step of the aborted pass is given up
        for seed in (1, 2):
            ddp.zero_grad()
            with failing(model, seed == 1 and rank_of(group) == 1):
                run_backward(ddp, group, seed)
    return grads(model.net)


def test_ranks_stay_together_after_a_backward_that_fails_before_any_gradient(
    launch: Launch,
) -> None:
    wanted = mean_of(2, lambda model, rank: model(batch(rank, 2)).square().mean())
    for found in launch(2, broken_off_at_the_output):
        assert_close(found, wanted)


def last_input_broken_off(group: Any, at_output: bool) -> list[str]:
    model = FailsFirst()
    ddp = DDP(model, process_group=group, bucket_cap_mb=TINY_CAP_MB)
    said = []
    with warnings.catch_warnings(), ddp.join():
        warnings.simplefilter("ignore")
        for seed in range(2 + rank_of(group)):
            ddp.zero_grad()
            with failing(model, at_output and seed == 1):
                model.net.fails_in_backward = not at_output and seed == 1
                run_backward(ddp, group, seed)
                said.append(f"step {seed}")
            model.net.fails_in_backward = False
    return said


@pytest.mark.parametrize("at_output", [False, True])
def test_join_after_a_backward_that_fails_on_the_last_input(
    launch: Launch, at_output: bool
) -> None:
    first, second = launch(2, last_input_broken_off, at_output)
    assert (first, second) == (["step 0"], ["step 0", "step 2"])


def cleared_after_an_abort(group: Any) -> list[dict[str, Any]]:
    """Zeroed gradients after a backward pass that failed on rank 1, and those of the next step."""
    model = net()
    ddp = DDP(model, process_group=group, bucket_cap_mb=TINY_CAP_MB)
    run_backward(ddp, group)
    ddp.zero_grad(set_to_none=False)
    model.fails_in_backward = rank_of(group) == 1
    with contextlib.suppress(ValueError, fddp.PeerError):
        run_backward(ddp, group)
    model.fails_in_backward = False
    ddp.zero_grad(set_to_none=False)
    cleared = grads(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the step of the aborted pass is given up
        run_backward(ddp, group, 1)
    return [cleared, grads(model)]


def test_zeroed_gradients_of_an_aborted_backward_stay_zero(launch: Launch) -> None:
    wanted = mean_of(2, lambda model, rank: model(batch(rank, 1)).square().mean())
    for cleared, found in launch(2, cleared_after_an_abort):
        assert all(grad is not None and not grad.any() for grad in cleared.values())
        assert_close(found, wanted)


def broken_then_eval(group: Any) -> str:
    model = nn.Sequential(net(), nn.BatchNorm1d(WIDTH, dtype=torch.float64))
    ddp = DDP(model, process_group=group)
    ddp(batch(rank_of(group))).square().sum().backward()
    ddp.zero_grad()
    model[0].fails_in_backward = rank_of(group) == 0
    with contextlib.suppress(ValueError, fddp.PeerError):
        ddp(batch(rank_of(group))).square().sum().backward()
    model[0].fails_in_backward = False
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        ddp(batch(rank_of(group)))
    ddp.zero_grad()
    ddp(batch(rank_of(group))).square().sum().backward()
    return str(grads(model))


@pytest.mark.filterwarnings("ignore:the step of a backward pass")
def test_a_forward_without_gradients_abandons_the_interrupted_step(launch: Launch) -> None:
    first, second = launch(2, broken_then_eval)
    assert first == second


def fails_to_arm(group: Any) -> str:
    ddp = DDP(net(), process_group=group)
    ddp(batch(0)).square().mean().backward()
    if rank_of(group) == 1:

        def refuse(bucket: int) -> Tensor:
            raise MemoryError("no memory for a bucket")

        opened = ddp.steps.engine.open

        def open_(*args: Any, **kwargs: Any) -> Any:
            session = opened(*args, **kwargs)
            session.begin = refuse
            return session

        ddp.steps.engine.open = open_
    with pytest.raises((MemoryError, TypeError, fddp.PeerError)) as caught:
        ddp(batch(0)).square().mean().backward()
    return type(caught.value).__name__


def test_failures_at_the_start_of_a_step_are_raised_on_all_ranks(launch: Launch) -> None:
    first, second = launch(2, fails_to_arm)
    assert first == "PeerError"
    assert second != "PeerError"


# Passes that are no steps, or more than one


def second_order(group: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    ddp = DDP(net(), process_group=group)
    loss = ddp(batch(rank_of(group))).square().mean()
    loss.backward(create_graph=True)
    params = dict(ddp.module.named_parameters())
    first = {n: p.grad for n, p in params.items()}
    norm = sum(g.square().sum() for g in first.values())
    values = {n: g.detach().clone() for n, g in first.items()}
    for p in params.values():
        p.grad = None
    norm.backward()
    return values, grads(ddp.module)


@pytest.mark.filterwarnings("ignore:Using backward")  # it makes a cycle, says torch
def test_create_graph_gives_synchronised_gradients_with_this_ranks_graph(launch: Launch) -> None:
    wanted = mean_of(2, lambda model, rank: model(batch(rank)).square().mean())
    results = launch(2, second_order)
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
    for values, found in results:
        assert_close(values, wanted)
        assert_close(found, dict(zip(params, second, strict=True)))


def local_calls(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    x = batch(rank).requires_grad_()
    torch.autograd.grad(ddp(x).sum(), x)
    step_after_grad = ddp.steps.engine.step
    with torch.no_grad():
        plain = ddp(x)
    with torch.inference_mode():
        inference = ddp(x)
    values = {f"module.{n}": p.detach().clone() for n, p in ddp.module.named_parameters()}
    called = torch.func.functional_call(ddp, values, (x,))
    _, tangent = torch.func.jvp(ddp, (x.detach(),), (torch.ones_like(x),))
    rows = torch.func.vmap(ddp)(x.detach())
    reverse = torch.func.jacrev(ddp)(x.detach()[0])
    forward = torch.func.jacfwd(ddp)(x.detach()[0])
    torch.testing.assert_close(reverse, forward)
    torch.testing.assert_close(tangent[0], forward.sum(1))
    for other in (inference, called, rows):
        torch.testing.assert_close(plain, other)
    ddp(x).square().mean().backward()
    return [step_after_grad, ddp.steps.engine.step, grads(ddp.module)]


def test_transforms_and_gradients_of_inputs_take_no_step(ranks: RankPool) -> None:
    # Not on threads: levels of torch's forward mode are global to a process.
    wanted = mean_of(2, lambda model, rank: model(batch(rank)).square().mean())
    for before, after, found in ranks.run(2, local_calls):
        assert (before, after) == (0, 1)
        assert_close(found, wanted)


def switched(group: Any, forward_off: bool, backward_off: bool) -> bool:
    """Return whether the gradients of one backward were synchronised."""
    ddp = DDP(net(), process_group=group)
    ddp.require_backward_grad_sync = not forward_off
    loss = ddp(batch(rank_of(group))).square().mean()
    ddp.require_backward_grad_sync = not backward_off
    loss.backward()
    return ddp.steps.engine.step == 1


@pytest.mark.parametrize("forward_off", [False, True])
@pytest.mark.parametrize("backward_off", [False, True])
def test_both_passes_must_be_outside_of_no_sync(
    launch: Launch, forward_off: bool, backward_off: bool
) -> None:
    expected = not forward_off and not backward_off
    assert launch(2, switched, forward_off, backward_off) == [expected] * 2


def bypassed(group: Any) -> list[Any]:
    ddp = DDP(net(), process_group=group)
    x = batch(rank_of(group))
    ddp(x).square().mean().backward()
    ddp.zero_grad()
    if rank_of(group) == 0:  # a probe on one rank, before the step and after it
        ddp.module(x).sum().backward()
        ddp.zero_grad()
    ddp(x).square().mean().backward()
    synced = grads(ddp.module)
    if rank_of(group) == 0:
        ddp.module(x).sum().backward()
    return [ddp.steps.engine.step, synced]


def test_the_module_alone_takes_no_step(launch: Launch) -> None:
    wanted = mean_of(2, lambda model, rank: model(batch(rank)).square().mean())
    for steps, found in launch(2, bypassed):
        assert steps == 2
        assert_close(found, wanted)


def aborted_and_run_again(group: Any) -> list[Any]:
    """Steps after a graph was run again whose pass was aborted, and after a pass of the module."""
    model = FailsFirst()
    ddp = DDP(model, process_group=group)
    loss = ddp(batch(rank_of(group))).square().mean()
    with failing(model, True):
        loss.backward(retain_graph=True)
    ddp.zero_grad()
    loss.backward()
    found = [ddp.steps.engine.step, grads(model.net)]
    model(batch(rank_of(group))).sum().backward()
    return [*found, ddp.steps.engine.step]


@pytest.mark.filterwarnings("ignore:the step of an aborted backward")
def test_a_graph_runs_again_after_an_abort(launch: Launch) -> None:
    wanted = mean_of(2, lambda model, rank: model(batch(rank)).square().mean())
    for before, found, after in launch(2, aborted_and_run_again):
        assert before == after == 2
        assert_close(found, wanted)


def hooks_of_leaf_outputs(group: Any) -> list[Any]:
    class WithWeight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.weight * x, self.weight

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


def test_leaf_outputs_take_a_step_and_keep_one_hook(launch: Launch) -> None:
    assert launch(2, hooks_of_leaf_outputs) == [[1, 1, 1, 1, [1.0, 1.0], 0]] * 2


def entered_in_backward(rank: int, world_size: int) -> list[str]:
    """Functions of the wrapper that the autograd engine calls during one backward pass."""
    ddp = DDP(net())
    calls: list[str] = []
    package = os.path.dirname(fddp.__file__) + os.sep
    room = os.path.join(package, "ddp") + os.sep

    def note(frame: Any, event: str, argument: object) -> None:
        path, caller = frame.f_code.co_filename, frame.f_back.f_code.co_filename
        if event == "call" and path.startswith(room) and not caller.startswith(package):
            calls.append(frame.f_code.co_name)

    for _ in range(4):
        loss = ddp(batch(rank)).square().mean()
        calls.clear()
        sys.setprofile(note)
        loss.backward()
        sys.setprofile(None)
    return calls


def test_backward_enters_python_at_the_first_gradient_and_at_its_end(ranks: RankPool) -> None:
    assert ranks.run(1, entered_in_backward) == [["on_first_grad", "finish"]]


def no_hooks(group: Any) -> bool:
    ddp = DDP(net(), process_group=group)
    ddp._remove_autograd_hooks()
    loss = ddp(batch(rank_of(group))).square().mean()
    loss.backward()
    return ddp.steps.engine.step == 0


def test_without_hooks_gradients_stay_local(launch: Launch) -> None:
    assert launch(2, no_hooks) == [True, True]


@dataclasses.dataclass
class Wrapped:
    value: Any


class Holds:
    def __init__(self, value: Any) -> None:
        self.inner = {"deep": [value]}


@pytest.mark.parametrize(
    "wrap", [Wrapped, Holds, lambda t: {"a": (t,)}, lambda t: [t, t.detach()]], ids=range(4)
)
def test_outputs_of_any_type_anchor_the_end(wrap: Callable[[Tensor], Any]) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.through = Through(net())

        def forward(self, x: Tensor) -> Any:
            self.out = self.through(x)
            return wrap(self.out)

    def steps(group: Any) -> int:
        outer = Outer()
        ddp = DDP(outer, process_group=group)
        ddp(batch(group.rank).requires_grad_())
        outer.out.square().mean().backward()
        return int(ddp.steps.engine.step)

    assert fddp.loopback(2, steps) == [1, 1]
