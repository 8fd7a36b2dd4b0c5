"""Cost models: the known formulas, fits, presets, JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fddp.core.sim.cost import PRESETS, CostModel, Sample, factors

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "control")
ALGORITHMS = ("ring", "tree", "direct")

numbers = st.floats(1e-9, 1e-2)
kinds = st.sampled_from(KINDS)
algorithms = st.sampled_from(ALGORITHMS)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "steps"),
    [
        ("ring", 1, 0),
        ("ring", 2, 2),
        ("ring", 8, 14),
        ("tree", 1, 0),
        ("tree", 2, 2),
        ("tree", 5, 6),
        ("tree", 8, 6),
        ("direct", 1, 0),
        ("direct", 2, 2),
        ("direct", 8, 2),
    ],
)
def test_steps_and_share(algorithm: Any, ranks: int, steps: int) -> None:
    share = 2 * (ranks - 1) / ranks
    assert factors("all_reduce", ranks, algorithm) == (steps, share)
    assert factors("control", ranks, algorithm) == (steps, share)
    assert factors("reduce_scatter", ranks, algorithm) == (steps / 2, share / 2)
    assert factors("all_gather", ranks, algorithm) == (steps / 2, share / 2)
    cost = CostModel(3.0, 0.5, algorithm)
    assert cost.time_s("all_reduce", 6, ranks) == 3.0 * steps + 0.5 * share * 6


def samples_of(
    cost: CostModel, keys: list[tuple[Any, int, int]], *, busy: bool = False
) -> list[Sample]:
    slow = cost.overlap if busy else 1.0
    return [Sample(*key, cost.time_s(*key) / slow, busy) for key in keys]


@given(
    numbers,
    numbers,
    st.floats(0.05, 1.0),
    algorithms,
    st.lists(st.tuples(kinds, st.integers(0, 10**9), st.integers(2, 64)), min_size=1, max_size=8),
)
def test_a_fit_finds_the_model_that_made_the_samples(
    alpha_s: float, beta: float, overlap: float, algorithm: Any, keys: list[tuple[Any, int, int]]
) -> None:
    # Two that separate latency and bandwidth in any model: times of nothing and of very much.
    keys += [("all_reduce", 0, 2), ("all_reduce", 10**12, 2)]
    cost = CostModel(alpha_s, beta, algorithm, overlap)
    found = CostModel.fit(
        samples_of(cost, keys) + samples_of(cost, keys[:1], busy=True), algorithm=algorithm
    )
    assert found.alpha_s == pytest.approx(alpha_s, rel=1e-6)
    assert found.beta_s_per_byte == pytest.approx(beta, rel=1e-6)
    assert found.overlap == pytest.approx(overlap)
    assert found.algorithm == algorithm


@given(st.lists(st.tuples(st.integers(1, 10**6), numbers), min_size=2, max_size=6), st.data())
def test_a_fit_errs_least(points: list[tuple[int, float]], data: st.DataObject) -> None:
    points = list({nbytes: (nbytes, time_s) for nbytes, time_s in points}.values())
    points += [(2 * 10**6, 1e-3), (4 * 10**6, 3e-3)]
    samples = [Sample("all_gather", nbytes, 2, time_s) for nbytes, time_s in points]

    def error(cost: CostModel) -> float:
        return sum((cost.time_s(s.kind, s.nbytes, 2) / s.time_s - 1) ** 2 for s in samples)

    found = CostModel.fit(samples)
    alpha_s = data.draw(st.just(found.alpha_s * 1.01) | st.floats(0.0, 1e-2))
    beta = data.draw(st.just(found.beta_s_per_byte * 0.99) | st.floats(0.0, 1e-8))
    assert error(found) <= error(CostModel(alpha_s, beta)) * (1 + 1e-9) + 1e-12


def test_neither_parameter_is_negative() -> None:
    falling = [Sample("all_reduce", 10, 2, 2.0), Sample("all_reduce", 1000, 2, 1.0)]
    assert CostModel.fit(falling).beta_s_per_byte == 0.0
    steep = [Sample("all_reduce", 10, 2, 1.0), Sample("all_reduce", 1000, 2, 1000.0)]
    found = CostModel.fit(steep)
    assert found.alpha_s == 0.0
    assert found.beta_s_per_byte > 0.0


def test_disturbed_samples_are_ignored() -> None:
    cost = CostModel(1e-3, 1e-9)
    keys: list[Any] = [("all_reduce", 8, 2), ("all_reduce", 10**7, 2)]
    samples = [s for s in samples_of(cost, keys) for _ in range(2)]
    samples += [s._replace(time_s=s.time_s * 50) for s in samples_of(cost, keys) for _ in range(3)]
    assert CostModel.fit(samples).alpha_s == pytest.approx(1e-3)
    busy = [s._replace(time_s=s.time_s * 2, busy=True) for s in samples_of(cost, keys)]
    assert CostModel.fit(samples + busy).overlap == pytest.approx(0.5)
    faster = [s._replace(time_s=s.time_s / 2, busy=True) for s in samples_of(cost, keys)]
    assert CostModel.fit(samples + faster).overlap == 1.0


GOOD = Sample("all_reduce", 8, 2, 1.0)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "at least two sizes, got 0 kinds of samples"),
        ([GOOD, GOOD], r"at least two sizes, got 1 kinds of samples, of \[8\] bytes"),
        ([GOOD, Sample("all_gather", 8, 2, 0.5)], "at least two sizes"),
        # All steps and shares in one proportion: 2 and 12, 4 and 24.
        ([Sample("all_reduce", 12, 2, 1.0), Sample("all_reduce", 18, 3, 2.0)], "two sizes"),
        ([GOOD, GOOD._replace(time_s=0.0)], "positive, finite time_s"),
        ([GOOD, GOOD._replace(time_s=math.nan)], "positive, finite time_s"),
        ([GOOD, GOOD._replace(time_s=math.inf)], "positive, finite time_s"),
        ([GOOD, GOOD._replace(ranks=1)], "at least 2 ranks"),
        ([GOOD, GOOD._replace(nbytes=-1)], "nbytes of at least 0"),
        ([GOOD, GOOD._replace(kind="broadcast")], "kind must be one of all_reduce"),  # type: ignore[arg-type]
        (
            [GOOD, GOOD._replace(nbytes=16), GOOD._replace(nbytes=9, busy=True)],
            r"the busy sample of \('all_reduce', 9, 2\)",
        ),
    ],
)
def test_uninformative_samples(samples: list[Sample], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostModel.fit(samples)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, 0.0), r"alpha_s must be a number from 0 to 1e\+09, got -1.0"),
        ((0.0, math.inf), "beta_s_per_byte must be a number from 0"),
        ((math.nan, 0.0), "alpha_s must be"),
        ((True, 0.0), "alpha_s must be"),
        (("1", 0.0), "alpha_s must be"),
        ((0.0, 0.0, "star"), "algorithm must be one of ring, tree, direct, got 'star'"),
        ((0.0, 0.0, "ring", 0.0), "overlap must be a number from 1e-09 to 1, got 0.0"),
        ((0.0, 0.0, "ring", 1.5), "overlap must be a number from 1e-09 to 1, got 1.5"),
    ],
)
def test_bad_models(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostModel(*arguments)


def test_bad_questions() -> None:
    cost, samples = CostModel(1.0, 1.0), [Sample("all_reduce", n, 2, 1e-3) for n in (1, 2)]
    with pytest.raises(ValueError, match=r"kind must be one of .* got 'pack'"):
        cost.time_s("pack", 1, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1 rank, got 0"):
        cost.time_s("all_reduce", 1, 0)
    with pytest.raises(ValueError, match="algorithm must be one of ring, tree, direct, got 'zz'"):
        CostModel.fit(samples, algorithm="zz")  # type: ignore[arg-type]
    for nbytes in (-1, math.nan):
        with pytest.raises(ValueError, match="nbytes must be at least 0"):
            cost.time_s("all_reduce", nbytes, 2)  # type: ignore[arg-type]


@given(numbers, numbers, algorithms, st.floats(0.01, 1.0))
def test_models_survive_json(alpha_s: float, beta: float, algorithm: Any, overlap: float) -> None:
    cost = CostModel(alpha_s, beta, algorithm, overlap)
    assert CostModel.from_json(cost.to_json()) == cost


def test_bad_json() -> None:
    with pytest.raises(ValueError, match="cost JSON: the value lacks"):
        CostModel.from_json(json.dumps({"alpha_s": 1}))
    with pytest.raises(ValueError, match="algorithm must be one of"):
        CostModel.from_json(CostModel(1.0, 1.0).to_json().replace('"ring"', '"star"'))


def test_reprs_have_units() -> None:
    assert repr(PRESETS["ethernet-10g"]) == "CostModel(ring, 35 us a step, 1.25 GB/s, overlap 1)"
    assert (
        repr(CostModel(0.0, 0.0)) == "CostModel(ring, 0 s a step, unlimited bandwidth, overlap 1)"
    )
    sample = Sample("all_gather", 2048, 3, 3.8795999e-05, busy=True)
    assert repr(sample) == "Sample(all_gather of 2 KiB on 3 ranks, in backward: 38.8 us)"


def test_presets_are_in_order() -> None:
    by_rate = sorted(PRESETS, key=lambda name: PRESETS[name].beta_s_per_byte, reverse=True)
    assert by_rate == [
        "internet-100m",
        "internet-1g",
        "ethernet-1g",
        "ethernet-10g",
        "gloo-loopback",
        "ethernet-25g",
        "ethernet-100g",
        "pcie4-x16",
        "infiniband-ndr400",
        "nvlink4",
    ]
    small_s = PRESETS["gloo-loopback"].time_s("all_reduce", 8, 2)
    assert 1.3e-3 <= small_s <= 2.6e-3  # as measured
