"""`sync(grads)`: whatever the leaves look like, the result is their mean, with DDP's arithmetic."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

import fddp
from fddp.core.schedule.piggyback import with_separate_word
from fddp.tree.pytree import flatten
from tests.support.dtypes import DTYPES
from tests.support.groups import rank_of
from tests.support.means import ddp_mean, synced
from tests.support.models import (
    largest_difference,
    rand,
    same_bits,
)
from tests.support.ranks import RankPool

# Dtypes and bits


@pytest.mark.parametrize("world_size", [2, 3])
def test_same_bits_as_stock_ddp(ranks: RankPool, world_size: int) -> None:
    """With 3 ranks the control word goes by itself, because equal bits need equal buckets."""
    ranks.run(world_size, compare_with_ddp)


def compare_with_ddp(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(500, 600), nn.Tanh(), nn.Linear(600, 500))
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    # Without this flag the first step of DDP has one bucket, whatever the cap.
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1, find_unused_parameters=True)
    x = rand(8, 500, seed=rank, dtype=torch.float32)
    ddp(x).square().mean().backward()

    # A ring sums each stretch of a bucket from another rank on: equal bits need equal buckets.
    registered = [flatten(params)[1].paths.index(name) for name in params]
    plan = fddp.plan_buckets(params, bucket_cap_mb=1.0, order=registered)
    assert len(plan.buckets) > 1

    def loss_fn(p: dict[str, Tensor]) -> Tensor:
        hidden = torch.tanh(F.linear(x, p["0.weight"], p["0.bias"]))
        return F.linear(hidden, p["2.weight"], p["2.bias"]).square().mean()

    schedule = fddp.make_schedule(plan, fddp.Topology(world=world_size))
    if world_size > 2:
        schedule = with_separate_word(schedule)
    with fddp.GradSync(schedule, transport="c10d") as sync:
        _, grads = sync.value_and_grad(loss_fn)(params)
        again = sync(torch.func.grad(loss_fn)(params))
    for name, p in model.named_parameters():
        assert torch.equal(grads[name], p.grad), name
        assert torch.equal(again[name], p.grad), name


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_same_bits_on_all_ranks(ranks: RankPool, world_size: int) -> None:
    assert same_bits(ranks.run(world_size, many_gradients))


def many_gradients(rank: int, world_size: int) -> Any:
    grads = {
        f"{name}{i}": None if (i + rank) % 5 == 0 else rand(17 * i, 3, seed=i + 9 * rank, dtype=d)
        for name, d in DTYPES.items()
        for i in range(5)
    }
    like = {key: rand(17 * int(key[-1]), 3, seed=0, dtype=DTYPES[key[:-1]]) for key in grads}
    with fddp.GradSync(like, bucket_cap_mb=0.001, first_bucket_mb=0.0002) as sync:
        return sync(grads, weight=(1.0 + rank) / 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.float64])
def test_reduce_dtype_sums_in_it_and_rounds_once(
    dtype: torch.dtype, reduce_dtype: torch.dtype
) -> None:
    def grads_of(rank: int) -> dict[str, Any]:
        wide = rand(6, 5, seed=rank, dtype=torch.complex64)
        return {"a": rand(50, seed=rank, dtype=dtype), "b": None, "wide": wide}

    like = {"a": torch.zeros(50, dtype=dtype), "b": torch.zeros(3, dtype=dtype)}
    like["wide"] = torch.zeros(6, 5, dtype=torch.complex64)
    every = [grads_of(rank) for rank in range(4)]
    expected = ddp_mean([grads["a"].to(reduce_dtype) for grads in every]).to(dtype)
    for result in synced(4, grads_of, params=like, reduce_dtype=reduce_dtype):
        assert torch.equal(result["a"], expected)
        assert result["b"] is None
        assert torch.equal(result["wide"], ddp_mean([grads["wide"] for grads in every]))
    assert not torch.equal(expected, ddp_mean([grads["a"] for grads in every]))


# Memory layouts

BASE = (4, 6, 2, 3)

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "stride 2": lambda t: torch.stack([t, -t], -1)[..., 0],
    "offset": lambda t: torch.cat([t.new_zeros(7), t.reshape(-1)])[7:].view(t.shape),
    "row of a larger": lambda t: torch.stack([t, 2 * t], 1)[:, 0],
    "requires grad": lambda t: t.clone().requires_grad_() * 1,
    "parameter": lambda t: nn.Parameter(t),
    "expanded": lambda t: t.reshape(-1)[0].expand(BASE),
    "expanded row": lambda t: t[:1].expand(BASE),
    "expanded column": lambda t: t[..., :1].expand(BASE),
    "conjugate": lambda t: t.conj(),
    "conjugate and transposed": lambda t: t.conj().transpose(0, 1).conj().transpose(0, 1),
    "negative": torch._neg_view,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("params_layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64], ids=str)
def test_memory_layouts_of_gradients(layout: str, params_layout: str, dtype: torch.dtype) -> None:
    strided = params_layout == "channels_last"
    like = torch.zeros(BASE, dtype=dtype)
    like = like.contiguous(memory_format=torch.channels_last) if strided else like

    def grads_of(rank: int) -> dict[str, Tensor]:
        values = rand(*BASE, seed=rank, dtype=dtype)
        return {"w": LAYOUTS[layout](values) if rank else values, "v": values}

    every = [grads_of(rank) for rank in range(3)]
    assert every[1]["w"].is_neg() == (layout == "negative")
    assert every[1]["w"].is_conj() == (layout == "conjugate" and dtype.is_complex)
    plain = {key: ddp_mean([grads[key].clone() for grads in every]) for key in "wv"}
    for result in synced(3, grads_of, params={"w": like, "v": torch.zeros_like(like)}):
        for key, mean in plain.items():
            assert torch.equal(result[key], mean.resolve_conj())
            assert result[key].stride() == like.stride()
            assert not result[key].requires_grad
            assert not result[key].is_conj()
            assert not result[key].is_neg()
            assert type(result[key]) is Tensor


def test_results_have_the_strides_of_the_parameters() -> None:
    params = {
        "last": torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "t": torch.zeros(3, 4).T,
        "cut": torch.zeros(4, 8)[:, ::2],
    }
    grads = {key: torch.ones(leaf.shape) for key, leaf in params.items()}
    for result in synced(2, lambda rank: grads, params=params):
        assert result["last"].is_contiguous(memory_format=torch.channels_last)
        assert result["t"].stride() == (1, 4)
        assert result["cut"].is_contiguous(), "what is not dense has no layout to keep"


def test_leaves_without_a_gradient_are_none() -> None:
    params = {"w": torch.zeros(2), "step": torch.tensor(3), "mask": torch.tensor([True])}
    params["bias"] = None
    for own in ({"step": None, "mask": None}, {"step": torch.tensor(5), "mask": params["mask"]}):
        grads = {"w": torch.ones(2), "bias": None, **own}
        for result in synced(2, lambda rank, grads=grads: grads, params=params):
            assert result.pop("w").tolist() == [1.0, 1.0]
            assert result == {"step": None, "mask": None, "bias": None}


# Trees


class Layer(NamedTuple):
    weight: Any
    bias: Any


def nested(value: float) -> Any:
    return {
        "layers": [Layer(torch.full((2,), value), torch.full((1,), 2 * value)), (value_(value),)],
        "head": OrderedDict(z=value_(3 * value), a=[value_(4 * value), {}]),
        3: value_(5 * value),
        "10": value_(6 * value),
    }


def value_(value: float) -> Tensor:
    return torch.tensor([value])


def test_nested_containers_come_back_as_they_are() -> None:
    for result in synced(2, lambda rank: nested(1.0 + 2 * rank)):
        assert isinstance(result["layers"][0], Layer)
        assert isinstance(result["layers"][1], tuple)
        assert isinstance(result["head"], OrderedDict)
        assert list(result["head"]) == ["z", "a"]
        assert largest_difference(result, nested(2.0)) == 0.0


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_insertion_order_may_differ_from_rank_to_rank(kind: Callable[[Any], Any]) -> None:
    # Leaves of one shape, so that a mix-up can't be noticed by anything but their values.
    results = fddp.loopback(4, in_another_order, kind)
    assert len({digest for _, digest in results}) == 1, "all take rank 0's order"
    for rank, (result, _) in enumerate(results):
        assert {key: leaf.tolist() for key, leaf in result.items()} == {
            f"w{i}": [8.0 * i + 3.0] * 2 for i in range(6)
        }
        if kind is OrderedDict:
            assert list(result) == order_of(rank)


def order_of(rank: int) -> list[str]:
    names = [f"w{i}" for i in range(6)]
    return names[rank:] + names[:rank] if rank < 2 else names[::-1]


def in_another_order(group: Any, kind: Callable[[Any], Any]) -> tuple[Any, str]:
    rank = rank_of(group)
    params = kind((name, torch.zeros(2)) for name in order_of(rank))
    grads = kind((name, torch.full((2,), 8.0 * int(name[1]) + 2 * rank)) for name in order_of(rank))
    with fddp.GradSync(params, group=group, first_bucket_mb=1e-5, bucket_cap_mb=2e-5) as sync:
        return sync(grads), sync.plan.digest


def test_gradients_may_sit_in_other_containers_than_the_parameters() -> None:
    def run(group: Any) -> Any:
        with fddp.GradSync({"a": [torch.zeros(1), torch.zeros(1)]}, group=group) as sync:
            return sync(OrderedDict(a=(torch.ones(1), 2 * torch.ones(1))))

    for result in fddp.loopback(2, run):
        assert isinstance(result["a"], tuple)
        assert [leaf.item() for leaf in result["a"]] == [1.0, 2.0]


def test_one_tensor_at_two_paths() -> None:
    def grads_of(rank: int) -> dict[str, Tensor]:
        shared = torch.full((3,), 1.0 + rank)
        return {"a": shared, "b": shared, "c": shared if rank else torch.zeros(3)}

    for result in synced(2, grads_of):
        assert result["a"].tolist() == result["b"].tolist() == [1.5] * 3
        assert result["c"].tolist() == [1.0] * 3
        result["a"].zero_()
        assert result["b"].tolist() == [1.5] * 3


DTYPE = st.sampled_from(list(DTYPES.values()))
SHAPE = st.lists(st.integers(0, 4), max_size=3).map(tuple)
LEAF = st.tuples(DTYPE, SHAPE, st.booleans())


def gradient(shape: tuple[int, ...], transposed: bool, **options: Any) -> Tensor:
    if not transposed:
        return rand(*shape, 1, **options)[..., 0]
    return rand(*shape[::-1], 1, **options)[..., 0].permute(tuple(reversed(range(len(shape)))))


@settings(max_examples=50, deadline=None)
@given(
    leaves=st.lists(LEAF, min_size=1, max_size=8),
    world_size=st.integers(1, 4),
    absent=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 7))),
    cap_bytes=st.integers(1, 64),
)
def test_random_trees_match_one_process(
    leaves: list[tuple[torch.dtype, tuple[int, ...], bool]],
    world_size: int,
    absent: set[tuple[int, int]],
    cap_bytes: int,
) -> None:
    def grads_of(rank: int) -> list[Tensor | None]:
        grads = [
            gradient(shape, transposed, seed=10 * rank + i, dtype=dtype)
            for i, (dtype, shape, transposed) in enumerate(leaves)
        ]
        return [None if (rank, i) in absent else grad for i, grad in enumerate(grads)]

    params = [torch.zeros(shape, dtype=dtype) for dtype, shape, _ in leaves]
    cap_mb = cap_bytes / 1048576
    results = synced(
        world_size, grads_of, params=params, bucket_cap_mb=cap_mb, first_bucket_mb=cap_mb
    )
    for i, param in enumerate(params):
        own = [grads_of(rank)[i] for rank in range(world_size)]
        present = [torch.zeros_like(param) if grad is None else grad for grad in own]
        for result in results:
            if all(grad is None for grad in own):
                assert result[i] is None
            else:
                assert torch.equal(result[i], ddp_mean(present))
