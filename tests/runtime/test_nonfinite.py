"""Steps with NaN or infinity in them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fddp
from fddp.runtime.finite_check import FiniteCheck
from fddp.runtime.nonfinite import MOST_NAMED, Count, NonFiniteCounts, nonfinite_error
from tests.support.collectives import collectives_called
from tests.support.models import same_bits
from tests.support.python_steps import only_python
from tests.support.spoiled_trees import (
    INF,
    NAN,
    SMALL,
    WAYS,
    averaged,
    dot,
    options,
    spoiled,
    tree,
)

# Skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [NAN, -INF])
@pytest.mark.parametrize("buckets", [SMALL, {}], ids=["three", "one"])
def test_all_ranks_skip_the_same_step(way: str, bad: float, buckets: dict[str, Any]) -> None:
    def run(group: Any) -> Any:
        with fddp.GradSync(
            tree(), group=group, nonfinite="skip", **buckets, **options(way)
        ) as sync:
            first = averaged(sync, way, spoiled(bad) if group.rank == 1 else tree())
            return first, averaged(sync, way, tree(2.0 + group.rank))

    def plain(group: Any) -> Any:
        with fddp.GradSync(tree(), group=group, **buckets, **options(way)) as sync:
            return averaged(sync, way, tree(2.0 + group.rank))

    wanted = fddp.loopback(3, plain)
    for ((mean, info), (after, outcome)), (usual, _) in zip(
        fddp.loopback(3, run), wanted, strict=True
    ):
        assert mean == {"a": None, "b": None, "c": None}
        assert (info.skipped, info.all_finite) == (True, False)
        assert math.isnan(info.grad_norm)
        assert (outcome.skipped, outcome.all_finite, outcome.step) == (False, True, 1)
        assert same_bits([after, usual])


VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "hierarchical shards": (
        4,
        {"mesh": fddp.Topology(h=2, l=2), "algorithm": "reduce_scatter", **SMALL},
    ),
    "float16": (2, {"reduce_dtype": torch.float32}),
    "low rank": (2, {"hook": fddp.hooks.power_sgd(rank=1), **SMALL}),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_under_every_algorithm(name: str, policy: Any) -> None:
    """Those that test_nonfinite_pairs.py has not, or not by `update`."""
    ranks, given_options = VARIANTS[name]
    dtype = torch.float16 if name == "float16" else torch.float32
    shards = given_options.get("algorithm") == "reduce_scatter"

    def run(group: Any) -> Any:
        def step(sync: fddp.GradSync, state: Any, bad: float) -> Any:
            own = tree(1.0, dtype)
            own["c"][1] = bad if group.rank == ranks - 1 else 1.0
            if shards:
                return sync.reduce_scatter(own), state
            return sync.update(own, state)

        with fddp.GradSync(
            tree(1.0, dtype), group=group, nonfinite=policy, **given_options
        ) as sync:
            _, state = step(sync, sync.init_state(), 1.0)
            seen: Any = ()
            try:
                skipped, kept = step(sync, state, NAN)
                assert skipped == {"a": None, "b": None, "c": None}
                assert same_bits([kept, state])
            except fddp.NonFiniteError as error:
                seen = error.paths
            return seen, step(sync, state, 1.0)[0]

    def plain(group: Any) -> Any:
        with fddp.GradSync(tree(1.0, dtype), group=group, **given_options) as sync:
            if shards:
                return sync.reduce_scatter(tree(1.0, dtype))
            state = sync.update(tree(1.0, dtype), sync.init_state())[1]
            return sync.update(tree(1.0, dtype), state)[0]

    for (seen, after), wanted in zip(
        fddp.loopback(ranks, run), fddp.loopback(ranks, plain), strict=True
    ):
        assert seen == ({ranks - 1: ("c",)} if policy == "raise" else ())
        assert same_bits([after, wanted])


def test_tensors_to_be_written_stay_as_they_were() -> None:
    def run(group: Any) -> Any:
        own = spoiled(INF, value=3.0) if group.rank else tree(2.0)
        before = {name: grad.clone() for name, grad in own.items()}
        with fddp.GradSync(tree(), group=group, nonfinite="skip") as sync:
            assert sync.reduce_(own) == {"a": None, "b": None, "c": None}
        with (
            fddp.GradSync(tree(), group=group, nonfinite="raise") as sync,
            pytest.raises(fddp.NonFiniteError),
        ):
            sync.reduce_(own)
        return same_bits([own, before])

    assert fddp.loopback(2, run) == [True, True]


# What does not count


def test_a_rank_of_weight_0_is_ignored() -> None:
    def run(group: Any) -> Any:
        with fddp.GradSync(tree(), group=group, nonfinite="raise") as sync:
            own = spoiled(NAN) if group.rank == 0 else tree(2.0)
            mean = sync(own, weight=float(group.rank))
            step = sync.value_and_grad(dot, weight_fn=lambda p, x: float(group.rank))
            return mean, step(tree(), own)[1]

    for mean, grads in fddp.loopback(2, run):
        assert same_bits([mean, grads, tree(2.0)])


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_rounds_of_uneven_inputs(policy: Any) -> None:
    def run(group: Any) -> Any:
        batches = [tree(1.0), spoiled(NAN), tree(3.0)][: 3 if group.rank else 1]
        with fddp.GradSync(tree(), group=group, nonfinite=policy) as sync:
            step = sync.value_and_grad(dot, with_info=True)
            skipped, last = [], None
            for batch in fddp.uneven(batches, sync):
                try:
                    _, last, info = step(tree(), batch)
                    skipped.append(info.skipped)
                except fddp.NonFiniteError as error:
                    skipped.append(error.ranks == (1,))
            return skipped, last

    for skipped, last in fddp.loopback(2, run):
        assert skipped == [False, True, False]
        assert same_bits([last, tree(3.0)])


def test_leaves_that_stay_local_are_not_looked_at() -> None:
    def run(group: Any) -> Any:
        with fddp.GradSync(
            tree(), group=group, nonfinite="raise", select=lambda path: path != "b"
        ) as sync:
            return sync(spoiled(NAN))

    for mean in fddp.loopback(2, run):
        assert mean["b"].isnan().sum() == 1
        assert same_bits([mean["a"], tree()["a"]])


# Raise


def test_the_error_names_ranks_leaves_and_counts() -> None:
    def run(group: Any) -> Any:
        own = tree()
        if group.rank == 0:
            own["a"][:2] = NAN
            own["c"][0] = INF
        if group.rank == 2:
            own["b"][:] = -INF
        with fddp.GradSync(tree(), group=group, nonfinite="raise", **SMALL) as sync:
            sync(tree())
            with pytest.raises(fddp.NonFiniteError) as caught:
                sync(own)
            error = caught.value
            assert isinstance(error, ArithmeticError)
            outcome = error.step, error.ranks, error.paths, error.counts, error.overflowed
            return str(error), outcome, sync(tree(group.rank))

    runs = fddp.loopback(3, run)
    for text, outcome, after in runs:
        assert text == (
            "step 1: gradients are not finite: rank 0 has 2 NaN in leaf 'a', 1 infinity in leaf "
            "'c'; rank 2 has 6 infinities in leaf 'b'; no rank got any gradients, and the group "
            "can go on: leave this batch out, or ask for nonfinite='skip'"
        )
        assert outcome == (
            1,
            (0, 2),
            {0: ("a", "c"), 2: ("b",)},
            {0: {"a": (2, 0), "c": (0, 1)}, 2: {"b": (0, 6)}},
            {},
        )
        assert same_bits([after, tree(1.0)])


@pytest.mark.parametrize("size", [3, 100_000], ids=["together", "on arrival"])
def test_gradients_that_backward_brings_are_named(size: int) -> None:
    """Large ones are packed on arrival, and released."""

    def run(group: Any) -> Any:
        params = {"w": torch.ones(size), "v": torch.ones(size)}
        x = torch.ones(size)
        x[-1] = NAN if group.rank else 1.0
        with fddp.GradSync(params, group=group, nonfinite="raise") as sync:
            step = sync.value_and_grad(lambda p, x: (p["w"] * x).sum() + (p["v"] * p["v"]).sum())
            for _ in range(2):
                with pytest.raises(fddp.NonFiniteError) as caught:
                    step(params, x)
            return caught.value.counts

    assert fddp.loopback(2, run) == [{1: {"w": (1, 0)}}] * 2


def test_the_state_of_a_hook_is_named() -> None:
    """It stays as it was, so that each later step would fail alike."""

    def run(group: Any) -> str:
        grads, hook = {"w": torch.arange(4.0)}, fddp.hooks.top_k(0.5)
        with fddp.GradSync(grads, group=group, hook=hook, nonfinite="raise") as sync:
            states = sync.init_state()
            if group.rank == 1:
                states[0]["residual"][1] = NAN
            with pytest.raises(fddp.NonFiniteError) as caught:
                sync.update(grads, states)
            sync.update(grads, sync.init_state())
            return str(caught.value)

    first, second = fddp.loopback(2, run)
    assert first == second
    assert "rank 1 has 1 NaN in leaf 'residual of bucket 0'" in first
    assert "pass a state from before, or that of init_state" in first


def test_long_lists_are_cut() -> None:
    many = {f"leaf{i}": Count(1, 0) for i in range(MOST_NAMED + 5)}
    counts = NonFiniteCounts.from_json(NonFiniteCounts(many, {}).to_json())
    assert (len(counts.own), counts.left_out) == (MOST_NAMED, 5)
    error = nonfinite_error(3, [NonFiniteCounts({}, {}), counts], {})
    assert len(error.paths[1]) == MOST_NAMED
    assert "1 NaN in leaf 'leaf2' and more in 97 others; no rank" in str(error)
    assert str(error).endswith("(and 5 leaves that are not listed)")


# Costs


@pytest.mark.parametrize("way", WAYS)
def test_a_good_step_costs_no_collective_and_no_look_at_results(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = collectives_called(monkeypatch)
    for name in ("scale_", "unpack_"):
        kernel: Callable[..., Any] = getattr(fddp.native.pack, name)  # type: ignore[attr-defined]

        def looked(*args: Any, _name: str = name, _do: Any = kernel, **kw: Any) -> Any:
            if kw.get("stats"):
                calls.append(f"stats by {_name}")
            return _do(*args, **kw)

        monkeypatch.setattr(f"fddp.runtime.results.{name}", looked)

    def made(policy: Any) -> list[str]:
        def run(group: Any) -> None:
            with fddp.GradSync(tree(), group=group, nonfinite=policy, **options(way)) as sync:
                for _ in range(2):
                    calls.clear()
                    if way == "value_and_grad":
                        sync.value_and_grad(dot)(tree(), tree(3.0))
                    elif way == "update":
                        sync.update(tree(3.0), ())
                    else:
                        getattr(sync, way)(tree(3.0))

        with only_python():  # the compiled interpreter issues no collective on one rank
            fddp.loopback(1, run)
        return list(calls)

    plain = made("propagate")
    assert plain
    assert not any("stats" in call for call in plain)
    assert made("skip") == made("raise") == plain


# One process


@given(st.data())
@settings(max_examples=15)
def test_as_one_process_would_decide(data: st.DataObject) -> None:
    """Against all gradients in one process: skipped if a rank's gradient that counts is not finite,
    or the mean of all is not; else their weighted mean."""
    ranks = data.draw(st.integers(1, 3))
    dtype = data.draw(st.sampled_from([torch.float16, torch.float32]))
    numbers = st.sampled_from([0.0, 1.0, -3.0, 60000.0, -60000.0, NAN, INF])
    plain = st.sampled_from([0.0, 1.0, -3.0])
    rows = [
        torch.tensor(data.draw(st.lists(kind, min_size=4, max_size=4)), dtype=dtype)
        for kind in (data.draw(st.sampled_from([plain, plain, numbers])) for _ in range(ranks))
    ]
    weights = [float(data.draw(st.integers(0, 2))) for _ in range(ranks)]
    weights[data.draw(st.integers(0, ranks - 1))] = 1.0
    counting = [(w, row.double()) for w, row in zip(weights, rows, strict=True) if w]
    mean = sum(w * row for w, row in counting) / sum(weights)
    skips = not mean.to(dtype).isfinite().all() or not all(r.isfinite().all() for _, r in counting)

    def run(group: Any) -> Any:
        own = {"w": rows[group.rank]}
        with fddp.GradSync(own, group=group, nonfinite="skip", reduce_dtype=torch.float32) as sync:
            return sync(own, weight=weights[group.rank], with_info=True)

    for grads, info in fddp.loopback(ranks, run):
        assert info.skipped == skips
        assert (grads["w"] is None) == skips
        if not skips:
            # Sums in float32 keep an error of the largest summand where summands cancel.
            largest = max(float((w * row).abs().max()) for w, row in counting)
            rounding = largest * torch.finfo(torch.float32).eps * ranks
            bound = rounding + float(mean.abs().max()) * torch.finfo(dtype).eps
            torch.testing.assert_close(grads["w"].double(), mean, rtol=0.0, atol=bound)


# A rank that is lost after the decision


@pytest.mark.parametrize("call", ["all_gather_in_place", "exchange"])
def test_a_rank_that_is_lost_once_a_step_is_stopped_is_located(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collectives in flight are awaited, and numbers of non-finite gradients exchanged."""
    on_report, is_stopped = FiniteCheck.on_report, threading.Event()

    def noted(self: FiniteCheck, *args: Any) -> None:
        is_stopped.set()
        on_report(self, *args)

    def leave(*_: Any, **__: Any) -> Any:
        is_stopped.wait(10.0)  # of the other rank
        raise KeyboardInterrupt

    def run(group: Any) -> fddp.RankLostError | None:
        params = {"a": torch.ones(4), "b": torch.ones(4)}
        with fddp.GradSync(params, group=group, nonfinite="raise", deterministic=True) as sync:
            if group.rank == 1:
                setattr(sync._engine.transport, call, leave)
            try:
                sync({name: leaf * NAN for name, leaf in params.items()})
            except fddp.RankLostError as error:
                return error
            except KeyboardInterrupt:
                pass
        return None

    monkeypatch.setattr(FiniteCheck, "on_report", noted)
    error, _ = fddp.loopback(2, run)
    assert error is not None
    assert error.step == 0
    if call == "exchange":  # which is of no bucket
        assert str(error).startswith("the exchange of failures of step 0: exchange of counts")
        assert (error.bucket, error.paths) == (-1, ())
    else:
        assert str(error).startswith("bucket 0 (")
        assert "of step 0" in str(error)
        assert (error.bucket, error.paths) == (0, ("b", "a"))
