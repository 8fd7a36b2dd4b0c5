"""`fddp.DistributedDataParallel(nonfinite=...)`: steps with NaN or infinity in them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

import fddp
from fddp.ddp.steps import Steps
from tests.support.collectives import collectives_called
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
    ddp = DDP(model, process_group=group, nonfinite="skip", **OPTIONS[name])
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


def test_state_of_a_hook_is_as_before() -> None:
    def run(group: Any) -> Any:
        ddp = DDP(small_net(), process_group=group, nonfinite="skip")
        ddp.register_comm_hook(None, fddp.hooks.top_k(0.5))
        loss(ddp, group.rank).backward()
        before = copy.deepcopy(ddp.comm_hook_state)
        loss(ddp, group.rank, factor=NAN if group.rank else 1.0).backward()
        assert ddp.skipped
        assert same_bits([before, ddp.comm_hook_state])
        loss(ddp, group.rank, step=1).backward()
        assert not ddp.skipped
        assert not same_bits([before, ddp.comm_hook_state])

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

    def run(group: Any, policy: Any) -> Any:
        model = small_net()
        ddp = DDP(model, process_group=group, nonfinite=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        skipped = []
        with ddp.join():
            for step in range(1 + 2 * group.rank):
                optimizer.zero_grad()
                loss(ddp, group.rank, step, NAN if step == 1 else 1.0).backward()
                skipped.append(ddp.skipped)
                optimizer.step()
        return skipped, values(model)

    (early, found), (late, wanted) = fddp.loopback(2, run, "skip")
    assert (early, late) == ([False], [False, True, False])
    assert same_bits([found, wanted])
    assert all(value.isfinite().all() for value in found)
    first, second = fddp.loopback(2, lambda group: ending(partial(run, group, "raise")))
    assert first.kinds[0] == "NonFiniteError"
    assert first == second
    assert "step 1: gradients are not finite: rank 1 has 6 NaN in leaf 'layers.l0.b" in first.text


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


@pytest.mark.parametrize("name", OPTIONS)
def test_the_error_names_ranks_and_parameters(name: str) -> None:
    fddp.loopback(2, named, name)


def test_on_processes(ranks: RankPool) -> None:
    ranks.run(2, named_on_processes)


def named_on_processes(rank: int, world_size: int) -> None:
    named(torch.distributed.group.WORLD, "many buckets")


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("clear", [True, False], ids=["cleared", "zeroed"])
def test_after_an_error_no_rank_has_the_others_gradients(views: bool, clear: bool) -> None:
    """As after any step that failed: none where there were none, and this rank's own where there
    were some, but for those that were being reduced in place."""

    def run(group: Any) -> None:
        model = small_net()
        ddp = DDP(model, process_group=group, nonfinite="raise", gradient_as_bucket_view=views)
        for _ in range(2):  # the second plan is that of later steps
            loss(ddp, group.rank).backward()
            model.zero_grad(set_to_none=clear)
        own = torch.autograd.grad(loss(ddp.module, group.rank), list(model.parameters()))
        with pytest.raises(fddp.NonFiniteError):
            loss(ddp, group.rank, factor=NAN if group.rank else 1.0).backward()
        for param, wanted in zip(model.parameters(), own, strict=True):
            if clear:
                assert param.grad is None
            elif param.grad is None:
                assert views
            else:
                assert param.grad.isnan().all() if group.rank else same_bits([param.grad, wanted])

    fddp.loopback(2, run)


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


@given(st.data())
@settings(max_examples=8)
def test_all_ranks_decide_as_one_process_would(data: st.DataObject) -> None:
    ranks, steps = data.draw(st.integers(1, 3)), 3
    numbers = st.sampled_from([1.0, 1.0, -2.0, NAN, INF, 1e38])
    factors = [[data.draw(numbers) for _ in range(ranks)] for _ in range(steps)]
    through = [[data.draw(st.sampled_from([(0,), (1, 2)])) for _ in range(ranks)] for _ in factors]
    arguments = {
        "bucket_cap_mb": data.draw(st.sampled_from([TINY_CAP_MB, 1.0])),
        "gradient_as_bucket_view": data.draw(st.booleans()),
        "find_unused_parameters": True,
    }
    clear = data.draw(st.booleans())

    def run(group: Any) -> Any:
        model = small_net()
        ddp = DDP(model, process_group=group, nonfinite="skip", **arguments)
        seen = []
        for step in range(steps):
            model.zero_grad(set_to_none=clear)
            by, path = factors[step][group.rank], through[step][group.rank]
            loss(ddp, group.rank, step, by, through=path).backward()
            seen.append((ddp.skipped, grads(model)))
        return seen

    wanted = [_alone(step, factors[step], through[step]) for step in range(steps)]
    for seen in fddp.loopback(ranks, run):
        for (skipped, found), (skips, means) in zip(seen, wanted, strict=True):
            assert skipped == skips
            assert not skips or found == [None] * 6
            for one, mean in zip(found, means, strict=True):
                if mean is not None and not skips:
                    assert ((one.double() - mean.value).abs() <= mean.rounding).all()


class _Mean(NamedTuple):
    """The mean of gradients, and how far off sums of them in float32 may be."""

    value: Tensor
    rounding: Tensor


def _alone(
    step: int, factors: list[float], through: list[tuple[int, ...]]
) -> tuple[bool, list[_Mean | None]]:
    """Return whether the step is to be skipped, and the mean gradients, from one process."""
    own = []
    for rank, (factor, path) in enumerate(zip(factors, through, strict=True)):
        model = small_net()
        loss(model, rank, step, factor, through=path).backward()
        own.append(grads(model))
    eps, ranks = torch.finfo(torch.float32).eps, len(own)
    means: list[_Mean | None] = []
    for column in zip(*own, strict=True):
        parts = [part.double() for part in column if part is not None]
        # Large parts may cancel: what is rounded is in proportion to them, not to their sum.
        rounding = sum(part.abs() for part in parts) * (ranks + 1) * eps / ranks
        means.append(_Mean(sum(parts) / ranks, rounding) if parts else None)
    everything = [mean.value.float() for mean in means if mean is not None]
    everything += [part for column in own for part in column if part is not None]
    return not all(part.isfinite().all() for part in everything), means


# What it costs


def test_a_good_step_costs_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = collectives_called(monkeypatch)

    def made(policy: Any) -> list[str]:
        def run(group: Any) -> None:
            ddp = DDP(small_net(), process_group=group, nonfinite=policy, bucket_cap_mb=TINY_CAP_MB)
            for _ in range(3):
                calls.clear()
                loss(ddp, group.rank).backward()

        fddp.loopback(1, run)
        return list(calls)

    plain = made("propagate")
    assert plain
    assert made("skip") == made("raise") == plain


# What is refused


def refused(policy: Any, arm: Callable[[Net], dict[str, Any]], use: Callable[[Any], Any]) -> str:
    def run(group: Any) -> str:
        model = small_net()
        with pytest.raises(ValueError, match="nonfinite") as caught:
            use(DDP(model, process_group=group, nonfinite=policy, **arm(model)))
        return str(caught.value)

    (text,) = set(fddp.loopback(2, run))
    return text


def delayed(model: Net) -> dict[str, Any]:
    last = model.layers["l2"].bias
    return {
        "delay_all_reduce_named_params": [("l2.bias", last)],
        "param_to_hook_all_reduce": last,
    }


def stepping(model: Net) -> dict[str, Any]:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return {}


@pytest.mark.filterwarnings("ignore:`torch.jit")  # of torch's own optimizers, as they are imported
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_what_does_not_go_with_a_policy(policy: str) -> None:
    """Parameters that are averaged apart, and optimizers that step before all is known."""
    for name, text in {
        "delay_all_reduce_named_params": refused(policy, delayed, lambda ddp: None),
        "_apply_optimizer_in_backward": refused(policy, stepping, lambda ddp: loss(ddp, 0)),
        "_register_fused_optim": refused(
            policy,
            lambda model: {},
            lambda ddp: ddp._register_fused_optim(torch.optim.SGD, lr=0.1),
        ),
    }.items():
        assert text.startswith(f"nonfinite='{policy}' and {name} can't be combined")


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
