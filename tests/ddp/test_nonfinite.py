"""`fddp.DistributedDataParallel(nonfinite=...)`: steps with NaN or infinity in them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

import fddp
from fddp.ddp.steps import Steps
from tests.support.endings import ending
from tests.support.groups import rank_of
from tests.support.models import rand, same_bits
from tests.support.ranks import RankPool
from tests.support.wrapped_net import DDP, WIDTH, Net, net

pytestmark = pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
NAN, INF = math.nan, math.inf
TINY_CAP_MB = 1e-5  # a bucket for each parameter
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "many buckets": {"bucket_cap_mb": TINY_CAP_MB},
    "views": {"bucket_cap_mb": TINY_CAP_MB, "gradient_as_bucket_view": True},
    "unused announced": {"bucket_cap_mb": TINY_CAP_MB, "find_unused_parameters": True},
    "unused left out": {"bucket_cap_mb": TINY_CAP_MB, "skip_all_reduce_unused_params": True},
    "static": {"static_graph": True},
    "hook with state": {"hook": fddp.hooks.top_k(0.5)},
}


def loss(ddp: Any, rank: int, step: int = 0, factor: float = 1.0, **kwargs: Any) -> Tensor:
    """Whose gradient is this factor times that of a batch."""
    x = rand(3, WIDTH, seed=10 * step + rank, dtype=torch.float32)
    return ddp(x, **kwargs).square().mean() * factor


def small_net() -> Net:
    return net().float()


def grads(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def values(module: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in module.parameters()]


# Skip


def trained(group: Any, bad: float | None, name: str, clear: bool) -> tuple[list[bool], Any]:
    """Three steps, the second with a bad number on rank 1; None leaves that step out."""
    model, rank = small_net(), group.rank
    options = {key: value for key, value in OPTIONS[name].items() if key != "hook"}
    ddp = DDP(model, process_group=group, nonfinite="skip", **options)
    if "hook" in OPTIONS[name]:
        ddp.register_comm_hook(None, OPTIONS[name]["hook"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    skipped = []
    for step in range(4):
        factor = bad if step == 2 and rank == 1 else 1.0
        if factor is None or (step == 2 and bad is None):
            continue
        optimizer.zero_grad(set_to_none=clear)
        loss(ddp, rank, step, factor).backward()
        skipped.append(ddp.skipped)
        assert all(param.grad is None for param in model.parameters()) == ddp.skipped
        optimizer.step()
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    if name == "hook with state":
        state.append(ddp.comm_hook_state)
    return skipped, [*values(model), *state]


@pytest.mark.parametrize("clear", [True, False], ids=["cleared", "zeroed"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_skipped_step_is_as_if_it_had_not_been(name: str, clear: bool) -> None:
    runs = fddp.loopback(2, trained, INF if clear else NAN, name, clear)
    without = fddp.loopback(2, trained, None, name, clear)
    for (skipped, found), (never, wanted) in zip(runs, without, strict=True):
        assert skipped == [False, False, True, False]
        assert never == [False] * 3
        assert same_bits([found, wanted])


@pytest.mark.parametrize("bad_micro_batch", [0, 1, 2])
@pytest.mark.parametrize("views", [False, True])
def test_accumulated_gradients_are_left_out_too(bad_micro_batch: int, views: bool) -> None:
    """Also where the parameter with the bad number gets none in the pass that synchronises."""

    def run(group: Any) -> None:
        model = small_net()
        ddp = DDP(
            model,
            process_group=group,
            nonfinite="skip",
            gradient_as_bucket_view=views,
            find_unused_parameters=True,
            bucket_cap_mb=TINY_CAP_MB,
        )
        seen = []
        for step in range(3):
            for part in range(3):
                is_bad = (step, part, group.rank) == (1, bad_micro_batch, 1)
                ddp.require_backward_grad_sync = part == 2
                through = (0, 1, 2) if part == 0 else (0, 1)
                factor = NAN if is_bad else 1.0
                loss(ddp, group.rank, part, factor, through=through).backward()
            assert ddp.skipped == (step == 1)
            seen.append(grads(model))
            model.zero_grad()
        assert seen[1] == [None] * 6
        assert same_bits([seen[0], seen[2]])

    fddp.loopback(2, run)


def test_each_backward_of_one_forward_is_a_step_of_its_own() -> None:
    def run(group: Any) -> None:
        model = small_net()
        ddp = DDP(model, process_group=group, nonfinite="skip")
        output = loss(ddp, group.rank)
        seen = []
        for step in range(3):
            (output * (NAN if group.rank == step == 1 else 1.0)).backward(retain_graph=True)
            assert ddp.skipped == (step == 1)
            seen.append(grads(model))
        assert seen[1] == [None] * 6
        assert same_bits([seen[0], seen[2]])

    fddp.loopback(2, run)


def test_sums_that_overflow_in_the_wrapped_modules_narrow_dtype() -> None:
    """Every rank's gradients are finite, as are their casts; the sum is not."""

    def run(group: Any) -> Any:
        narrow = _MixedPrecision(reduce_dtype=torch.float16)
        model = nn.Linear(1, 1, bias=False)
        ddp = DDP(model, process_group=group, nonfinite=policy, mixed_precision=narrow)
        (ddp(torch.ones(1, 1)).sum() * 80_000.0).backward()
        return ddp.skipped, grads(model)

    policy = "skip"
    assert fddp.loopback(4, run) == [(True, [None])] * 4
    policy = "raise"
    with pytest.raises(fddp.NonFiniteError, match="every rank's gradients are finite, and their"):
        fddp.loopback(4, run)


def test_ranks_that_have_joined() -> None:
    """Rank 0 has one input; rank 1 has three, of which the second is bad."""

    def run(group: Any) -> Any:
        model = small_net()
        ddp = DDP(model, process_group=group, nonfinite="skip")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        skipped = []
        with ddp.join():
            for step in range(1 + 2 * group.rank):
                optimizer.zero_grad()
                loss(ddp, group.rank, step, NAN if step == 1 else 1.0).backward()
                skipped.append(ddp.skipped)
                optimizer.step()
        return skipped, values(model)

    (early, found), (late, wanted) = fddp.loopback(2, run)
    assert (early, late) == ([False], [False, True, False])
    assert same_bits([found, wanted])
    assert all(value.isfinite().all() for value in found)


# Raise


def named(group: Any, name: str) -> None:
    """Three steps, the second with NaN in one parameter of rank 1."""
    rank = rank_of(group)
    model = small_net()
    ddp = DDP(model, process_group=group, nonfinite="raise", **OPTIONS[name])
    seen = []
    for step in range(3):
        model.zero_grad()
        bad = NAN if rank and step == 1 else 1.0
        handle = model.layers["l1"].bias.register_hook(lambda grad, by=bad: grad * by)
        if step == 1:
            with pytest.raises(fddp.NonFiniteError) as caught:
                loss(ddp, rank).backward()
        else:
            loss(ddp, rank).backward()
            seen.append(grads(model))
        handle.remove()
    assert str(caught.value) == (
        "step 1: gradients are not finite: rank 1 has 6 NaN in leaf 'layers.l1.bias'; no rank "
        "got any gradients, and the group can go on: leave this batch out, or ask for "
        "nonfinite='skip'"
    )
    assert (caught.value.step, caught.value.ranks) == (1, (1,))
    assert caught.value.paths == {1: ("layers.l1.bias",)}
    assert caught.value.counts == {1: {"layers.l1.bias": (6, 0)}}
    assert same_bits(seen)


@pytest.mark.parametrize("name", [name for name in OPTIONS if "hook" not in name])
def test_the_error_names_ranks_and_parameters(name: str) -> None:
    fddp.loopback(2, named, name)


def test_on_processes(ranks: RankPool) -> None:
    ranks.run(2, named_on_processes)


def named_on_processes(rank: int, world_size: int) -> None:
    named(torch.distributed.group.WORLD, "many buckets")


# As a loss scaler would have it


def test_skipped_steps_match_grad_scaler() -> None:
    """As many steps as it takes for the scale to come down to where gradients are finite."""

    def run(group: Any, policy: Any) -> Any:
        model = small_net()
        ddp = DDP(model, process_group=group, nonfinite=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
        scales = []
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(loss(ddp, group.rank, step, 64.0)).backward()
            if ddp.skipped:
                scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
            else:
                scaler.step(optimizer)
                scaler.update()
            scales.append(scaler.get_scale())
        return scales, values(model)

    runs = fddp.loopback(2, run, "propagate") + fddp.loopback(2, run, "skip")
    assert runs[0][0][0] == 2.0**126
    assert runs[0][0][-1] == runs[0][0][-2] > 2.0**100
    for scales, found in runs[1:]:
        assert scales == runs[0][0]
        assert same_bits([found, runs[0][1]])


# What is refused


def delayed(group: Any, policy: Any) -> None:
    model = small_net()
    last = model.layers["l2"].bias
    named = {
        "delay_all_reduce_named_params": [("l2.bias", last)],
        "param_to_hook_all_reduce": last,
    }
    DDP(model, process_group=group, nonfinite=policy, **named)


def stepping(group: Any, policy: Any) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = small_net()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    loss(DDP(model, process_group=group, nonfinite=policy), 0)


def fused(group: Any, policy: Any) -> None:
    ddp = DDP(small_net(), process_group=group, nonfinite=policy)
    ddp._register_fused_optim(torch.optim.SGD, lr=0.1)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # of torch's own optimizers, as they are imported
@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize(
    ("use", "name"),
    [
        (delayed, "delay_all_reduce_named_params"),
        (stepping, "_apply_optimizer_in_backward"),
        (fused, "_register_fused_optim"),
    ],
)
def test_what_does_not_go_with_a_policy(use: Callable[..., None], name: str, policy: str) -> None:
    """Parameters that are averaged apart, and optimizers that step before all is known."""
    for end in fddp.loopback(2, lambda group: ending(lambda: use(group, policy))):
        assert end.kinds[0] == "ValueError"
        assert end.text.startswith(f"nonfinite='{policy}' and {name} can't be combined")


def test_gradients_in_a_context_of_distributed_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(group: Any) -> str:
        ddp = DDP(small_net(), process_group=group, nonfinite="skip")
        output = loss(ddp, group.rank)
        with pytest.raises(ValueError, match="distributed autograd") as caught:
            output.backward()
        return str(caught.value)

    open_step = Steps.on_first_grad
    monkeypatch.setattr(Steps, "on_first_grad", lambda driver, _: open_step(driver, 1))
    monkeypatch.setattr("torch.distributed.autograd.get_gradients", lambda context: {})
    for text in fddp.loopback(2, run):
        assert text.startswith("nonfinite='skip' can't skip a step whose gradients are in")


def kept(rank: int, world_size: int) -> None:
    copied = copy.deepcopy(DDP(small_net(), nonfinite="skip"))
    for _ in range(2):
        loss(copied, rank, factor=NAN if rank else 1.0).backward()
        assert copied.skipped
        copied._update_process_group(torch.distributed.group.WORLD)


def test_copies_and_wrappers_on_another_group_keep_it(ranks: RankPool) -> None:
    ranks.run(2, kept)
