"""The control word: what is encoded on each rank is read from the sum."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fddp.core.numerics.weighting import WeightScale
from fddp.core.protocol.control_word import (
    MOST_RANKS,
    ControlLayout,
    ControlWord,
    decode,
    encode,
    limb_bits,
)
from tests.support.examples import examples


@st.composite
def steps(draw: st.DrawFn) -> tuple[ControlLayout, list[ControlWord]]:
    leaves, buckets = draw(st.integers(0, 8)), draw(st.integers(0, 4))
    groups = draw(st.integers(0, 3))
    layout = ControlLayout(leaves, buckets, with_order=draw(st.booleans()), groups=groups)
    method = draw(st.integers(0, 15))
    words = [
        ControlWord(
            fingerprint=7,
            weight=float(draw(st.integers(0, 2_000_000))),
            used=draw(st.lists(st.booleans(), min_size=leaves, max_size=leaves)),
            late=draw(st.lists(st.booleans(), min_size=buckets, max_size=buckets)),
            method=method,
            has_next=draw(st.booleans()),
            nonfinite=draw(st.booleans()),
            may_overflow=draw(st.booleans()),
            failed=draw(st.booleans()),
            order=draw(st.permutations(range(leaves)))[: draw(st.integers(0, leaves))]
            if rank == 0
            else (),
            squares=[float(draw(st.integers(0, 1000))) for _ in range(groups)],
        )
        for rank in range(draw(st.integers(1, 5)))
    ]
    return layout, words


@given(steps())
def test_sum_is_equal_on_every_rank(step: tuple[ControlLayout, list[ControlWord]]) -> None:
    layout, words = step
    total = np.sum([encode(layout, word) for word in words], axis=0)
    report = decode(layout, total, fingerprint=7, world_size=len(words))
    assert report.agreed
    assert report.active == sum(word.weight > 0 for word in words)
    assert report.total_weight == sum(word.weight for word in words)
    assert report.total_squared == sum(word.weight**2 for word in words)
    assert report.has_next == sum(word.has_next for word in words)
    assert report.nonfinite == sum(word.nonfinite for word in words)
    assert report.may_overflow == sum(word.may_overflow for word in words)
    assert report.failed == sum(word.failed for word in words)
    assert report.used == tuple(any(flags) for flags in zip(*(w.used for w in words), strict=True))
    late = [b for b in range(layout.buckets) if any(word.late[b] for word in words)]
    assert report.late == tuple(late)
    assert report.order == (tuple(words[0].order) if layout.with_order else ())
    assert report.squares == tuple(map(sum, zip(*(word.squares for word in words), strict=True)))
    assert report.measured == (len(words) if layout.groups else 0)


def test_squares_beyond_float32_are_infinite() -> None:
    layout = ControlLayout(0, 0, format="float32", limb_bits=23, groups=1)
    vector = encode(layout, ControlWord(7, 1.0, (), (), squares=(1e300,)))
    assert decode(layout, vector, fingerprint=7, world_size=1).squares == (math.inf,)


@given(
    st.lists(st.tuples(st.integers(0, 15), st.sampled_from([0.0, 2.5])), min_size=2, max_size=6),
    st.sampled_from([ControlLayout(0, 0), ControlLayout(0, 0, format="float32", limb_bits=21)]),
)
def test_methods_are_alike_on_ranks_that_bring_something(
    ranks: list[tuple[int, float]], layout: ControlLayout
) -> None:
    words = [ControlWord(7, weight, (), (), method=method) for method, weight in ranks]
    total = np.sum([encode(layout, word) for word in words], axis=0, dtype=layout.format)
    report = decode(layout, total, fingerprint=7, world_size=len(words))
    assert report.agreed == (len({method for method, weight in ranks if method and weight}) <= 1)


def test_methods_are_compared_exactly_on_as_many_ranks_as_there_can_be() -> None:
    layout = ControlLayout(0, 0, format="float32", limb_bits=limb_bits("float32", MOST_RANKS))
    word = encode(layout, ControlWord(7, 1.0, (), (), method=15))
    other = encode(layout, ControlWord(7, 1.0, (), (), method=14))
    for last, agreed in (word, True), (other, False):
        total = word * np.float32(MOST_RANKS - 1) + last
        report = decode(layout, total, fingerprint=7, world_size=MOST_RANKS)
        assert report.agreed is agreed


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=6), st.booleans())
def test_a_differing_fingerprint_is_seen(fingerprints: list[int], in_limbs: bool) -> None:
    ranks, layout = len(fingerprints), ControlLayout(0, 0)
    if in_limbs:
        layout = replace(layout, format="float32", limb_bits=limb_bits("float32", ranks))
    total = np.sum([encode(layout, ControlWord(p, 1.0, (), ())) for p in fingerprints], axis=0)
    agreed = [decode(layout, total, fingerprint=p, world_size=ranks).agreed for p in fingerprints]
    # A rank whose own number is the mean of all can't see a difference.
    different = len(set(fingerprints))
    assert all(agreed) if different == 1 else agreed.count(False) >= different - 1


# Limbs

ANY_WEIGHT = st.one_of(
    st.floats(0.0, 1e308),
    st.integers(0, 2**52).map(lambda n: n * 2.0**-1074),  # subnormal ones
    st.tuples(st.floats(0.5, 1.0), st.integers(-1073, 1023)).map(lambda p: math.ldexp(*p)),
    st.sampled_from([0.0, 5e-324, 2.2250738585072014e-308, 1.0, 1e154, 1e308, 1.7e308]),
)


@st.composite
def limbed_steps(draw: st.DrawFn) -> tuple[ControlLayout, list[ControlWord]]:
    """Of 1 to 64 ranks, in either format."""
    layout, (first, *_) = draw(steps())
    ranks = draw(st.integers(1, 64))
    fmt = draw(st.sampled_from(["float32", "float64"]))
    layout = replace(layout, format=fmt, limb_bits=limb_bits(fmt, ranks))
    print_ = draw(st.integers(0, 2**32 - 1))
    weights = draw(st.lists(ANY_WEIGHT, min_size=ranks, max_size=ranks))
    words = [replace(first, fingerprint=print_, weight=weight, order=()) for weight in weights]
    words[0] = replace(words[0], order=first.order)
    return layout, words


@examples(80)
@given(limbed_steps(), st.randoms(use_true_random=False))
def test_limbs_are_independent_of_summation_order(
    step: tuple[ControlLayout, list[ControlWord]], random: Random
) -> None:
    """Their report is that of words in float64 without limbs, whose sums are rounded once."""
    layout, words = step
    plain = replace(layout, format="float64", limb_bits=0)
    exact = []
    for values in zip(*(encode(plain, word).tolist() for word in words), strict=True):
        try:
            exact.append(math.fsum(values))
        except OverflowError:
            exact.append(math.inf)
    vectors = [encode(layout, word) for word in words]
    while len(vectors) > 1:
        one, other = (vectors.pop(random.randrange(len(vectors))) for _ in range(2))
        vectors.append(one + other)
    (total,) = vectors
    assert total.dtype == layout.format
    options = {"fingerprint": words[0].fingerprint, "world_size": len(words)}
    assert decode(layout, total, **options) == decode(plain, np.array(exact), **options)


@given(st.integers(1, 2**16), st.integers(0, 2**32 - 1), ANY_WEIGHT)
def test_limbs_of_many_ranks_are_within_what_the_format_holds(
    ranks: int, print_: int, weight: float
) -> None:
    """Each element is an integer that, summed over all ranks, float32 holds exactly."""
    layout = ControlLayout(1, 1, format="float32", limb_bits=limb_bits("float32", ranks))
    vector = encode(layout, ControlWord(print_, weight, (True,), (True,))).astype(np.float64)
    assert (vector == np.floor(vector)).all()
    assert vector.max(initial=0.0) * ranks <= 2**24
    total = (vector * ranks).astype(np.float32)
    report = decode(layout, total, fingerprint=print_, world_size=ranks)
    assert report.agreed
    assert (report.active, report.users, report.late) == (ranks * (weight > 0), (ranks,), (0,))
    try:
        due = float(Fraction(weight) * ranks)
    except OverflowError:
        due = math.inf
    assert report.total_weight == due


def test_weights_of_one_need_no_correction() -> None:
    scale = WeightScale(3)
    assert scale.before(1.0) == 1.0 / 3.0
    assert scale.after(3.0) == 1.0
