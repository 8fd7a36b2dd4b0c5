"""Steps whose sums over ranks, or the results of a hook, overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)

import fddp
from fddp.core.numerics.overflow import max_safe_magnitude
from tests.support.models import same_bits
from tests.support.ranks import launch_over
from tests.support.spoiled_trees import INF, NAN, dot, overflow, tree


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("way", ["__call__", "reduce_", "reduce_scatter"])
def test_sums_that_overflow(dtype: torch.dtype, way: str) -> None:
    def outcome(group: Any) -> Any:
        return overflow(group, "skip", dtype, way, with_info=True)

    for mean, _, after in fddp.loopback(2, overflow, "skip", dtype, way):
        assert mean == {"a": None, "b": None, "c": None}
        assert after
    for mean, info, after in fddp.loopback(2, outcome):
        assert mean == {"a": None, "b": None, "c": None}
        assert info.skipped
        assert not info.all_finite
        assert after
    name = str(dtype).removeprefix("torch.")
    advice = {
        "float16": "sum in float32 by reduce_dtype=torch.float32, or lower the loss scale"
    }.get(name, "lower the loss scale, or divide all weights by one number")
    for text, attributes, after in fddp.loopback(2, overflow, "raise", dtype, way):
        assert text == (
            f"step 0: every rank's gradients are finite, and their sum over ranks in {name} "
            f"overflowed: it has 1 infinity in leaf 'b'; no rank got any gradients, and the group "
            f"can go on: {advice}"
        )
        assert attributes == ((), {}, {"b": (0, 1)})
        assert after


@pytest.mark.parametrize("options", [{}, {"scaling": "after", "reduce_dtype": "float32"}])
def test_large_gradients_whose_mean_is_finite_are_kept(options: Any) -> None:
    """Divided before they are summed, or by the remedy that the error suggests."""

    def run(group: Any) -> Any:
        own = tree(60000.0, torch.float16)
        schedule = fddp.make_schedule(fddp.plan_buckets(own), fddp.Topology(world=2), **options)
        with fddp.GradSync(schedule, group=group, nonfinite="raise") as sync:
            return sync(own)["b"]

    for mean in fddp.loopback(2, run):
        assert mean.eq(60000.0).all()


# Hooks


def test_a_hook_that_overflows_is_named() -> None:
    def run(group: Any) -> Any:
        own = tree(1e6)
        with fddp.GradSync(
            own, group=group, nonfinite="raise", hook=fddp.hooks.fp16_compress
        ) as sync:
            with pytest.raises(fddp.NonFiniteError) as caught:
                sync(own)
            return str(caught.value)

    for text in fddp.loopback(2, run):
        assert "it has 5 infinities in leaf 'a', 6 infinities in leaf 'b'" in text
        assert "lower the loss scale, or leave out the hook fp16_compress" in text


def times_4(state: Any, bucket: Any) -> Any:
    """A hook of torch's kind that leaves each rank with its own gradients, four times as large."""
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer() * 4)
    return future


def steps_apart(group: Any, policy: Any, hook: fddp.hooks.TorchHook, name: str) -> list[Any]:
    """Two steps in which the result of rank 1 alone overflows, and one in which none does."""
    rank = group.rank if name == "loopback" else dist.get_rank()
    one = torch.ones(4, dtype=torch.float16)
    large = {"w": 30000.0 * one if rank == 1 else one}
    seen: list[Any] = []
    with fddp.GradSync(large, group=group, nonfinite=policy, hook=hook, timeout_s=20.0) as sync:
        assert sync.transport == name
        for own in large, large, {"w": one}:
            try:
                grads, info = sync(own, with_info=True)
                seen.append((info.skipped, grads["w"] is None, info.all_finite))
            except fddp.NonFiniteError as error:
                seen.append((str(error), error.ranks, error.overflowed))
        (log,) = fddp.flight(sync).logs
        votes = [(op.step, op.nbytes, op.state) for op in log.ops if op.kind == "vote on results"]
        assert votes == [(step, 8, "done") for step in range(3)]
        exchanges = [op.step for op in log.ops if op.kind == "exchange of counts"]
        assert exchanges == ([0, 1] if policy == "raise" else [])
    return seen


def decided_alike(policy: str, name: str) -> list[Any]:
    """Return the result of `steps_apart` on each rank, under the named hook."""
    if policy == "skip":
        return [(True, True, False), (True, True, False), (False, False, True)]
    texts = [
        f"step {step}: every rank's gradients are finite, and the results of TorchHook({name}) "
        f"are not: rank 1 has 4 infinities in leaf 'w'; no rank got any gradients, and the group "
        f"can go on: lower the loss scale, or leave out the hook"
        for step in range(2)
    ]
    return [*((text, (), {"w": (0, 4)}) for text in texts), (False, False, True)]


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_results_that_are_each_ranks_own(policy: str) -> None:
    runs = fddp.loopback(2, steps_apart, policy, fddp.hooks.TorchHook(None, times_4), "loopback")
    assert runs == [decided_alike(policy, "times_4")] * 2


def local_sgd_times_4(state: Any, bucket: Any) -> Any:
    bucket.buffer().mul_(4)
    return post_localSGD_hook(state, bucket)


def within_subgroups(group: Any, policy: Any) -> list[Any]:
    subgroups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    state = PostLocalSGDState(None, subgroups[dist.get_rank()], start_localSGD_iter=0)
    hook = fddp.hooks.TorchHook(state, local_sgd_times_4)
    return steps_apart(group, policy, hook, "c10d")


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_results_of_subgroups_over_gloo(request: pytest.FixtureRequest, policy: str) -> None:
    runs = launch_over("c10d", request)(2, within_subgroups, policy)
    assert runs == [decided_alike(policy, "local_sgd_times_4")] * 2


def test_the_same_results_under_a_hook_of_torch_are_counted_once() -> None:
    def run(group: Any) -> Any:
        own = {"w": torch.full((4,), 60000.0, dtype=torch.float16)}
        hook = fddp.hooks.TorchHook(None, times_4)
        with (
            fddp.GradSync(own, group=group, nonfinite="raise", hook=hook) as sync,
            pytest.raises(fddp.NonFiniteError, match=r"rank 0 has 4 .*; rank 1 has 4 ") as caught,
        ):
            sync(own)
        return caught.value.overflowed

    assert fddp.loopback(2, run) == [{"w": (0, 4)}] * 2


# Weights


def weigh_1000(params: dict[str, Tensor], factors: dict[str, Tensor]) -> float:
    return 1000.0


def by_a_large_weight(
    sync: fddp.GradSync, way: str, params: dict[str, Tensor], own: dict[str, Tensor]
) -> Any:
    """Gradients that are multiplied by more than 1 as they are packed."""
    if way == "__call__":
        return sync(own, weight=1000.0)
    accumulated = None
    if way == "accumulated":
        accumulated = {name: 500.0 * grad.clamp(max=3e35) for name, grad in own.items()}, 500.0
        accumulated[0]["a"] = own["a"]  # at fault once, in both
    step = sync.value_and_grad(dot, weight_fn=weigh_1000)
    return step(params, own, accumulated=accumulated)[1]


@pytest.mark.parametrize("size", [3, 100_000], ids=["together", "on arrival"])
@pytest.mark.parametrize("way", ["__call__", "value_and_grad", "accumulated"])
def test_leaves_that_overflow_as_they_are_packed_are_not_at_fault(way: str, size: int) -> None:
    def run(group: Any) -> Any:
        params = {"a": torch.ones(2), "b": torch.ones(size)}
        own = {"a": torch.ones(2), "b": torch.full((size,), 3e38)}
        if group.rank == 1:
            own["a"][0] = NAN if way != "accumulated" else INF
        with (
            fddp.GradSync(params, group=group, nonfinite="raise") as sync,
            pytest.raises(fddp.NonFiniteError) as caught,
        ):
            by_a_large_weight(sync, way, params, own)
        return caught.value.counts

    wanted = (1, 0) if way != "accumulated" else (0, 1)
    assert fddp.loopback(2, run) == [{1: {"a": wanted}}] * 2


@pytest.mark.parametrize("way", ["__call__", "value_and_grad"])
def test_the_suggested_remedy_for_large_weights_works(way: str) -> None:
    def run(group: Any) -> Any:
        params = {"w": torch.ones(3)}
        own = {"w": torch.full((3,), 1e38)}
        with fddp.GradSync(params, group=group, nonfinite="raise") as sync:
            with pytest.raises(fddp.NonFiniteError) as caught:
                by_a_large_weight(sync, way, params, own)
            return str(caught.value), sync(own, weight=1.0)

    for text, mean in fddp.loopback(2, run):
        assert text.endswith("lower the loss scale, or divide all weights by one number")
        assert same_bits([mean, {"w": torch.full((3,), 1e38)}])


@given(
    st.sampled_from(["float16", "bfloat16", "float32"]),
    st.integers(1, 64),
    st.randoms(use_true_random=False),
)
def test_sums_below_the_bound_are_finite(wire: str, ranks: int, random: Any) -> None:
    """The largest sums: all at the bound, with the same sign, added up one after the other or in
    pairs, each rounded."""
    dtype = getattr(torch, wire)
    limit = torch.tensor(max_safe_magnitude(wire, wire, ranks), dtype=torch.float64).to(dtype)
    terms = [limit] * ranks
    while len(terms) > 1:
        first, second = (terms.pop(random.randrange(len(terms))) for _ in range(2))
        terms.append(first + second)
    assert terms[0].isfinite()
    assert (terms[0].double() * 4).to(dtype).isfinite()
