"""Squared norms of the gradients of all ranks, and the noise scale that is estimated from them."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fddp
from fddp.hooks import TorchHook, int8
from fddp.numerics import NoiseScale, SquaredNorms, next_noise_scale
from tests.support.models import rand, same_bits
from tests.support.on_ranks import on_processes, on_threads

WIDTH = 192  # 147,456 bytes in float32: large enough to be packed on arrival
TINY: Any = {"bucket_cap_mb": 1e-6, "first_bucket_mb": 1e-6}
SMALL: Any = {"bucket_cap_mb": 0.2, "first_bucket_mb": 0.2}


class Contribution(NamedTuple):
    """Weight and gradients of one rank."""

    weight: float
    grads: dict[str, Tensor]


def by_hand(
    contributions: Sequence[Contribution], own: Sequence[int], leaves: Sequence[str]
) -> SquaredNorms:
    """In float64, from what all ranks have, of which those of this rank are `own`."""
    present = [each for each in contributions if each.weight > 0.0]
    weight = sum(each.weight for each in present)

    def sq_norm(tree: Any) -> float:
        return sum(float(tree[name].double().square().sum()) for name in leaves)

    squares = [each.weight * sq_norm(each.grads) for each in contributions]
    mean = {
        name: sum(each.grads[name].double() * (each.weight / weight) for each in present)
        for name in leaves
    }
    own_squares = sum(squares[number] for number in own)
    return SquaredNorms(own_squares, sum(squares), sq_norm(mean), len(present), weight)


def assert_norms(found: SquaredNorms, expected: SquaredNorms, rel: float = 1e-5) -> None:
    assert found == SquaredNorms(*(pytest.approx(value, rel=rel) for value in expected))


def tree(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"a": (40, 40), "b": (5,), "c": (WIDTH, WIDTH), "d": ()}
    return {
        n: rand(*s, 1, seed=seed + i).view(s).to(dtype) for i, (n, s) in enumerate(shapes.items())
    }


def loss_fn(params: dict[str, Tensor], grads: dict[str, Tensor]) -> Tensor:
    """A loss with these gradients. The large leaf is used twice, and its gradient is neither the
    first nor the last."""
    given = dict(params, a=1.0 * params["a"], c=0.25 * params["c"] + 0.75 * params["c"])
    return torch.stack([(given[name] * grads[name]).sum() for name in params]).sum()


# What is measured

WAYS = ("tree", "backward", "accumulated", "retained", "float16", "int8", "hierarchical")


@pytest.mark.parametrize("way", WAYS)
def test_norms_are_those_of_all_ranks(way: str) -> None:
    """With weights, one of which is 0, and of two groups of leaves."""
    weights, ranks = [1.0, 0.0, 2.5, 4.0], 4
    dtype = torch.float16 if way == "float16" else torch.float32
    scale = 1 / 4 if way == "float16" else 1.0  # float16 serves small weights
    everyones = [Contribution(w * scale, tree(10 * r, dtype)) for r, w in enumerate(weights)]
    options: dict[str, Any] = {
        "retained": {"deterministic": True},
        "int8": {"hook": int8(64)},
        "hierarchical": {"algorithm": "hierarchical", "mesh": fddp.Topology(host=2, local=2)},
    }.get(way, {})
    groups = {"a": "small", "b": "small", "c": "large", "d": "small"}

    def run(group: Any) -> Any:
        own = everyones[group.rank]
        params = fddp.tree_map(torch.zeros_like, own.grads)
        noise: Any = groups.get
        with fddp.GradSync(params, group=group, noise=noise, **SMALL, **options) as sync:
            step = sync.value_and_grad(loss_fn, weight_fn=lambda *_: own.weight, with_info=True)
            kwargs: Any = {}
            if way == "accumulated":  # half of the weight, with the same gradients
                half = own.weight / 2
                step = sync.value_and_grad(loss_fn, weight_fn=lambda *_: half, with_info=True)
                total = fddp.tree_map(lambda g: g * half, own.grads)
                kwargs = {"accumulated": (total, half)}
            infos = []
            for _ in range(3):  # the first with one bucket, before the plan is rebuilt
                if way == "tree":
                    infos.append(sync(own.grads, weight=own.weight, with_info=True)[1])
                else:
                    infos.append(step(params, own.grads, **kwargs)[-1])
        return [info.squared_norms for info in infos]

    results = fddp.loopback(ranks, run)
    rel = {"float16": 5e-3, "int8": 0.05}.get(way, 1e-5)
    for rank, found in enumerate(results):
        for name in "large", "small":
            leaves = [leaf for leaf in groups if groups[leaf] == name]
            expected = by_hand(everyones, [rank], leaves)
            for norms in found:
                assert set(norms) == {"large", "small"}
                assert_norms(norms[name], expected, rel)
    shared = [[{k: n._replace(own=0.0) for k, n in f.items()} for f in r] for r in results]
    assert all(other == shared[0] for other in shared)


def test_virtual_ranks_count_one_by_one() -> None:
    """Whatever the number of ranks."""
    everyones = [Contribution(1.0 + r, tree(10 * r)) for r in range(5)]
    params = fddp.tree_map(torch.zeros_like, everyones[0].grads)

    def run(group: Any) -> tuple[range, SquaredNorms]:
        with fddp.GradSync(params, group=group, virtual_ranks=5, noise=True, **SMALL) as sync:
            step = sync.value_and_grad(
                lambda p, number: loss_fn(p, everyones[number].grads),
                weight_fn=lambda p, number: everyones[number].weight,
                with_info=True,
            )
            for _ in range(2):
                *_, info = step(params, sync.virtual_batches(lambda number: number))
            return sync.carried_ranks, info.squared_norms["all"]

    for ranks in (1, 2):
        for carried, norms in fddp.loopback(ranks, run):
            assert_norms(norms, by_hand(everyones, carried, list(params)))


@on_threads(2)
def test_a_wrapped_module_has_them(group: Any) -> None:
    """Of all that `.grad` has of the step, from the pass within `no_sync`, too."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(rand(*parameter.shape, seed=i) / 10)
    inputs = [[rand(3, WIDTH, seed=10 * r + i).float() for i in range(2)] for r in range(2)]
    everyones = []
    for own in inputs:
        module.zero_grad()
        for x in own:
            module(x).sum().backward()
        grads = {
            name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None
        }
        everyones.append(Contribution(1.0, grads))
    module.zero_grad()
    ddp = fddp.DistributedDataParallel(module, process_group=group, noise=True)
    ddp.keep_sync_info()
    for _ in range(2):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(inputs[group.rank][0]).sum().backward()
        ddp(inputs[group.rank][1]).sum().backward()
        assert ddp.sync_info is not None
        norms = ddp.sync_info.squared_norms["all"]
        assert_norms(norms, by_hand(everyones, [group.rank], list(everyones[0].grads)))
        assert ddp.sync_info.grad_norm**2 == pytest.approx(norms.mean)


@on_threads(3)
def test_norms_are_known_where_all_ranks_ask_for_info(group: Any) -> None:
    """Others take part in the step, and a rank without weight need not ask."""
    grads = {"w": torch.full((3,), 1.0 + group.rank)}
    with fddp.GradSync(grads, group=group, noise=True) as sync:

        def norms(asks: bool, weight: float = 1.0) -> SquaredNorms | None:
            if not asks:
                assert sync(grads, weight=weight)["w"].isfinite().all()
                return None
            found: SquaredNorms = sync(grads, weight=weight, with_info=True)[1].squared_norms["all"]
            return found

        assert norms(False) is None
        if (one := norms(group.rank > 0)) is not None:
            assert (one.own, one.mean) == pytest.approx((3.0 * (1 + group.rank) ** 2, 12.0))
            assert math.isnan(one.total)
        if (two := norms(group.rank > 0, float(group.rank > 0))) is not None:
            assert two[1:] == pytest.approx((39.0, 18.75, 2, 2.0))
        assert norms(False) is None


@on_threads(2)
def test_norms_change_no_bits_of_the_mean(group: Any) -> None:
    params, own = tree(0), tree(10 * group.rank + 10)
    results = []
    for noise in (None, True):
        with fddp.GradSync(params, group=group, noise=noise, **SMALL) as sync:
            step = sync.value_and_grad(loss_fn, with_info=True)
            results.append([step(params, own)[1] for _ in range(3)])
    assert same_bits(results)


@on_threads(2)
def test_without_the_option_nothing_is_measured(group: Any) -> None:
    grads = tree(group.rank)
    with fddp.GradSync(grads, group=group) as sync:
        assert sync(grads, with_info=True)[1].squared_norms == {}


# Steps without an estimate


@on_threads(2)
def test_a_late_gradient_leaves_the_mean_unknown(group: Any) -> None:
    """The second one of a leaf, from a re-entrant checkpoint, after its bucket has left."""
    params = {"v": torch.ones(2), "w": torch.ones(2)}

    def loss(p: dict[str, Tensor], late: bool) -> Tensor:
        x = torch.zeros((), requires_grad=True)
        for name in ("w", "v", "w")[0 if late else 1 :]:
            x = checkpoint(lambda x, name=name: x + p[name].sum(), x, use_reentrant=True)
        return x

    with fddp.GradSync(params, group=group, noise=True, **TINY) as sync:
        step = sync.value_and_grad(loss, with_info=True)
        for late in (False, True):
            *_, info = step(params, late)
            assert bool(info.repaired) == late
            norms = info.squared_norms["all"]
            assert [math.isnan(n) for n in (norms.mean, norms.variance)] == [late] * 2


@pytest.mark.parametrize("policy", ["propagate", "skip"])
@on_threads(2)
def test_a_value_that_is_not_finite_gives_no_estimate(group: Any, policy: Any) -> None:
    grads = {"w": torch.tensor([1.0, math.inf if group.rank else 1.0])}
    with fddp.GradSync(grads, group=group, noise=True, nonfinite=policy) as sync:
        _, info = sync(grads, with_info=True)
    norms = info.squared_norms["all"]
    assert not math.isfinite(norms.total)
    assert next_noise_scale(NoiseScale(), norms) == NoiseScale()


# Options


@on_threads(2)
def test_ranks_give_leaves_the_same_groups(group: Any) -> None:
    params = {"v": torch.ones(2), "w": torch.ones(3)}
    ways: list[tuple[Any, Any, str]] = [
        (True, None, r"noise is all: 2 leaves \(\w+\) on rank 0 and None on rank 1; pass the"),
        (str, str.upper, r"noise is v: 1 leaf, w: 1 leaf .* on rank 0 and V: 1 leaf, W: 1 leaf"),
    ]
    for one, other, text in ways:
        with pytest.raises(fddp.PlanMismatchError, match=text):
            fddp.GradSync(params, group=group, noise=other if group.rank else one)


def raw(state: Any, bucket: Any) -> Any:
    """A hook of torch's."""


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"report": "next"}, ValueError, "noise and report='next' can't be combined"),
        (
            {"hook": TorchHook(None, raw)},
            ValueError,
            r"noise and .* can't be combined: its results",
        ),
        ({"algorithm": "reduce_scatter"}, ValueError, "with shards each rank has that of its own"),
        (
            {"sparse": ["w"]},
            ValueError,
            "can't be measured of leaf 'w', whose gradients are sparse",
        ),
        ({"noise": 3}, TypeError, "noise must be True, or a function .*, or None, got 3"),
        ({"noise": len}, TypeError, "noise must return the name of a group .*, got 1 for leaf 'v'"),
    ],
)
def test_what_can_not_be_measured(options: Any, error: Any, text: str) -> None:
    def make(group: Any) -> None:
        params = {"v": torch.ones(2), "w": torch.ones(3, 2)}
        with pytest.raises(error, match=text):
            fddp.GradSync(params, group=group, **{"noise": True, **options})

    fddp.loopback(1, make)


@on_threads(1)
def test_a_wrapper_with_noise_takes_no_hook_of_torch(group: Any) -> None:
    ddp = fddp.DistributedDataParallel(nn.Linear(2, 2), process_group=group, noise=True)
    with pytest.raises(ValueError, match=r"noise and .* can't be combined: its results"):
        ddp.register_comm_hook(None, raw)


def test_a_rebuilt_one_measures_the_same_groups() -> None:
    params = {"v": torch.ones(2), "w": torch.ones(3)}
    known = fddp.loopback(2, lambda g: fddp.GradSync(params, group=g, noise=str.upper))

    def again(group: Any) -> Any:
        is_new = group.rank == 2
        with fddp.GradSync.join(group) if is_new else known[group.rank].rebuild(group) as sync:
            _, info = sync(params, with_info=True)
        return info.squared_norms

    for found in fddp.loopback(3, again):
        assert_norms(found["V"], SquaredNorms(2.0, 6.0, 2.0, 3, 3.0))
        assert_norms(found["W"], SquaredNorms(3.0, 9.0, 3.0, 3, 3.0))


# The estimate

SIZE, BATCH, STEPS = 64, 8, 200
SPREAD = 1.5  # standard deviation of the error of targets


def linear_regression(error: Tensor, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one batch, for parameters that are off by `error`."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(BATCH, SIZE, generator=generator, dtype=torch.float64)
    return x, x @ -error + SPREAD * torch.randn(BATCH, generator=generator, dtype=torch.float64)


def squared_error(w: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return 0.5 * (x @ w - y).square().mean()


@on_processes(3)
def test_the_estimate_is_that_of_a_problem_with_known_noise(rank: int, world_size: int) -> None:
    """A sample x (x'e - s) with normal x and s has the mean e, and the squared norm |e|^2 (d + 2) +
    d s^2: so much is known without a sample. All ranks have the same bits."""
    error = 0.5 * rand(SIZE, seed=3).double()
    params = {"w": torch.zeros(SIZE, dtype=torch.float64)}
    signal = float(error.square().sum())
    variance = signal * (SIZE + 1) + SIZE * SPREAD**2
    noise = NoiseScale()
    with fddp.GradSync(params, noise=True) as sync:
        step = sync.value_and_grad(
            lambda p, batch: squared_error(p["w"], batch),
            weight_fn=lambda p, batch: len(batch[1]),
            with_info=True,
        )
        for number in range(STEPS):
            _, _, info = step(params, linear_regression(error, rank, number))
            noise = next_noise_scale(noise, info.squared_norms["all"], decay=0.999)
    assert noise.variance == pytest.approx(variance, rel=0.05)
    assert noise.signal == pytest.approx(signal, rel=0.05)
    assert noise.scale == pytest.approx(variance / signal, rel=0.05)  # samples
    fddp.check_replicas({"noise": torch.tensor(noise)})
    assert pickle.loads(pickle.dumps(noise)) == noise


def test_a_weight_near_the_smallest_number_has_no_norms() -> None:
    def train(group: Any) -> float:
        with fddp.GradSync({"w": torch.zeros(3)}, group=group, noise=True) as sync:
            step = sync.value_and_grad(
                lambda p, x: (p["w"] * x).sum(),
                weight_fn=lambda p, x: 5e-324 if group.rank == 0 else 1.0,
                with_info=True,
            )
            _, grads, info = step({"w": torch.ones(3)}, torch.ones(3))
            assert grads["w"].tolist() == [1.0, 1.0, 1.0]
            return info.squared_norms["all"].total

    assert all(math.isnan(total) for total in fddp.loopback(2, train))
