"""Weighted means: of ranks, of micro-batches, at any scale of weights."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fddp
from tests.support.models import rand, same_bits
from tests.support.ranks import Launch

SMALL = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0005}


WEIGHT = st.one_of(
    st.sampled_from([0.0, 1.0, 2.0, 1e6, 0.1, 1 / 3]), st.floats(1e-4, 1e6), st.integers(1, 10**7)
)


@st.composite
def weights(draw: st.DrawFn) -> list[list[float]]:
    """By step and rank; some rank has a weight in every step."""
    world_size = draw(st.integers(1, 4))
    step = st.lists(WEIGHT, min_size=world_size, max_size=world_size).filter(any)
    return draw(st.lists(step, min_size=1, max_size=4))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(weights())
@example([[0.0, 1.0], [2.0, 0.0]])
def test_random_weights_match_one_process(steps: list[list[float]]) -> None:
    """In every way to synchronise; a leaf that only ranks without weight use is unused."""
    params = {"a": rand(5, seed=0), "b": rand(3, seed=1), "c": rand(2, seed=2)}

    def grads_of(rank: int, step: int) -> dict[str, Any]:
        grads: dict[str, Any] = {
            key: rand(len(v), seed=9 * step + rank) for key, v in params.items()
        }
        return {**grads, "b": None if (rank + step) % 2 else grads["b"]}

    def run(group: Any) -> list[Any]:
        with fddp.GradSync(params, group=group, **SMALL) as sync:
            step = sync.value_and_grad(
                lambda p, g, w: used_loss(p, g), weight_fn=lambda p, g, w: w, with_info=True
            )
            found = []
            for number, weights in enumerate(steps):
                weight, own = weights[group.rank], grads_of(group.rank, number)
                loss, *stepped = step(params, own, weight)
                assert torch.equal(loss, used_loss(params, own)), "also without a weight"
                result = sync(own, weight=weight, with_info=True)
                written = {key: None if g is None else g.clone() for key, g in own.items()}
                found.append(
                    [result, stepped, sync.reduce_(written, weight=weight, with_info=True)]
                )
            return found

    world_size = len(steps[0])
    for found in fddp.loopback(world_size, run):
        for number, ways in enumerate(found):
            parts = [(w, grads_of(rank, number)) for rank, w in enumerate(steps[number])]
            for grads, info in ways:
                assert_is_mean(grads, info, parts)


def used_loss(p: dict[str, Tensor], grads: dict[str, Any]) -> Tensor:
    """A loss with these gradients; leaves whose gradient is None are unused."""
    used = [(p[key] * grad).sum() for key, grad in grads.items() if grad is not None]
    return torch.stack([torch.zeros((), dtype=torch.float64), *used]).sum()


def assert_is_mean(
    grads: dict[str, Any], info: fddp.SyncInfo, parts: list[tuple[float, dict[str, Any]]]
) -> None:
    total = sum(weight for weight, _ in parts)
    assert info.total_weight == pytest.approx(total, rel=1e-12)
    for key, grad in grads.items():
        own = [g[key] * (w / total) for w, g in parts if w and g[key] is not None]
        assert (grad is None) == (not own) == (key in info.unused)
        if own:
            assert torch.allclose(grad, sum(own), rtol=1e-12, atol=1e-14)


# Bits


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_same_power_of_two_on_all_ranks_has_the_bits_of_no_weights(
    world_size: int, dtype: torch.dtype
) -> None:
    def run(group: Any) -> bool:
        grads = {
            "w": rand(50, seed=group.rank, dtype=dtype),
            "v": rand(5, seed=group.rank, dtype=dtype),
        }
        with fddp.GradSync(grads, group=group) as sync:
            weights = (1.0, 0.5) if dtype is torch.float16 else (1.0, 64.0, 0.25, 2.0)
            return same_bits([sync(grads, weight=weight) for weight in weights])

    assert all(fddp.loopback(world_size, run))


_WEIGHTS = st.lists(
    st.one_of(st.sampled_from([0.0, 1.0, 3.0, 10.0, 96.0]), st.floats(0.01, 1e4)),
    min_size=3,
    max_size=3,
).filter(any)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    earlier=st.lists(st.one_of(_WEIGHTS, st.sampled_from([[7.0] * 3])), max_size=3),
    last=_WEIGHTS,
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    deterministic=st.booleans(),
)
def test_bits_do_not_depend_on_the_weights_of_earlier_steps(
    earlier: list[list[float]], last: list[float], dtype: torch.dtype, deterministic: bool
) -> None:
    """So a run that resumes from a checkpoint does not need them."""

    def run(group: Any, steps: list[list[float]]) -> Any:
        grads = {"w": rand(50, seed=group.rank, dtype=dtype)}
        with fddp.GradSync(grads, group=group, deterministic=deterministic) as sync:
            return [sync(grads, weight=weights[group.rank]) for weights in steps][-1]

    assert same_bits([fddp.loopback(3, run, steps)[0] for steps in ([last], [*earlier, last])])


# Range


STEPS = {
    "tokens at once": [1e6] * 3,
    "a jump up": [1.0, 1e6, 1e6],
    "a jump down": [1e6, 1.0, 1.0],
    "up and down": [3.0, 2e6, 5.0, 4e6],
    "shrinking slowly": [1e6, 2e5, 5e4, 1e4, 2e3],
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("value", [3e4, 4e-3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_token_counts_neither_overflow_nor_lose_bits(
    steps: str, equal: bool, value: float, dtype: torch.dtype
) -> None:
    """In bfloat16, and in float16 with sums in float32."""

    def weight(rank: int, tokens: float) -> float:
        return tokens if equal else tokens * (0.25 + 0.5 * rank)

    def loss_fn(p: dict[str, Tensor], grad: Tensor, tokens: float) -> Tensor:
        return (p["w"] * grad).sum() + (p["v"] * grad[:3]).sum()

    def run(group: Any) -> Any:
        params = {"w": torch.zeros(8, dtype=dtype), "v": torch.zeros(3, dtype=dtype)}
        grad = torch.linspace(0.5, 2.0, 8).to(dtype) * value * (-1 if group.rank == 1 else 1)
        wire = torch.float32 if dtype is torch.float16 else None
        with fddp.GradSync(params, group=group, reduce_dtype=wire) as sync:
            step = sync.value_and_grad(
                loss_fn, weight_fn=lambda p, g, tokens: weight(group.rank, tokens)
            )
            return grad, [step(params, grad, tokens)[1] for tokens in STEPS[steps]]

    runs = fddp.loopback(4, run)
    for number, tokens in enumerate(STEPS[steps]):
        total = sum(weight(rank, tokens) for rank in range(4))
        shares = [
            grad.double() * (weight(rank, tokens) / total) for rank, (grad, _) in enumerate(runs)
        ]
        expected, size = sum(shares), sum(share.abs() for share in shares)
        # One rounding of each contribution, one for each sum, one of the result.
        allowed = (
            torch.finfo(dtype).eps * 4 * size + 4 * torch.finfo(dtype).smallest_normal * 2**-10
        )
        for _, results in runs:
            assert torch.isfinite(results[number]["w"]).all()
            assert ((results[number]["w"].double() - expected).abs() <= allowed).all(), number
            assert torch.equal(results[number]["v"], results[number]["w"][:3])


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
@pytest.mark.parametrize(
    "weight", [5e-324, 1e-50, 2.0**-41, 2.0**-40, 1e-6, 0.2, 1e6, 2.0**40, 2.0**41, 1e160, 1.7e308]
)
def test_weights_give_the_mean_or_out_of_proportion_an_error_on_every_rank(
    dtype: torch.dtype, weight: float
) -> None:
    narrow = dtype is torch.float16
    fits = 1 / 64 <= weight <= 1.0 if narrow else 2.0**-40 <= weight <= 2.0**40
    wide = [1.0, 1.0] if narrow else [1e-15, 1.0, 1e15]
    mean = torch.tensor(wide).to(dtype) * 1.5

    def run(group: Any) -> list[str]:
        own = {"w": torch.tensor(wide).to(dtype) * (1 + group.rank)}
        texts = []
        with fddp.GradSync(own, group=group) as sync:
            for each in (weight, weight, 1.0):
                try:
                    result = sync(own, weight=each)["w"]
                except fddp.WeightError as error:
                    texts.append(str(error))
                else:
                    # Two roundings: of the contribution, and of the result.
                    assert torch.allclose(result, mean, rtol=4 * torch.finfo(dtype).eps, atol=0.0)
                    texts.append("")
        return texts

    first, second = fddp.loopback(2, run)
    if weight < 2.0**512:  # larger ones are errors of the rank that passes them
        assert first == second
    assert [text == "" for text in first] == [fits, fits, True]
    if not fits and weight < 2.0**512:
        assert f"the mean weight is {weight}" in first[0]
        assert "divide all weights by one number" in first[0]
        assert ("reduce_dtype=torch.float32" in first[0]) == narrow


def test_hooks_in_float16_serve_weights_near_one() -> None:
    def run(group: Any) -> Any:
        own = {"w": torch.full((3,), 1.0 + group.rank)}
        with fddp.GradSync(own, group=group, hook=fddp.hooks.fp16_compress) as sync:
            with pytest.raises(fddp.WeightError, match=r"and fp16_compress is summed in float16"):
                sync(own, weight=512.0)
            return sync(own, weight=0.5)["w"].tolist()

    assert fddp.loopback(2, run) == [[1.5] * 3] * 2


# Weight zero


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("sparse", [False, True])
def test_weight_zero_contributes_exact_zeros(dtype: torch.dtype, bad: float, sparse: bool) -> None:
    def run(group: Any) -> Any:
        own = torch.full((2, 2), bad if group.rank == 1 else 1.0 + group.rank, dtype=dtype)
        weight = 0.0 if group.rank == 1 else 1.0
        options = {"sparse": ("w",)} if sparse else {}
        with fddp.GradSync({"w": torch.zeros(2, 2, dtype=dtype)}, group=group, **options) as sync:
            grads = {"w": own.to_sparse(1) if sparse else own}
            tree, info = sync(grads, weight=weight, with_info=True)
            step = sync.value_and_grad(
                lambda p, g, w: (p["w"] * g).real.sum(),
                weight_fn=lambda p, g, w: w,
                with_info=True,
            )
            _, stepped, info_ = step({"w": torch.zeros(2, 2, dtype=dtype)}, own, weight)
            return tree["w"].to_dense(), stepped["w"].to_dense(), info, info_

    for tree, stepped, *infos in fddp.loopback(3, run):
        assert tree.tolist() == stepped.tolist() == [[2.0, 2.0]] * 2
        for info in infos:
            assert (info.active, info.total_weight, info.all_finite) == (2, 2.0, True)


# Micro-batches


class Part(NamedTuple):
    """A rank's part in a step: of its batch, and of gradients accumulated before it."""

    weight: float | None  # None: it is exhausted
    leaves: str
    earlier_weight: float | None  # None: it has accumulated nothing
    earlier_leaves: str

    def trees(self, rank: int) -> list[dict[str, Any]]:
        """Gradients now and earlier; not finite where they have no weight."""
        weights, leaves = (self.weight, self.earlier_weight), (self.leaves, self.earlier_leaves)
        return [
            {
                key: rand(3, seed=9 * rank + i) * (1.0 if weight else math.nan)
                if key in used
                else None
                for i, key in enumerate("abc", 90 * number)
            }
            for number, (weight, used) in enumerate(zip(weights, leaves, strict=True))
        ]


NUMBERS = st.sampled_from([None, 0.0, 1.0, 2.0, 0.3, 1e3])
SOME = st.sampled_from(["", "a", "ab", "abc", "c"])
PARTS = st.lists(st.builds(Part, NUMBERS, SOME, NUMBERS, SOME), min_size=1, max_size=3)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(PARTS.filter(lambda parts: any(p.weight or p.earlier_weight for p in parts)))
@example([Part(1.0, "a", None, ""), Part(1.0, "a", 2.0, "b")])  # used in accumulated ones only
@example([Part(0.0, "a", 2.0, "a"), Part(0.0, "a", 2.0, "a")])
@example([Part(1.0, "a", None, ""), Part(1.0, "a", 0.0, "ab")])
@example([Part(1.0, "a", None, ""), Part(None, "", 0.0, "ab")])
def test_accumulated_gradients_count_with_their_weight(parts: list[Part]) -> None:
    check_accumulated(fddp.loopback(len(parts), accumulated_steps, parts), parts)


def test_accumulated_gradients_over_any_transport(launch: Launch) -> None:
    """The first two ranks have earlier ones, the third has no others, and the fourth has none."""
    parts = [Part(5.0, "ab", 8.0, "ac"), Part(4.0, "b", 2.0, "b"), Part(None, "", 7.0, "bc")]
    parts.append(Part(None, "", None, ""))
    check_accumulated(launch(4, accumulated_steps, parts), parts)


def accumulated_steps(group: Any, parts: list[Part]) -> list[Any]:
    params = {key: torch.ones(3, dtype=torch.float64) for key in "abc"}
    found = []
    with fddp.GradSync(params, group=group, **SMALL) as sync:
        part = parts[sync.rank]
        now, sums = part.trees(sync.rank)
        if part.earlier_weight:
            sums = {k: None if g is None else g * part.earlier_weight for k, g in sums.items()}
        before = fddp.tree_map(torch.clone, sums)
        step = sync.value_and_grad(
            used_loss, with_info=True, weight_fn=lambda p, grads: part.weight
        )
        for _ in range(2):
            loss, grads, info = step(
                params,
                fddp.EXHAUSTED if part.weight is None else now,
                accumulated=None if part.earlier_weight is None else (sums, part.earlier_weight),
            )
            assert (loss is None) == (part.weight is None)
            found.append((grads, info))
        for key, grad in sums.items():
            assert grad is None or torch.equal(grad.nan_to_num(), before[key].nan_to_num())
    return found


def check_accumulated(runs: list[Any], parts: list[Part]) -> None:
    due = []
    for rank, part in enumerate(parts):
        now, earlier = part.trees(rank)
        due += [(part.weight or 0.0, now), (part.earlier_weight or 0.0, earlier)]
    for run in runs:
        for grads, info in run:
            assert_is_mean(grads, info, due)
            assert info.all_finite
            assert info.active == sum(bool(p.weight or p.earlier_weight) for p in parts)
    assert same_bits([[grads for grads, _ in run] for run in runs])


def test_accumulated_local_leaves() -> None:
    def run(group: Any) -> Any:
        params = {"w": torch.ones(2), "own": torch.ones(2)}
        sums = {"w": torch.full((2,), 3.0), "own": torch.full((2,), 9.0)}
        with fddp.GradSync(params, group=group, select=lambda path: path == "w") as sync:
            step = sync.value_and_grad(
                lambda p, scale: (p["w"] * scale + p["own"] * scale).sum(),
                weight_fn=lambda p, scale: 1.0,
            )
            both = step(params, 5.0 + group.rank, accumulated=(sums, 3.0))[1]
            nothing = step(params, 5.0 + group.rank, accumulated=(sums, 0.0))[1]
            return both, nothing

    for rank, (both, nothing) in enumerate(fddp.loopback(2, run)):
        assert both["own"].tolist() == [(5.0 + rank + 9.0) / 4] * 2
        assert both["w"].tolist() == [(5.0 + 6.0 + 3.0 + 3.0) / 8] * 2
        assert nothing["own"].tolist() == [5.0 + rank] * 2


def test_accumulated_float16_keeps_its_range() -> None:
    def run(group: Any) -> Any:
        params = {"a": torch.zeros(2, dtype=torch.float16)}
        sums = {"a": torch.full((2,), 50.0, dtype=torch.float16)}
        with fddp.GradSync(params, group=group) as sync:
            step = sync.value_and_grad(
                lambda p, w: (p["a"] * 1000.0).sum(), weight_fn=lambda p, w: w
            )
            return [step(params, 0.5, accumulated=(sums, 0.5))[1]["a"] for _ in range(3)]

    for results in fddp.loopback(2, run):
        for result in results:
            assert result.tolist() == pytest.approx([550.0] * 2, rel=1e-3)
