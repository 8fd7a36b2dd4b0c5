"""`fddp.DistributedDataParallel`: steps of a wrapped module, also where stock DDP goes wrong."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as StockDDP
from torch.utils.checkpoint import checkpoint

import fddp
from models import rand
from ranks import Launch, RankPool

DDP = fddp.DistributedDataParallel
WIDTH = 6
TINY_CAP_MB = 1e-4  # about one parameter a bucket


class Refusing(torch.autograd.Function):
    """Has a backward that raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("no backward here")


class Net(nn.Module):
    """Layers by name; `forward` goes through those that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses = False
        self.layers = nn.ModuleDict(
            {f"l{i}": nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for i in range(3)}
        )

    def forward(self, x: Tensor, through: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        for i in through:
            x = torch.tanh(self.layers[f"l{i}"](x)) + x
            x = Refusing.apply(x) if self.refuses and i == 0 else x
        return x


def net() -> Net:
    """The same on all ranks, which may be threads that share torch's generator."""
    model = Net()
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):
            param.copy_(rand(*param.shape, seed=i).double() / 3)
    return model


def rank_of(group: Any) -> int:
    """The rank that a group of either kind belongs to."""
    rank = group.rank
    return rank() if callable(rank) else rank


def batch(rank: int, step: int = 0) -> Tensor:
    return rand(4, WIDTH, seed=100 * step + rank).double()


def grads(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def mean_of(world_size: int, loss: Callable[[Net, int], Tensor]) -> dict[str, Any]:
    """The mean over ranks of gradients, from one process."""
    model = net()
    total = sum(loss(model, rank) for rank in range(world_size)) / world_size
    assert isinstance(total, Tensor)
    total.backward()
    return grads(model)


def assert_close(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


# Gradients


def one_step(group: Any, options: dict[str, Any]) -> dict[str, Any]:
    ddp = DDP(net(), process_group=group, **options)
    ddp(batch(rank_of(group))).square().mean().backward()
    return grads(ddp.module)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": TINY_CAP_MB},
        {"bucket_cap_mb": TINY_CAP_MB, "find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"init_sync": False},
        {"bucket_cap_mb_list": [TINY_CAP_MB, 1.0]},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
def test_gradients_are_the_mean(launch: Launch, options: dict[str, Any]) -> None:
    wanted = mean_of(2, lambda model, rank: model(batch(rank)).square().mean())
    for found in launch(2, one_step, options):
        assert_close(found, wanted)


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
    assert "other ranks: layers.l1.bias, layers.l1.weight" in errors[0][0]
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


# Where a backward pass ends


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


def broken_off(group: Any) -> list[str]:
    model = net()
    ddp = DDP(model, process_group=group, bucket_cap_mb=TINY_CAP_MB)
    ddp(batch(rank_of(group))).sum().backward()
    ddp.zero_grad()
    said = []
    model.refuses = rank_of(group) == 1
    try:
        out = ddp(batch(rank_of(group)))
        out.square().mean().backward()
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
    model.refuses = False
    if rank_of(group) == 1:
        with pytest.warns(UserWarning, match="broken off"):
            out = ddp(batch(rank_of(group)))
    else:
        out = ddp(batch(rank_of(group)))
    ddp.zero_grad()
    out.square().mean().backward()
    return [*said, str(grads(model))]


def test_a_backward_that_is_broken_off_fails_on_all_ranks_and_all_go_on(launch: Launch) -> None:
    first, second = launch(2, broken_off)
    assert first[0].startswith("PeerError: rank 1 failed at step 1: RuntimeError: backward was")
    assert second[0] == "ValueError: no backward here"
    assert first[1] == second[1]


# Gradients that are there before


def keeps_tensors(group: Any, as_view: bool) -> tuple[bool, bool, dict[str, Any]]:
    ddp = DDP(net(), process_group=group, gradient_as_bucket_view=as_view)
    weight = ddp.module.layers["l0"].weight
    ddp(batch(rank_of(group))).square().mean().backward()
    before = weight.grad
    seen = before.clone()
    ddp(batch(rank_of(group), 1)).square().mean().backward()
    return weight.grad is before, torch.equal(before, seen), grads(ddp.module)


@pytest.mark.parametrize("as_view", [False, True])
def test_gradients_accumulate_where_there_were_some(launch: Launch, as_view: bool) -> None:
    def loss(model: Net, rank: int) -> Tensor:
        first = model(batch(rank)).square().mean()
        return first + model(batch(rank, 1)).square().mean()

    for same, _, found in launch(2, keeps_tensors, as_view):
        assert same is not as_view
        assert_close(found, mean_of(2, loss))


def untouched(group: Any) -> list[Any]:
    ddp = DDP(net(), process_group=group, find_unused_parameters=True)
    own = torch.full((WIDTH, WIDTH), 7.0, dtype=torch.float64) + rank_of(group)
    weight = ddp.module.layers["l1"].weight
    weight.grad = own
    ddp(batch(rank_of(group)), through=(0, 2)).sum().backward()
    return [weight.grad is own, own.unique().tolist()]


def test_what_no_rank_used_keeps_its_gradient(launch: Launch) -> None:
    assert launch(2, untouched) == [[True, [7.0]], [True, [8.0]]]


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


# What does not synchronise


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
    """Whether gradients of one backward came out synchronised."""
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


# Parameters that change


def unfrozen(group: Any) -> list[Any]:
    model = net()
    model.layers["l1"].requires_grad_(False)
    ddp = DDP(model, process_group=group, bucket_cap_mb=TINY_CAP_MB)
    ddp(batch(rank_of(group))).square().mean().backward()
    frozen = grads(model)
    ddp.zero_grad()
    model.layers["l1"].requires_grad_(True)
    model.layers["l0"].requires_grad_(False)
    ddp(batch(rank_of(group))).square().mean().backward()
    both = [frozen, grads(model)]
    ddp.zero_grad()
    model.layers["l2"] = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for p in model.layers["l2"].parameters():
            p.fill_(0.25)
    for number in range(2):
        ddp.zero_grad()
        ddp(batch(rank_of(group), number)).square().mean().backward()
    return [*both, grads(model), ddp.steps.engine.program.plan.paths]


def test_frozen_unfrozen_and_replaced_parameters(launch: Launch) -> None:
    def partly(frozen: str) -> dict[str, Any]:
        model = net()
        model.layers[frozen].requires_grad_(False)
        (sum(model(batch(r)).square().mean() for r in range(2)) / 2).backward()
        return grads(model)

    replaced = net()
    replaced.layers["l0"].requires_grad_(False)
    replaced.layers["l2"] = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for p in replaced.layers["l2"].parameters():
            p.fill_(0.25)
    (sum(replaced(batch(r, 1)).square().mean() for r in range(2)) / 2).backward()
    for first, second, third, paths in launch(2, unfrozen):
        assert_close(first, partly("l1"))
        assert_close(second, partly("l0"))
        assert_close(third, grads(replaced))
        assert "layers.l1.weight" in paths


def unfrozen_on_one_rank(group: Any) -> str:
    model = net()
    model.layers["l1"].requires_grad_(False)
    ddp = DDP(model, process_group=group)
    ddp(batch(rank_of(group))).sum().backward()
    if rank_of(group) == 0:
        model.layers["l1"].requires_grad_(True)
    with pytest.raises(fddp.FddpError) as caught:
        ddp(batch(rank_of(group))).sum().backward()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_parameters_that_change_on_one_rank_are_an_error_on_all(launch: Launch) -> None:
    first, second = launch(2, unfrozen_on_one_rank)
    assert "other parameters than before on rank 0" in first
    assert "on rank 1 it has not" in first
    assert second.startswith("PeerError")
    assert "ParametersChangedError" in second


# Start


def start(group: Any) -> list[Any]:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_mean += rank_of(group)
    tied = nn.ModuleList([model, model[0]])
    DDP(tied, process_group=group)
    return [p.tolist() for p in (*model.parameters(), *model.buffers())]


def test_parameters_and_buffers_start_as_rank_zeros(launch: Launch) -> None:
    first, second = launch(2, start)
    assert first == second


def other_shapes(group: Any, what: str) -> str:
    width = WIDTH + rank_of(group) if what == "shape" else WIDTH
    layers = [
        nn.Linear(WIDTH, width) for _ in range(1 + (rank_of(group) if what == "count" else 0))
    ]
    with pytest.raises(fddp.PlanMismatchError) as caught:
        DDP(nn.Sequential(*layers), process_group=group)
    return str(caught.value)


@pytest.mark.parametrize("what", ["shape", "count"])
def test_ranks_that_differ_are_an_error_on_all(launch: Launch, what: str) -> None:
    for text in launch(2, other_shapes, what):
        assert "rank 0 has" in text
        assert "rank 1 has" in text


# Buffers


class Scaled(nn.Module):
    """Needs its buffer in backward."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([2.0 + rank]))
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.scale


def two_forwards(group: Any) -> list[Any]:
    model = Scaled(rank_of(group))
    ddp = DDP(model, process_group=group)
    before = model.scale
    one = ddp(torch.ones(1))
    is_same = model.scale is before
    if rank_of(group) == 0:
        model.scale = torch.tensor([5.0])  # reassigned: rank 1 gets it, too
    two = ddp(torch.ones(1))
    (one + two).sum().backward()
    return [is_same, model.scale.item(), model.weight.grad.item()]


def test_a_second_forward_does_not_write_what_the_first_still_needs(launch: Launch) -> None:
    assert launch(2, two_forwards) == [[True, 5.0, 7.0], [True, 5.0, 7.0]]


# Life cycle


def let_go(group: Any) -> list[bool]:
    model = net()
    ddp = DDP(model, process_group=group)
    gc.collect()
    gc.disable()
    try:
        for step in range(3):
            ddp(batch(rank_of(group), step)).square().mean().backward()
        grad = weakref.ref(model.layers["l0"].weight.grad)
        wrapper, steps = weakref.ref(ddp), weakref.ref(ddp.steps)
        ddp.zero_grad()
        freed = [grad() is None]
        del ddp
        return [*freed, wrapper() is None, steps() is None]
    finally:
        gc.enable()


def test_nothing_waits_for_the_garbage_collector(launch: Launch) -> None:
    assert launch(2, let_go) == [[True] * 3] * 2


def wrapped_again(group: Any) -> dict[str, Any]:
    model = net()
    for _ in range(3):
        ddp = DDP(model, process_group=group)
        ddp(batch(rank_of(group))).square().mean().backward()
        ddp.zero_grad()
        del ddp
    ddp = DDP(model, process_group=group)
    ddp(batch(rank_of(group))).square().mean().backward()
    return grads(model)


def test_a_module_can_be_wrapped_again(launch: Launch) -> None:
    wanted = mean_of(2, lambda model, rank: model(batch(rank)).square().mean())
    for found in launch(2, wrapped_again):
        assert_close(found, wanted)


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


def no_hooks(group: Any) -> bool:
    ddp = DDP(net(), process_group=group)
    ddp._remove_autograd_hooks()
    loss = ddp(batch(rank_of(group))).square().mean()
    loss.backward()
    return ddp.steps.engine.step == 0


def test_without_hooks_gradients_stay_local(launch: Launch) -> None:
    assert launch(2, no_hooks) == [True, True]


def observed(group: Any) -> list[Any]:
    ddp = DDP(net(), process_group=group, bucket_cap_mb=TINY_CAP_MB)
    with pytest.raises(ValueError, match="no step"):
        ddp.timeline()
    ddp(batch(rank_of(group))).square().mean().backward()
    ddp(batch(rank_of(group))).square().mean().backward()
    timeline = ddp.timeline()
    data = ddp._get_ddp_logging_data()
    return [len(ddp.plan.buckets), type(timeline).__name__, data["iteration"], data["world_size"]]


def test_plan_and_timeline_can_be_looked_at(launch: Launch) -> None:
    found = launch(2, observed)
    assert found[0] == found[1]
    assert found[0][0] > 1
    assert found[0][1:] == ["Timeline", 1, 2]


def is_torchs(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    twin = copy.deepcopy(ddp)
    for wrapper in (ddp, twin):
        wrapper(batch(rank)).square().mean().backward()
    return [
        isinstance(ddp, StockDDP),
        list(ddp.state_dict()) == [f"module.{n}" for n in net().state_dict()],
        str(grads(ddp.module)) == str(grads(twin.module)),
    ]


def test_it_is_torchs_class_and_can_be_copied(ranks: RankPool) -> None:
    assert ranks.run(2, is_torchs) == [[True] * 3] * 2


# Hooks


def resumed(group: Any, interrupted: bool) -> list[Any]:
    """Steps under a hook with state; `interrupted` saves all after three, and goes on from that."""

    def wrapped(model: Net) -> Any:
        ddp = DDP(model, process_group=group, bucket_cap_mb=TINY_CAP_MB)
        ddp.register_comm_hook(None, fddp.hooks.power_sgd(2))
        return ddp

    ddp = wrapped(net())
    for number in range(6):
        if interrupted and number == 3:
            file = io.BytesIO()
            torch.save([ddp.module.state_dict(), ddp.comm_hook_state], file)
            file.seek(0)
            weights, states = torch.load(file, weights_only=True)
            model = Net()
            model.load_state_dict(weights)
            ddp = wrapped(model)
            ddp.comm_hook_state = states
        ddp.zero_grad()
        ddp(batch(rank_of(group), number)).square().mean().backward()
        with torch.no_grad():
            for param in ddp.module.parameters():
                param -= 0.1 * param.grad
    return [p.tolist() for p in ddp.module.parameters()]


def test_state_of_a_hook_is_saved_and_resumed_to_the_same_bits(launch: Launch) -> None:
    straight = launch(2, resumed, False)
    assert straight[0] == straight[1]
    assert launch(2, resumed, True) == straight


def _annotated_bucket(state: Any, bucket: int) -> Any: ...


def _annotated_result(state: Any, bucket: Any) -> Tensor: ...


def hooks_once(group: Any) -> list[str]:
    ddp = DDP(net(), process_group=group)
    ddp.register_comm_hook(None, fddp.hooks.fp16_compress)
    said = []
    for hook in (fddp.hooks.allreduce, len, 5, _annotated_bucket, _annotated_result):
        with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
            ddp.register_comm_hook(None, hook)
        said.append(str(caught.value))
    with pytest.raises(fddp.TreeMismatchError):
        ddp.comm_hook_state = (torch.zeros(3),)
    return said


def test_one_hook_and_only_callables(launch: Launch) -> None:
    for once, no_bucket, uncallable, bucket, result in launch(2, hooks_once):
        assert "can only be called once" in once
        assert "must take a state and a bucket" in no_bucket
        assert "must be callable" in uncallable
        assert "bucket annotation should be dist.GradBucket" in bucket
        assert "return annotation should be" in result


# Forward


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


class Wide(nn.Module):
    """Of layers that are a bucket each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def compiled(rank: int, world_size: int) -> dict[str, list[int]]:
    """Operations in each graph that dynamo makes of a wrapped module."""
    graphs: dict[str, list[int]] = {}
    model = Wide()
    for name, wrapper in (("stock", StockDDP), ("fddp", DDP)):
        sizes = graphs[name] = []

        def backend(graph: Any, _: Any, sizes: list[int] = sizes) -> Any:
            sizes.append(len([node for node in graph.graph.nodes if node.op == "call_module"]))
            return graph

        torch._dynamo.reset()
        ddp = torch.compile(wrapper(copy.deepcopy(model), bucket_cap_mb=1.3), backend=backend)
        ddp(torch.ones(2, 600)).sum().backward()
    return graphs


def test_dynamo_splits_graphs_at_buckets_as_for_stock(ranks: RankPool) -> None:
    for graphs in ranks.run(2, compiled):
        assert len(graphs["stock"]) == 3
        assert graphs["fddp"] == graphs["stock"]


# What goes wrong on the way


def overflow(group: Any) -> list[bool]:
    model = nn.Linear(WIDTH, 1)
    ddp = DDP(model, process_group=group)
    ddp.register_comm_hook(None, fddp.hooks.error_feedback(fddp.hooks.fp16_compress))
    finite = []
    for scale in (1.0, 1e6, 1.0, 1.0):  # the second is too large for float16
        ddp.zero_grad()
        (ddp(torch.ones(1, WIDTH)).sum() * scale).backward()
        finite.append(bool(torch.isfinite(model.weight.grad).all()))
    return finite


def test_an_overflow_does_not_stay_in_the_state_of_a_hook(launch: Launch) -> None:
    assert launch(2, overflow) == [[True, False, True, True]] * 2


def broken_then_eval(group: Any) -> str:
    model = nn.Sequential(net(), nn.BatchNorm1d(WIDTH, dtype=torch.float64))
    ddp = DDP(model, process_group=group)
    ddp(batch(rank_of(group))).square().sum().backward()
    ddp.zero_grad()
    model[0].refuses = rank_of(group) == 0
    with contextlib.suppress(ValueError, fddp.PeerError):
        ddp(batch(rank_of(group))).square().sum().backward()
    model[0].refuses = False
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        ddp(batch(rank_of(group)))
    ddp.zero_grad()
    ddp(batch(rank_of(group))).square().sum().backward()
    return str(grads(model))


@pytest.mark.filterwarnings("ignore:the step of a backward pass")
def test_a_forward_without_gradients_gives_up_what_was_broken_off(launch: Launch) -> None:
    first, second = launch(2, broken_then_eval)
    assert first == second


def heads(group: Any) -> bool:
    """New heads in the place of old ones, which may get the address of those."""
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    trunk = nn.Sequential(model["body"], model["head"])
    ddp = DDP(trunk, process_group=group)
    for number in range(8):
        ddp(torch.ones(1, 2) * (1 + rank_of(group))).sum().backward()
        if ddp.module[1].weight.grad is None:
            return False
        ddp.zero_grad()
        if number % 2 == rank_of(group):
            _ballast = [nn.Linear(2, 2) for _ in range(3)]
        del model["head"], trunk[1]
        model["head"] = nn.Linear(2, 2)
        trunk.append(model["head"])
    return True


def test_a_new_layer_is_noticed_whatever_its_address(launch: Launch) -> None:
    assert launch(2, heads) == [True, True]


def other_group(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    ddp.register_comm_hook(None, fddp.hooks.bf16_compress)
    ddp(batch(rank)).square().mean().backward()
    ddp._update_process_group(dist.new_group([0, 1]))
    ddp.zero_grad()
    ddp(batch(rank)).square().mean().backward()
    return [ddp.steps.engine.hook == fddp.hooks.bf16_compress, str(grads(ddp.module))]


def test_another_group_keeps_the_hook(ranks: RankPool) -> None:
    first, second = ranks.run(2, other_group)
    assert first[0]
    assert first == second


def parameters_of_hooks(group: Any) -> set[tuple[int, ...]]:
    seen: set[tuple[int, ...]] = set()

    def hook(state: Any, bucket: Any) -> Any:
        seen.add(tuple(id(p) for p in bucket.parameters()))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = net()
    model.layers["l2"].requires_grad_(False)
    ddp = DDP(model, process_group=group)
    ddp.register_comm_hook(None, hook)
    ddp(batch(0)).square().mean().backward()
    model.layers["l2"].requires_grad_(True)
    ddp(batch(0)).square().mean().backward()
    ids = {id(p): n for n, p in model.named_parameters()}
    return {tuple(sorted(ids[i] for i in found)) for found in seen}


def test_hooks_see_the_parameters_as_they_are(launch: Launch) -> None:
    every = tuple(sorted(n for n, _ in net().named_parameters()))
    for seen in launch(2, parameters_of_hooks):
        assert every in seen


def fails_to_arm(group: Any) -> str:
    ddp = DDP(net(), process_group=group)
    ddp(batch(0)).square().mean().backward()
    if rank_of(group) == 1:

        def refuse(bucket: int) -> Tensor:
            raise MemoryError("no memory for a bucket")

        opened = ddp.steps.engine.open

        def open_(*, with_stats: bool) -> Any:
            session = opened(with_stats=with_stats)
            session.begin = refuse
            return session

        ddp.steps.engine.open = open_
    with pytest.raises((MemoryError, TypeError, fddp.PeerError)) as caught:
        ddp(batch(0)).square().mean().backward()
    return type(caught.value).__name__


def test_what_fails_at_the_start_of_a_step_is_told_to_all(launch: Launch) -> None:
    first, second = launch(2, fails_to_arm)
    assert first == "PeerError"
    assert second != "PeerError"


def frees_under_lock(group: Any) -> bool:
    """Gradients that Python knows are let go of while another thread wants the lock."""
    model = nn.Linear(512, 512)
    ddp = DDP(model, process_group=group)
    seen: list[int] = []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(id(p.grad)))
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            ddp.steps._set.arrival_count()

    ddp(torch.ones(1, 512)).sum().backward()
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(20):
            ddp.zero_grad()
            ddp(torch.ones(1, 512)).sum().backward()
    finally:
        stop.set()
        thread.join()
    return len(seen) == 21


def test_no_deadlock_of_lock_and_interpreter(launch: Launch) -> None:
    assert launch(1, frees_under_lock) == [True]
